"""Heads that hold different numbers of rows, interpreted, against the float64 oracle on hostile
shapes.

Stops: a head that reads another's rows, a split of the longest head merged into a shorter one's,
a scratch that is too small for short splits.
"""

import pytest
import torch

import kernels.attention.ragged
from engine.methods.evict.ada_snapkv import AdaSnapKV
from engine.methods.evict.razor import Razor
from kernels.attention.ragged import decode_ragged, ragged_split
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.launch.shapes import DENSE_SPLIT
from kernels.rows.forms import FORMS
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.kernels.support.ragged_checks import check_ragged, flat_store

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "counts, shape",
    [
        ([1, 2], {}),
        ([31, 32, 33, 0], dict(group=1, head_dim=32)),
        ([127, 128, 129], dict(group=8, head_dim=128, dtype=BF16)),
        ([63, 64, 65], dict(group=4, head_dim=40, dtype=F16, spare=300)),
        ([0, 0], dict(group=4)),
        ([101, 7, 0, 257], dict(group=3, head_dim=96, dtype=BF16)),
        ([509, 1], dict(group=8, head_dim=16)),
        ([37], dict(group=20, head_dim=64, spare=1)),
    ],
)
def test_each_head_attends_to_its_own_rows(counts, shape):
    check_ragged("cpu", "triton", counts, **shape)


@pytest.mark.parametrize("form", FORMS)
def test_packed_rows(form):
    check_ragged("cpu", "triton", [100, 1, 0, 27], 4, 64, form=form)
    check_ragged("cpu", "triton", [33, 1, 0], 4, 64, form=form, times=9)


@pytest.mark.parametrize(
    "counts, shape",
    [
        ([31, 32, 33, 0, 1], dict(group=1, head_dim=32)),
        ([63, 65], dict(group=4, head_dim=64, dtype=BF16)),
        ([0, 129], dict(group=8, head_dim=128, dtype=F16, spare=300)),
    ],
)
def test_a_row_that_counts_n_times_is_n_rows(counts, shape):
    """And once each is no logs at all, to the bit."""
    check_ragged("cpu", "triton", counts, times=100, **shape)
    plain, once = (check_ragged("cpu", "triton", counts, times=t, **shape) for t in (0, 1))
    assert torch.equal(plain, once)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("chunk", [64, 4])
def test_a_sessions_scratch_decides_how_short_splits_are(chunk, apart, monkeypatch):
    """Of 333 rows it takes one result a head, or one of each 32; one level of merging or two, in
    the kernel or apart. The next call finds the tickets at zero.
    """
    monkeypatch.setattr(kernels.attention.ragged, "SPARSE_CHUNK", chunk)
    for capacity, splits in ((333, 1), (40 * DENSE_SPLIT, 11)):
        scratch = make_scratch(ScratchShape(1, 1, 6, 3, 16, capacity), "cpu", "triton")
        scratch.part.fill_(float("nan"))
        assert -(-333 // ragged_split(333, 3, 132, scratch.lse.numel() // 6)) == splits
        scratch = scratch.merging_apart() if apart else scratch
        for _ in range(1 if apart else 2):
            check_ragged("cpu", "triton", [333, 3, 0], 2, 16, scratch=scratch)
        assert not scratch.tickets.any()


def test_splits_fit_the_card_and_the_scratch():
    assert ragged_split(100_000, 8, 132, 10**6) == 256
    assert ragged_split(2048, 8, 132, 64) == 32
    assert ragged_split(2048, 8, 132, 16) == 128
    assert ragged_split(2048, 8, 132, 4) == DENSE_SPLIT
    k, v, starts, lengths = flat_store([600, 1], 16, F32, "cpu", torch.Generator().manual_seed(0))
    small = make_scratch(ScratchShape(1, 1, 4, 2, 16, 500), "cpu", "triton")
    with pytest.raises(ValueError, match="scratch.part: found 64 elements, this call needs 128"):
        decode_ragged(torch.ones(1, 1, 4, 16), k, v, starts, lengths, 600, 0.2, small, "triton")


HEADS = ((0.9, 0.1), (0.2, 0.8))


@pytest.mark.parametrize(
    "method",
    [
        AdaSnapKV(tokens=20, window=8, alpha=1.0),
        # rows that count several times: one head of a layer drops
        Razor(heads=(HEADS, HEADS), induction=0.5, echo=0.0, recent=9, compression=99),
    ],
    ids=lambda method: method.name,
)
def test_a_session_steps_as_the_reference_does(method):
    """Its scratch and its tables are the session's own; rows are put by torch."""
    config, seen = tiny_config(layers=2, heads=4, kv_heads=2, hidden=32, head_dim=16), []
    weights, ids = tiny_weights(config, seed=2), random_ids(70)
    for backend in ("triton", "reference"):
        settings = dict(max_context=128, chunk=64, backend=backend)
        with tiny_llm(method, config, weights, **settings).session() as session:
            logits = [session.prefill(ids[:60])]
            parts = [list(part) for part in session.runtime.sequences[0].layers]
            assert all(len({rows.held for rows in part}) == 2 for part in parts)
            seen.append(torch.stack(logits + [session.decode(token) for token in ids[60:64]]))
            assert max(session.runtime.rows_read(len(session))) < 45
    assert (seen[0] - seen[1]).abs().max() < 1e-4 * seen[1].abs().max()
