"""Dense and sparse flash-decoding and window scores, interpreted, against the float64 oracle on
hostile shapes.
"""

import pytest
import torch

import kernels.attention.dense
import kernels.attention.scratch
from kernels.attention.dense import decode_dense
from kernels.attention.sparse import decode_sparse
from kernels.attention.split import TAIL_ROOM, most_sparse_splits, sparse_split, sparse_splits
from kernels.launch.shapes import Card, imagined
from kernels.select.window_scores import window_scores
from tests.kernels.support.kernel_checks import check_dense, check_sparse, check_window, ints

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "lengths, shape",
    [
        ([1, 2], dict(kind="softmax")),
        ([63, 64, 65, 127], dict(head_dim=128, kv_heads=1, kind="raw")),
        ([511, 512, 513], dict(head_dim=32, group=1, kv_heads=3, kind="softmax", layout="tokens")),
        ([1021], dict(head_dim=96, group=8, dtype=BF16, kind="softmax", layout="tokens")),
        ([0, 131], dict(head_dim=40, group=3, dtype=F16, kind="softmax")),
        ([7, 601], dict(queries=3, group=4, kind="softmax")),
        ([3, 8, 530], dict(queries=8, group=1, head_dim=128, dtype=BF16, kind="raw")),
        ([97], dict(queries=8, group=16, head_dim=32, kv_heads=1, dtype=BF16)),
        ([200, 1], dict(head_dim=256, group=2, dtype=F16, kv_heads=1)),
        ([300], dict(group=1, dtype=BF16, head_dim=128, layout="tokens")),
        # four query tiles
        ([77], dict(queries=8, group=16, head_dim=256, kv_heads=1, dtype=F16, kind="softmax")),
        # two query tiles, the last partly full, under two kv heads
        ([77], dict(queries=5, group=8, head_dim=96, kv_heads=2, kind="raw")),
        # latent attention: its query heads are dealt to programs of at most 16
        ([130, 1], dict(head_dim=576, group=16, kv_heads=1, dtype=BF16, kind="softmax")),
        ([513], dict(head_dim=320, group=32, kv_heads=1, dtype=BF16, layout="tokens")),
        ([67], dict(queries=3, head_dim=288, group=40, kv_heads=1, kind="raw")),
        ([33], dict(queries=2, head_dim=576, group=20, kv_heads=1, dtype=F16, kind="softmax")),
    ],
)
def test_dense(lengths, shape):
    check_dense("cpu", "triton", lengths, **shape)


def test_dense_two_merge_levels_give_the_same_bits(monkeypatch):
    """33 splits by two levels of merging; then few rows in a large bank, equal bit for bit to the
    same rows in a small one.
    """
    # half of what ships, for speed: a program still merges more than 16 splits, its inner loop
    monkeypatch.setattr(kernels.attention.dense, "MERGE_CHUNK", 32)
    monkeypatch.setattr(kernels.attention.scratch, "MERGE_CHUNK", 32)
    check_dense("cpu", "triton", [16700], kv_heads=1, group=2, head_dim=16, kind="softmax")
    small = check_dense("cpu", "triton", [700], kv_heads=1, head_dim=16, kind="softmax", extra=0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, 1, 700, 16, generator=generator)
    q = torch.randn(1, 1, 4, 16, generator=generator)
    bank = torch.full((2, 1, 1, 20000, 16), float("nan"))
    bank[:, :, :, :700] = rows
    scores = torch.zeros(1, 20000)
    out = decode_dense(q, bank[0], bank[1], ints([700], "cpu"), 0.25, scores, backend="triton")
    assert torch.equal(out, small[0]) and torch.equal(scores[:, :700], small[1])


@pytest.mark.parametrize(
    "counts, tails, shape",
    [
        ([1, 0], [1, 3], dict()),
        ([31, 32, 33], [64, 63, 1], dict(head_dim=32, group=1, kv_heads=3)),
        ([257], [130], dict(head_dim=128, dtype=BF16, kv_heads=1, layout="heads")),
        ([100, 7], [20, 90], dict(head_dim=96, group=8, dtype=F16, per_head=True)),
        ([64, 65], [9, 8], dict(queries=8, group=4, dtype=BF16, per_head=True)),
        ([50], [12], dict(queries=3, group=1, head_dim=40)),
        ([40], [20], dict(queries=8, group=16, head_dim=32, kv_heads=1, dtype=BF16)),
        ([40], [20], dict(queries=5, group=8, head_dim=96, kv_heads=2)),
        ([65, 3], [20, 1], dict(head_dim=576, group=16, kv_heads=1, dtype=BF16)),
        ([40], [31], dict(queries=3, head_dim=288, group=40, kv_heads=1)),
        ([33], [64], dict(head_dim=320, group=32, kv_heads=1, dtype=F16, layout="heads")),
        ([0], [1100], dict(kv_heads=1, head_dim=32)),
        ([300, 5], [1500, 2], dict(kv_heads=1, head_dim=32, budget=400)),
        ([[1, 70], [33, 0]], [3, 20], dict(head_dim=32, group=1)),
        ([[0, 130, 64, 1]], [5], dict(kv_heads=4, head_dim=32, group=4, queries=3, dtype=BF16)),
        ([[300, 9], [1, 17]], [1300, 2], dict(head_dim=16, group=8, budget=320)),
    ],
)
def test_sparse(counts, tails, shape):
    check_sparse("cpu", "triton", counts, tails, **shape)


@pytest.mark.parametrize(
    "counts, tails, shape",
    [
        ([1, 0], [1, 3], dict(group=1, head_dim=32)),
        ([65, 3], [20, 3], dict(group=8, queries=3, dtype=BF16, head_dim=32)),
        ([300], [70], dict(kv_heads=1, head_dim=16, budget=317, per_head=True)),
    ],
)
def test_chosen_rows_that_count_several_times(counts, tails, shape):
    check_sparse("cpu", "triton", counts, tails, **shape, times=True)


@pytest.mark.parametrize("sms", [8, 48, 132, 160])
def test_sparse_on_cards_of_any_size(sms):
    """Boards have 8 SMs (Jetson Orin Nano) or 48 (DGX Spark): their splits are longer, and scratch
    is sized for them. Results are right on each.
    """
    with imagined(Card((8, 0), sms)):
        check_sparse("cpu", "triton", [1200], [100], kv_heads=1, head_dim=32, budget=1300)
    for kv_heads in (1, 2, 8, 32):
        for budget in (64, 500, 2048, 8192):
            split = sparse_split(budget, kv_heads, sms)
            splits = sparse_splits(budget, kv_heads, sms)
            assert kv_heads * splits >= 2 * sms or split == 32
            assert split == 256 or kv_heads * -(-(budget + TAIL_ROOM) // (2 * split)) < 2 * sms
            assert splits <= most_sparse_splits(8192, kv_heads, sms)
    shape = kernels.attention.scratch.ScratchShape(1, 1, 8, 8, 64, 1, 2048)
    sizes = {}
    for count in (8, sms):
        with imagined(Card((8, 0), count)):
            made = kernels.attention.scratch.make_scratch(shape, "meta", "triton")
            sizes[count] = made.part.numel()
    assert (sizes[sms] > sizes[8]) == (sms > 8)


def test_sparse_grid_fills_a_gpu_and_scratch_covers_every_budget():
    """2048 tokens under 8 kv heads fill 132 SMs twice, and no smaller budget needs more splits than
    its scratch has room for.
    """
    assert 8 * sparse_splits(2048, 8) >= 2 * 132 and sparse_split(2048, 8) == 64
    for kv_heads in (1, 2, 4, 8, 32):
        for budget in (*range(1, 700, 7), 1024, 2048, 8192, 131072):
            assert (
                sparse_splits(budget, kv_heads) * sparse_split(budget, kv_heads)
                >= budget + TAIL_ROOM
            )
            assert sparse_splits(budget, kv_heads) <= most_sparse_splits(
                131072 if budget > 8192 else 8192, kv_heads
            )


@pytest.mark.parametrize(
    "lengths, shape",
    [
        ([1, 9, 17], dict()),
        ([513, 200], dict(head_dim=128, dtype=BF16, kv_heads=1)),
        ([130], dict(window=5, group=3, head_dim=96, dtype=F16, layout="tokens")),
        ([530, 3], dict(kind="raw", group=1, head_dim=32)),
        ([300, 20], dict(window=40, group=12, head_dim=32, kv_heads=1, dtype=BF16)),
        ([70], dict(window=64, group=16, head_dim=32, kv_heads=2, kind="raw")),
    ],
)
def test_window(lengths, shape):
    check_window("cpu", "triton", lengths, **shape)


@pytest.fixture(scope="module")
def huge():
    """A bank whose second half starts past 2^31 elements: 4.3 GB of address space, of which a few
    pages are touched.
    """
    try:
        return torch.empty(2**31 + 2**20, dtype=F16)
    except RuntimeError as error:
        pytest.skip(f"this machine does not reserve 4.3 GB: {error}")


def far_bank(huge, rows, dim):
    """K, V [1, 2, rows, dim]: the second kv head lies past 2^31 elements; filled, and the same in a
    small bank.
    """
    generator = torch.Generator().manual_seed(1)
    small = torch.randn(2, 1, 2, rows, dim, generator=generator).half()
    views = [
        torch.as_strided(huge, (1, 2, rows, dim), (1, 2**31, dim, 1), part * 2**18)
        for part in range(2)
    ]
    for view, values in zip(views, small):
        view.copy_(values)
    return views, small


def test_offsets_past_31_bits_heads(huge):
    (k, v), small = far_bank(huge, 600, 32)
    q, alpha = torch.randn(1, 2, 4, 32).half(), torch.ones(2)
    lengths, scale = ints([600], "cpu"), 32**-0.5
    scores = torch.zeros(3, 1, 600)
    index = torch.arange(0, 500, 7, dtype=torch.int32).view(1, 1, -1)
    rest = (index, ints([index.shape[2]], "cpu"), ints([560], "cpu"), lengths, scale)
    for far, near in (
        (
            decode_dense(q, k, v, lengths, scale, scores[0], backend="triton"),
            decode_dense(q, *small, lengths, scale, scores[1], backend="triton"),
        ),
        (
            decode_sparse(q, k, v, *rest, backend="triton"),
            decode_sparse(q, *small, *rest, backend="triton"),
        ),
    ):
        assert torch.equal(far, near)
    assert torch.equal(scores[0], scores[1])
    window_scores(q, k, lengths, scale, alpha, "softmax", scores[0], backend="triton")
    window_scores(q, small[0], lengths, scale, alpha, "softmax", scores[1], backend="triton")
    assert torch.equal(scores[0], scores[1])


def test_offsets_past_31_bits_rows(huge):
    """Rows so far apart that the offset inside one split passes 31 bits, and gathered rows past
    2^31 elements.
    """
    rows, step = 500, 2**22
    k = torch.as_strided(huge, (1, 1, rows, 32), (1, 1, step, 1))
    small = torch.randn(2, 1, 1, rows, 32).half()
    k.copy_(small[0])
    v = torch.as_strided(huge, (1, 1, rows, 32), (1, 1, step, 1), 64)
    v.copy_(small[1])
    assert step * rows < huge.numel()
    q, lengths, scale = torch.randn(1, 1, 4, 32).half(), ints([rows], "cpu"), 32**-0.5
    index = torch.arange(300, 490, 3, dtype=torch.int32).view(1, 1, -1)
    rest = (index, ints([index.shape[2]], "cpu"), ints([495], "cpu"), lengths, scale)
    assert torch.equal(
        decode_dense(q, k, v, lengths, scale, backend="triton"),
        decode_dense(q, *small, lengths, scale, backend="triton"),
    )
    assert torch.equal(
        decode_sparse(q, k, v, *rest, backend="triton"),
        decode_sparse(q, *small, *rest, backend="triton"),
    )
