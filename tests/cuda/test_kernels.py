"""The Triton kernels compiled and run on a GPU: the checks of tests/kernels at real sizes, under
CUDA graphs, past 2^31 elements.
"""

import pytest
import torch

from kernels.attention.dense import decode_dense
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.select.topk import select_topk
from kernels.select.window_scores import window_scores
from tests.kernels.support.kernel_checks import (
    HOSTILE_ROWS,
    check_dense,
    check_sparse,
    check_topk,
    check_window,
    hostile_row,
    ints,
    make_bank,
)
from tests.kernels.support.ragged_checks import check_ragged

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (32, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def exact_products():
    """The plain torch beside the kernels must not use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("group, queries", [(1, 1), (4, 1), (8, 3), (4, 8), (16, 8)])
def test_dense_and_sparse(dtype, head_dim, group, queries):
    layout = "tokens" if group == 8 else "heads"
    shape = dict(group=group, queries=queries, head_dim=head_dim, dtype=dtype, layout=layout)
    check_dense("cuda", "triton", [1, 64, 513, 2039], kind="softmax", **shape)
    check_dense("cuda", "triton", [700], kind="raw", **shape)
    for times in (False, True):
        shape |= dict(per_head=group == 4, times=times)
        check_sparse("cuda", "triton", [0, 33, 1000], [8, 64, 300], **shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_heads_of_different_counts(dtype, head_dim, group):
    for counts in ([0, 1, 31, 32, 33], [513, 64, 2039], [20000, 3]):
        for times in (0, 30):
            check_ragged("cuda", "triton", counts, group, head_dim, dtype, times=times)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["softmax", "raw"])
@pytest.mark.parametrize(
    "window, group, head_dim", [(16, 4, 128), (16, 1, 64), (5, 3, 96), (64, 8, 128), (40, 16, 256)]
)
def test_window(dtype, kind, window, group, head_dim):
    check_window(
        "cuda",
        "triton",
        [1, 17, 513, 1500],
        window=window,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        kind=kind,
    )


def test_long_bank():
    check_dense(
        "cuda", "triton", [131072], kv_heads=8, head_dim=128, dtype=torch.bfloat16, kind="softmax"
    )
    check_sparse(
        "cuda", "triton", [2048], [300], kv_heads=8, head_dim=128, dtype=torch.bfloat16, gap=100000
    )
    check_sparse(
        "cuda", "triton", [8192], [6000], kv_heads=8, head_dim=128, dtype=torch.bfloat16, gap=9000
    )


def test_bits_do_not_depend_on_the_capacity():
    results = []
    for extra in (0, 5000, 60000):
        torch.manual_seed(0)
        k, v = torch.randn(2, 1, 2, 3001, 128, device="cuda").bfloat16()
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, extra)) for t in (k, v))
        q, scores = (
            torch.randn(1, 1, 8, 128, device="cuda").bfloat16(),
            torch.zeros(1, 3001 + extra, device="cuda"),
        )
        results.append((decode_dense(q, k, v, ints([3001], "cuda"), 0.1, scores), scores[:, :3001]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("name", HOSTILE_ROWS)
@pytest.mark.parametrize("n, k", [(3000, 300), (131072, 2048), (2**20 - 3, 8192)])
def test_topk(name, n, k):
    generator = torch.Generator().manual_seed(2)
    rows = [hostile_row(name, n, generator) for _ in range(2)]
    scratch = make_scratch(ScratchShape(2, 1, 1, 1, 16, n, scored=True), "cuda")
    for _ in range(2):
        check_topk("cuda", "auto", rows, [0, 70], [n, n - 400], [k, k // 3], k, scratch=scratch)
        assert not scratch.hist.any()
    check_topk("cuda", "auto", rows, [0, 70], [n, n - 400], [k, k // 3], k, span=8192)


def test_offsets_past_31_bits():
    """A token-major bank of 2^31 elements and more (4.5 GB): rows at its end are gathered and
    attended as from a small one.
    """
    rows = 2**31 // (2 * 8 * 128) + 5000
    if torch.cuda.mem_get_info()[0] < 3 * rows * 4096:
        pytest.skip("needs 14 GB of free GPU memory")
    k, v = torch.zeros(1, rows, 2, 8, 128, dtype=torch.float16, device="cuda").permute(
        2, 0, 3, 1, 4
    )
    k[:, :, -600:].normal_()
    v[:, :, -600:].normal_()
    q = torch.randn(1, 1, 32, 128, device="cuda").half()
    index = torch.arange(rows - 600, rows - 300, 3, device="cuda", dtype=torch.int32).view(1, 1, -1)
    far = decode_sparse(
        q, k, v, index, ints([100], "cuda"), ints([rows - 300], "cuda"), ints([rows], "cuda"), 0.1
    )
    near = decode_sparse(
        q,
        k[:, :, -600:],
        v[:, :, -600:],
        index - (rows - 600),
        ints([100], "cuda"),
        ints([300], "cuda"),
        ints([600], "cuda"),
        0.1,
    )
    assert torch.equal(far, near)
    out = decode_dense(q, k, v, ints([rows], "cuda"), 5.0)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, scale=5.0, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, exact, atol=5e-3, rtol=5e-3)


def test_a_captured_step_follows_lengths_and_allocates_nothing():
    """All kernels of a step in one CUDA graph: replayed at another length it gives what eager gives
    there, bit for bit.
    """
    torch.manual_seed(0)
    capacity, heads, kv_heads, dim, room = 8192, 32, 8, 128, 512
    generator = torch.Generator().manual_seed(4)
    k, v = make_bank(1, kv_heads, capacity, dim, torch.bfloat16, "tokens", "cuda", generator)
    q = torch.randn(1, 1, heads, dim, device="cuda").bfloat16()
    window, alpha = (
        torch.randn(1, 16, heads, dim, device="cuda").bfloat16(),
        torch.ones(16, device="cuda"),
    )
    largest = ScratchShape(1, 1, heads, kv_heads, dim, capacity, room, True, 16)
    scratch = make_scratch(largest, "cuda")
    lengths, start, zero, wanted = (
        ints([5000], "cuda"),
        ints([4700], "cuda"),
        ints([0], "cuda"),
        ints([room], "cuda"),
    )
    scores, sums = torch.zeros(2, 1, capacity, device="cuda")
    index, counts = torch.zeros(1, 1, room, dtype=torch.int32, device="cuda"), ints([0], "cuda")

    def step():
        dense = decode_dense(q, k, v, lengths, 0.1, scores, "softmax", scratch)
        window_scores(window, k, lengths, 0.1, alpha, "softmax", sums, scratch)
        select_topk(scores, zero, start, wanted, index[:, 0], counts, scratch)
        return dense, decode_sparse(q, k, v, index, counts, start, lengths, 0.1, scratch)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for n in (5000, 8191, 700):
        lengths.fill_(n)
        start.fill_(max(0, n // 64 * 64 - 256))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        found = [t.clone() for t in (*captured, scores, sums, index)]
        assert all(torch.equal(a, b) for a, b in zip(found[:2], step()))
        assert all(torch.equal(a, b) for a, b in zip(found[2:], (scores, sums, index)))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        graph.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
