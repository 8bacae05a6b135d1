"""Attention of several queries of which the last leaves its scores, in one pass.

Stops: scores of another query, logits of a tile's wrong rows, an attention that scores change, rows
that a tile fetches and reads past a split or an end.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT
from kernels.native.library import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SEAMS = [8, 511, 513, SPLIT - 1, SPLIT + 1, SPLIT + 513, 2 * SPLIT + 1, 3 * SPLIT - 7]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.sampled_from(SEAMS),
    group=st.sampled_from([1, 2, 3, 4, 5, 8]),
    queries=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["softmax", "raw"]),
    threads=st.sampled_from([1, 2]),
)
def test_the_last_query_leaves_its_scores(length, group, queries, dtype, kind, threads):
    """Beside float64, at most twice as wrong as float32; nothing is written beyond the length. What
    comes of it is near what it is without scores, to the bit where that takes the same kernel.
    """
    generator = torch.Generator().manual_seed(length + queries)
    q = torch.randn(1, queries, 2 * group, 32, generator=generator).to(dtype)
    k, v = (torch.randn(1, 2, length + 9, 32, generator=generator).to(dtype) for _ in range(2))
    lengths, scores = torch.tensor([length]), torch.full((1, length + 9), 7.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain = decode_dense(q, k, v, lengths, 0.2, backend="cpu")
        found = decode_dense(q, k, v, lengths, 0.2, scores, kind)
        single = torch.full((1, length + 9), 7.0)
        decode_dense(q[:, -1:], k, v, lengths, 0.2, single, kind)
    finally:
        torch.set_num_threads(before)
    wide = k[0, :, :length].double().repeat_interleave(group, 0)
    logits = 0.2 * torch.einsum("hd,htd->ht", q[0, -1].double(), wide)
    oracle = (torch.softmax(logits, -1) if kind == "softmax" else logits).amax(0)
    torch.testing.assert_close(scores[0, :length].double(), oracle, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores, single) or (scores - single).abs().max() < 1e-5
    assert (scores[0, length:] == 7).all()
    alone = [
        decode_dense(q[:, j : j + 1], k, v, lengths - (queries - 1 - j), 0.2)
        for j in range(queries)
    ]
    tight = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=tight, atol=tight)
    torch.testing.assert_close(found, plain, rtol=tight, atol=tight)
