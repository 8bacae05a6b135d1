"""Column sums of attention against a dense float64 oracle, over hostile shapes and tile sizes.

Stops: a tile left out or taken twice at an edge, a query that sees the rows after it, heads of a
group in the wrong order, a matrix of heads x queries x rows.
"""

import pytest
import torch

import kernels.select.column_sums as column_sums
from kernels.attention.reference import attend

# queries, rows, heads, kv heads
SHAPES = [
    (1, 1, 4, 2),
    (5, 37, 4, 4),
    (17, 17, 8, 1),
    (16, 100, 4, 2),
    (33, 64, 8, 2),
    (1, 65, 3, 3),
]


def oracle(q, k, first, scale):
    """Weights float64 [Hkv, G, C, T]."""
    count, heads, dim = q.shape
    folded = q.double().view(count, k.shape[0], -1, dim)
    logits = torch.einsum("chgd,htd->hgct", folded, k.double()) * scale
    hidden = torch.arange(k.shape[1]) > torch.arange(count).unsqueeze(1) + first
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [(5, 24), (16, 4096), (1024, 2**22)])
def test_sums_are_the_oracles(shape, tile, dtype, monkeypatch):
    """Error at most twice that of plain torch's softmax in float32 on the same inputs."""
    monkeypatch.setattr(column_sums, "ROWS", tile[0])
    monkeypatch.setitem(column_sums.TILES, "cpu", tile[1])
    count, total, heads, kv_heads = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q, k = (
        torch.randn(n, m, 16, generator=generator).to(dtype)
        for n, m in ((count, heads), (kv_heads, total))
    )
    first = total - count
    exact = oracle(q, k, first, 0.3)
    _, plain = attend(q, k, k, [first + j + 1 for j in range(count)], 0.3, scores=True)
    plain = torch.softmax(plain, -1).view(count, kv_heads, -1, total).permute(1, 2, 0, 3)
    bound = 2 * max(float((plain.sum(2) - exact.sum(2)).abs().max()), count * 2.0**-24)
    assert float((column_sums.column_sums(q, k, first, 0.3) - exact.sum(2)).abs().max()) <= bound
    weights = torch.randn(count, generator=generator)
    weighted = column_sums.column_sums(
        q, k, first, 0.3, each=lambda tile, queries, rows: tile * weights[queries].unsqueeze(1)
    )
    torch.testing.assert_close(
        weighted.double(), (exact * weights.double().unsqueeze(1)).sum(2), atol=1e-5, rtol=1e-5
    )
    warm = column_sums.column_sums(
        q, k, first, 0.3, change=lambda logits, queries, rows: logits / 2.0
    )
    torch.testing.assert_close(
        warm.double(), oracle(q, k, first, 0.15).sum(2), atol=1e-5, rtol=1e-5
    )


def test_no_tile_is_larger_than_it_may_be():
    """32 heads, 4096 queries, 131072 rows: 2^34 scores in tiles of at most 2^18, every pair of
    query and row that it sees once.
    """
    q, k = torch.empty(1, 32, 1).expand(4096, 32, 1), torch.empty(1, 1, 1).expand(8, 131072, 1)
    first, seen = 131072 - 4096, 0
    for queries, rows in (
        (queries, rows) for queries, parts in column_sums.tiles(q, k, first) for rows in parts
    ):
        wide, high = queries.stop - queries.start, rows.stop - rows.start
        assert 32 * wide * high <= column_sums.tile_floats(q.device) == 2**18
        seen += (
            sum(
                min(rows.stop, first + j + 1) - min(rows.start, first + j + 1)
                for j in (queries.start, queries.stop - 1)
            )
            * wide
            // 2
        )
    assert seen == sum(first + j + 1 for j in range(4096))
