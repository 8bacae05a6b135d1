"""A step that breaks off inside the top-k: its histogram is half counted, and the next step must
not see it.

Stops: a selection that reports more entries than it wrote, so that a sparse layer reads row -1 or
the rows of the step before.
"""

import pytest
import torch

import kernels.select.topk
from engine import OmniKV
from tests.builders import random_ids, session_config, tiny_llm

METHOD = OmniKV(filter_layers=(0,), tokens=16, tail=64, dense_below=0)
CONFIG = session_config(layers=3)


class Broken(Exception):
    pass


class BreaksOff:
    """A kernel that works for `good` launches, then raises once."""

    def __init__(self, kernel, good):
        self.kernel, self.left = kernel, good

    def __getitem__(self, grid):
        self.left -= 1
        if self.left == -1:
            raise Broken
        return self.kernel[grid]


@pytest.fixture(scope="module")
def read():
    """A session that has read a prompt; the tests go on in forks of it."""
    session = tiny_llm(METHOD, CONFIG, backend="triton", max_context=256, chunk=128).session()
    session.prefill(random_ids(150))
    return session


@pytest.fixture(scope="module")
def expected(read):
    """Logits and selection of the second of two steps that nothing breaks off."""
    with read.fork() as session:
        session.decode(3)
        return session.decode(4), session.selections[0]


@pytest.mark.parametrize(
    ("what", "name", "good"),
    [
        ("decode", "digit_kernel", 0),
        ("decode", "digit_kernel", 1),
        ("decode", "count_kernel", 0),
        ("decode", "emit_kernel", 0),
        ("check", "digit_kernel", 1),
    ],
)
def test_a_step_that_broke_off_leaves_no_counts(read, expected, what, name, good, monkeypatch):
    """At each of the launches between the first count, by the attention before, and the last
    clearing.
    """
    session = read.fork()
    session.decode(3)
    with monkeypatch.context() as patch:
        patch.setattr(
            kernels.select.topk, name, BreaksOff(getattr(kernels.select.topk, name), good)
        )
        with pytest.raises(Broken):
            session.decode(4) if what == "decode" else session.check(1)
    assert not session.runtime.setup.scratch.hist.any()
    assert len(session) == 151
    assert torch.equal(session.decode(4), expected[0])
    assert session.selections[0].equal(expected[1])
    assert session.stats.sparse_steps == 2
    session.close()
