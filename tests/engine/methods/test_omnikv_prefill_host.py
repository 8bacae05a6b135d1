"""OmniKV-prefill over the host tier: the answers of the device tier, and over the link only the
rows that the selections name.

Stops: whole layers copied for a few of their rows, a row brought over twice, a row that was not
brought over, a block begun ahead for a layer whose rows are not written yet, device memory that no
plan counts.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import engine.plan.placement as placement
from engine.base.figures import human
from engine.load.link_bytes import prompt_link_bytes
from engine.plan.placement import part_bytes
from tests.builders import random_ids, tiny_llm
from tests.engine.methods.test_omnikv_prefill import (
    BLOCK,
    CAPACITY,
    CONFIG,
    PROMPT,
    WEIGHTS,
    Oracle,
    blocks_of,
    method_of,
)

SPARSE = {3: 1, 6: 4, 7: 4}  # sparse layer: its filter
LAST = CONFIG.num_layers - 1


def session_of(method, offload, chunk, backend="auto"):
    """A session of a fresh LLM with its sparse layers on the device or in host memory."""
    settings = dict(max_context=CAPACITY, chunk=chunk, backend=backend, offload=offload)
    return tiny_llm(method, CONFIG, WEIGHTS, **settings).session()


class Link:
    """Counts by hand, chunk after chunk, the rows that must come from host memory."""

    def __init__(self, session, chunk, ratio, total, dense_end, room):
        self.session, self.chunk, self.ratio = session, chunk, ratio
        self.total, self.dense_end, self.room = total, dense_end, room
        self.begin = self.rows = 0

    def __call__(self, progress):
        """Called after a chunk: what its blocks chose is still there."""
        begin, stop = self.begin, progress.done
        chosen = {
            key: set(index.tolist())
            for key, index in self.session.runtime.prefill.selections().items()
        }
        for layer, filter_layer in SPARSE.items():
            if layer == LAST and stop < self.total:
                continue
            blocks = list(
                blocks_of(begin, self.total, self.total, self.chunk, self.ratio, self.dense_end)
            )
            here = [b for b in blocks if b[1] <= stop and (layer < LAST or b[1] == stop)]
            while here:
                # neighbours that are all read densely, or all sparsely
                run = [here.pop(0)]
                while here and (here[0][2] is None) == (run[0][2] is None):
                    run.append(here.pop(0))
                self.rows += self.of_run(run, begin, chosen, filter_layer)
        self.begin = stop

    def of_run(self, run, begin, chosen, filter_layer):
        if run[0][2] is None:
            return begin
        rows = 0
        while run:
            base, part = min(run[0][2], begin), [run.pop(0)]
            while run:
                wanted = (len(part) + 1) * self.ratio * BLOCK
                if min(wanted, base) + run[0][1] - base > self.room:
                    break
                part.append(run.pop(0))
            named = set().union(*(chosen[filter_layer, first] for first, _, _ in part))
            rows += len([p for p in named if p < base]) + begin - base
        return rows


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    ratio=st.integers(1, 3),
    chunk=st.sampled_from([37, 64, 100, 256, 999]),
    length=st.integers(300, len(PROMPT)),
    dense_end=st.sampled_from([0, 1, 90, 200]),
    block=st.sampled_from([64, 300, 49152]),
)
def test_answers_and_bytes(monkeypatch, ratio, chunk, length, dense_end, block):
    """Logits against float64 and the device tier, and every byte of the link against a count by
    hand; `block`: rows of a stream block.
    """
    monkeypatch.setattr(placement, "STREAM_BLOCK", block)
    method, prompt = method_of(ratio, prefill_dense_end=dense_end), PROMPT[:length]
    expected = Oracle(ratio, dense_end=dense_end).read(prompt, chunk)
    with session_of(method, "device", chunk) as device, session_of(method, "host", chunk) as host:
        link = Link(host, chunk, ratio, length, dense_end, host.bank.placement.block)
        logits = host.prefill(prompt, progress=link)
        np.testing.assert_allclose(logits.numpy(), expected, atol=2e-4)
        torch.testing.assert_close(logits, device.prefill(prompt), atol=1e-4, rtol=0)
        assert host.runtime.prefill.rows_read == device.runtime.prefill.rows_read
        assert host.stats.bytes_streamed == link.rows * part_bytes(CONFIG, 4)
        assert host.bank.nbytes == planned(host)
        bytes_planned = prompt_link_bytes(
            CONFIG, method, host.bank.placement, 4, chunk, CAPACITY, length
        )
        assert host.stats.bytes_streamed <= bytes_planned


def planned(session):
    """Bytes that the plan gives the bank."""
    names = ("context bank", "working sets", "streaming")
    plan = session.planner.plan()
    return sum(size for name, size, _ in plan.items if name in names)


@pytest.mark.parametrize("chunk", [100, 256])
def test_reference_launchers_give_the_same_bits(chunk):
    method = method_of(1)
    with (
        session_of(method, "device", chunk, "reference") as device,
        session_of(method, "host", chunk, "reference") as host,
    ):
        assert torch.equal(host.prefill(PROMPT), device.prefill(PROMPT))
        for token in (3, 5):
            assert torch.equal(host.decode(token), device.decode(token))
        more = random_ids(300, seed=3)
        assert torch.equal(host.prefill(more), device.prefill(more))
        assert host.runtime.prefill.rows_read > 0


@pytest.mark.parametrize("chunk, share", [(64, 0.5), (100, 0.8)])
def test_fewer_bytes_than_exact_prefill(chunk, share, monkeypatch):
    """The point of it: the same prompt, read exactly, streams up to twice as much, to the byte
    what the plan says; and a sparse one at most what the plan says.
    """
    monkeypatch.setattr(placement, "STREAM_BLOCK", 300)
    read, planned_bytes = [], []
    for ratio in (1, None):
        method, prompt = method_of(ratio), random_ids(CAPACITY, seed=2)
        with session_of(method, "host", chunk) as session:
            session.prefill(prompt)
            read.append(session.stats.bytes_streamed)
            plan = session.planner.plan()
            planned_bytes.append(plan.prompt_link_bytes)
            assert human(plan.prompt_link_bytes) in str(plan)
    assert read[0] < share * read[1] and read[1] == planned_bytes[1]
    assert read[0] <= planned_bytes[0] < read[1]


def test_logits_read_again_after_generated_tokens():
    """Tokens that were decoded since the prompt lie in the ring only; a part of the prompt that is
    read again may choose them.
    """
    method = method_of(1, prefill_dense_end=0)
    with session_of(method, "device", 256) as device, session_of(method, "host", 256) as host:
        for session in (device, host):
            session.prefill(PROMPT[:500])
            for token in range(40):
                session.decode(token)
            session.refresh_logits()
        torch.testing.assert_close(host.last_logits, device.last_logits, atol=1e-4, rtol=0)
