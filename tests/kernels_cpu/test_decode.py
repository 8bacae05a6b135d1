"""The CPU backend of the decode kernels against the float64 oracle, on hostile shapes, layouts and
dtypes.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.cpu import token_rows
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.native import library
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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = st.lists(st.sampled_from([1, 2, 7, 63, 64, 65, 127, 1021, 2049]), min_size=1, max_size=3)
FEW = settings(max_examples=25, deadline=None, derandomize=True)
pytestmark = pytest.mark.usefixtures("form")


@FEW
@given(
    lengths=LENGTHS,
    group=st.sampled_from([1, 4, 8]),
    queries=st.sampled_from([1, 3, 8]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["heads", "tokens"]),
    kind=st.sampled_from([None, "softmax", "raw"]),
)
def test_dense(lengths, group, queries, kv_heads, head_dim, dtype, layout, kind):
    check_dense("cpu", "auto", lengths, kv_heads, group, queries, head_dim, dtype, layout, kind)


def test_dense_of_an_empty_sequence():
    check_dense("cpu", "auto", [0, 5], queries=3, kind="softmax")


@FEW
@given(
    lengths=LENGTHS,
    group=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    kind=st.sampled_from(["softmax", "raw"]),
    layout=st.sampled_from(["heads", "tokens"]),
)
def test_window(lengths, group, window, dtype, head_dim, kind, layout):
    check_window("cpu", "auto", lengths, window, 2, group, head_dim, dtype, kind, layout)


@FEW
@given(
    counts=st.lists(st.sampled_from([0, 1, 63, 64, 65, 211]), min_size=1, max_size=3),
    tail=st.sampled_from([1, 8, 65, 319]),
    group=st.sampled_from([1, 4, 8]),
    queries=st.sampled_from([1, 3, 8]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["heads", "tokens"]),
    per_head=st.booleans(),
)
def test_sparse(counts, tail, group, queries, kv_heads, head_dim, dtype, layout, per_head):
    check_sparse(
        "cpu",
        "auto",
        counts,
        [tail] * len(counts),
        kv_heads,
        group,
        queries,
        head_dim,
        dtype,
        layout,
        per_head,
    )


def test_a_tail_alone_is_read_in_place(form):
    """A sliding window chooses nothing: no row is copied, and the bits are those of a copy."""
    generator = torch.Generator().manual_seed(3)
    k, v = make_bank(1, 2, 300, 64, torch.float32, "heads", "cpu", generator)
    q = torch.randn(1, 1, 8, 64, generator=generator)
    scratch = make_scratch(ScratchShape(1, 1, 8, 2, 64, 300, 300), "cpu")
    scratch.rows.fill_(7.0)
    none, ends = torch.zeros(1, 1, 0, dtype=torch.int32), (ints([40], "cpu"), ints([290], "cpu"))
    out = decode_sparse(q, k, v, none, ints([0], "cpu"), *ends, 0.1, scratch)
    assert (scratch.rows == 7.0).all()
    chosen = torch.arange(40, 90, dtype=torch.int32).view(1, 1, -1)
    ends = ints([50], "cpu"), ints([90], "cpu"), ints([290], "cpu")
    assert torch.equal(out, decode_sparse(q, k, v, chosen, *ends, 0.1, scratch))
    # the C++ kernel copies no rows at all
    assert (scratch.rows == 7.0).all() == (form == "native")


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_topk(name):
    generator = torch.Generator().manual_seed(5)
    for n, k in ((1, 1), (64, 64), (65, 64), (997, 1), (997, 200), (9001, 2048), (9001, 9000)):
        check_topk(
            "cpu",
            "auto",
            [hostile_row(name, n, generator), hostile_row(name, n, generator)],
            [0, min(3, n)],
            [n, n - 5],
            [k, k // 2],
            k,
        )


def test_token_rows_are_recognised_and_nothing_else():
    rows = torch.arange(2 * 5 * 2 * 3 * 4).float().view(2, 5, 2, 3, 4)
    k, v = rows.permute(2, 0, 3, 1, 4).unbind(0)
    assert torch.equal(token_rows(k[:, :, :4], v[:, :, :4], 1), rows[1, :4].flatten(1))
    assert (
        token_rows(v, k, 0) is None
        and token_rows(k, k, 0) is None
        and token_rows(k, v.clone(), 0) is None
    )
    heads = torch.zeros(2, 1, 3, 5, 4)
    assert token_rows(heads[0], heads[1], 0) is None


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest storage that any operator creates."""

    def __init__(self):
        super().__init__()
        self.largest, self.known = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        found = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("ties", [False, True])
def test_nothing_that_grows_with_the_context_is_created(dtype, layout, ties):
    """A whole step at 4K and at 16K rows creates tensors of at most the same size, and none of a
    block's size.
    """
    library.try_all()  # a binding's self-test, before its first use, has tensors of its own
    found = []
    for n in (4096, 16384):
        generator = torch.Generator().manual_seed(0)
        k, v = make_bank(1, 2, n + 64, 64, dtype, layout, "cpu", generator)
        q = torch.randn(1, 16, 8, 64).to(dtype)
        largest = ScratchShape(1, 1, 8, 2, 64, n + 64, 128, True, 16, dtype)
        scratch = make_scratch(largest, "cpu")
        scores, out, counts = (
            torch.zeros(1, n + 64),
            torch.zeros(1, 128, dtype=torch.int32),
            ints([0], "cpu"),
        )
        window, alpha = torch.zeros(1, n + 64), torch.ones(16)
        with Sizes() as sizes:
            decode_dense(q[:, -1:], k, v, ints([n], "cpu"), 0.1, scores, "softmax", scratch)
            if ties:
                scores.zero_()
            select_topk(
                scores,
                ints([0], "cpu"),
                ints([n - 256], "cpu"),
                ints([128], "cpu"),
                out,
                counts,
                scratch,
            )
            decode_sparse(
                q[:, -1:],
                k,
                v,
                out.unsqueeze(1),
                counts,
                ints([n - 256], "cpu"),
                ints([n], "cpu"),
                0.1,
                scratch,
            )
            window_scores(q, k, ints([n], "cpu"), 0.1, alpha, "softmax", window, scratch)
        found.append(sizes.largest)
        assert math.isfinite(scores.sum()) and int(counts) == 128
    assert found[0] == found[1] and found[0] <= 16 * 2 * 1024 * 4 * 4, found
