"""Methods that evict, over devices with the whole bank beside their stores: each part has the
stores of its own layers, and a session goes back to what they were together.
"""

from dataclasses import replace

import pytest
import torch

from engine import Full
from engine.base.errors import SettingError
from engine.methods.evict.pyramidkv import PyramidKV
from engine.methods.evict.random_eviction import RandomEviction
from engine.methods.split.allowed import EVICT
from engine.methods.split.stores import joined, shares
from tests.engine.methods.method_table import ROWS
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_sessions import one_of, several


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def method_of(name):
    """A method that cuts, beside a bank of all rows."""
    rows = [m for row in ROWS for m in row.sparse or (row.neutral,)]
    found = [m for m in (*rows, RandomEviction(tokens=40)) if m.name == name]
    return replace(found[0], forget=False)


def walked(llm):
    """Logits of two prompts, an answer, the way back into it and before it, and of a fork."""
    with llm.session() as session:
        found = [session.prefill(ids_of(170))]
        found += [session.decode(token) for token in ids_of(5, seed=9)]
        found.append(session.prefill(ids_of(70, seed=3)))
        found.append(session.decode(7))
        with session.fork() as other:
            found.append(other.decode(8))
        session.truncate(173)
        found += [session.decode(token) for token in ids_of(4, seed=8)]
        session.truncate(120)
        found.append(session.decode(7))
        runtime, stats = session.runtime, session.stats
        return torch.stack(found), (runtime.nbytes, stats.store_bytes, stats.rows_read_sparse)


# one of each kind of store; `python -m tests.programs.devices` runs all of EVICT
KINDS = (
    "ada_pyramid",
    "expected_attention",
    "h2o",
    "keyformer",
    "random_eviction",
    "snapkv",
    "streaming_llm",
    "vase",
)


@pytest.mark.parametrize("name", KINDS)
def test_stores_of_parts_are_one_device_s(folder, name):
    assert name in EVICT
    method = method_of(name)
    (want, counted), (found, mine) = (
        walked(make(folder, method=method)) for make in (one_of, several)
    )
    assert torch.equal(found, want) and mine == counted


def test_a_pyramid_is_of_all_layers(folder):
    method = PyramidKV(tokens=40, forget=False, window=8)
    several_ = several(folder, ("cpu",) * 3, split=(1, 2, 4), method=method)
    assert torch.equal(walked(several_)[0], walked(one_of(folder, method=method))[0])


def test_states_of_parts_are_joined_and_shared_again():
    starts = (0, 2, 3, 7)
    layers = [[("part", layer)] for layer in range(7)]
    for held, sums in ((layers, None), (None, list(range(7))), (None, None)):
        whole = (90, (0, 90, False, 90), list(range(7)) if held else [], held, sums)
        parts = shares(whole, starts)
        assert joined(parts) == whole
        assert [len(part[3] or ()) for part in parts] == ([2, 1, 4] if held else [0, 0, 0])
    assert joined([parts[0], None]) is None


def test_a_session_that_forgets_is_refused(folder):
    llm = several(folder, method=Full())
    with pytest.raises(SettingError, match="but it holds no rows .* use forget=False"):
        llm.session(method=replace(method_of("snapkv"), forget=True))
