"""Packed rows: rounding to 8 bits, and every kernel that writes or reads rows of any form,
interpreted, in plain torch and by reference, against the float64 oracle of the rounded values.

Stops: a scale that is read from another row, a reader that takes the values and forgets the scale,
a masked row whose scale is used, rounding that differs between writers.
"""

import pytest
import torch

from kernels.layer.rotate_store import rotate_store, rotate_store_ref
from kernels.layer.store import store_step
from kernels.prefill.dense import prefill_dense
from kernels.prefill.window import prefill_window
from kernels.rows import fp8
from kernels.rows.forms import FORMS, as_bytes, floats, key_floats, row_widths, unpack, widen_values
from kernels.rows.int8 import pack, scales, values
from kernels.select.column_sums import column_sums
from tests.kernels.support import kernel_checks, prefill_checks
from tests.kernels.support.packed_rows import over_packed_rows

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, INT4, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn
BACKENDS = ("reference", "cpu", "triton")


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dim", [8, 24, 64, 128])
def test_an_element_is_off_by_half_a_scale_at_most(dtype, dim):
    x = torch.randn(3, 5, 17, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    x[0, 0, 0], x[0, 0, 1, 0], x[0, 0, 2] = 0.0, 3e4, 1e-7
    rows = pack(x)
    assert rows.shape == (3, 5, 17, dim + 8) and rows.dtype == torch.int8
    assert row_widths(dim, rows.dtype) == (dim + 8,) * 2 and row_widths(dim, dtype) == (dim,) * 2
    exact, scale = x.double(), scales(rows).double().unsqueeze(-1)
    assert torch.allclose(scale * 127, exact.abs().amax(-1, keepdim=True), rtol=1e-6, atol=0)
    error = (values(rows).double() * scale - exact).abs()
    assert bool((error <= scale * (0.5 + 1e-4)).all())
    assert torch.equal(floats(rows), values(rows).float() * scale.float())
    assert torch.equal(unpack(rows, dtype), floats(rows).to(dtype))
    assert int(values(rows).min()) >= -127


def test_rows_without_a_scale_are_zero_and_rows_that_are_not_finite_stay_so():
    x = torch.randn(5, 8)
    x[0], x[1] = 0.0, 1e-40
    x[2, 3], x[3, 1], x[4, 7] = torch.nan, torch.inf, -torch.inf
    found = floats(pack(x))
    assert not found[:2].any()
    assert not bool(torch.isfinite(found[2:]).all(-1).any())


def test_rounding_again_changes_nothing():
    """A fork that goes through floats, or a row that is written twice, holds the same values."""
    once = pack(torch.randn(400, 64))
    assert torch.equal(values(pack(floats(once))), values(once))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "form, lengths, shape",
    [
        (INT8, [1, 2], dict(kind="softmax")),
        (INT8, [63, 64, 127], dict(head_dim=128, kv_heads=1, group=1, kind="raw")),
        (INT8, [511, 513], dict(head_dim=32, group=1, kv_heads=3, kind="softmax", layout="tokens")),
        (INT8, [521], dict(head_dim=96, group=8, dtype=BF16, kind="softmax", layout="tokens")),
        (INT8, [0, 131], dict(head_dim=40, group=3, dtype=F16)),
        (INT8, [7, 601], dict(queries=8, group=4, kind="softmax")),
        (INT4, [1, 127], dict(head_dim=128, kv_heads=1, group=1, kind="raw")),
        (FP8, [127], dict(head_dim=40, dtype=BF16, kind="softmax")),
        (INT4, [521], dict(head_dim=96, group=8, dtype=BF16, kind="softmax", layout="tokens")),
        (INT4, [0, 131], dict(head_dim=32, group=3, dtype=F16)),
        (INT4, [7], dict(head_dim=160, queries=8, group=2, kind="softmax")),
    ],
)
def test_dense(monkeypatch, backend, form, lengths, shape):
    seen = over_packed_rows(monkeypatch, kernel_checks, "decode_dense", form=form)
    kernel_checks.check_dense("cpu", backend, lengths, **shape)
    assert seen == [form] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "form, counts, tails, shape",
    [
        (INT8, [1, 0], [1, 3], dict()),
        (INT8, [31, 33], [64, 1], dict(head_dim=32, group=1, kv_heads=3)),
        (INT8, [100, 7], [20, 90], dict(head_dim=96, group=8, dtype=BF16, per_head=True)),
        (INT8, [50], [12], dict(queries=3, group=4, head_dim=40, layout="heads")),
        (INT4, [31, 0], [9, 1], dict(head_dim=32, group=2)),
        (INT4, [100, 7], [20, 90], dict(head_dim=128, group=8, dtype=BF16, per_head=True)),
        (FP8, [20], [12], dict(dtype=F16)),
        (INT4, [50], [12], dict(queries=3, group=4, layout="heads")),
    ],
)
def test_sparse(monkeypatch, backend, form, counts, tails, shape):
    seen = over_packed_rows(monkeypatch, kernel_checks, "decode_sparse", form=form)
    kernel_checks.check_sparse("cpu", backend, counts, tails, **shape)
    assert seen == [form] * 2


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "lengths, shape",
    [([1, 17], dict()), ([130], dict(window=5, group=3, head_dim=96, layout="tokens", kind="raw"))],
)
def test_window(monkeypatch, backend, form, lengths, shape):
    seen = over_packed_rows(monkeypatch, kernel_checks, "window_scores", form=form)
    kernel_checks.check_window("cpu", backend, lengths, **shape)
    assert seen == [form]


@pytest.mark.parametrize("form", [INT8, INT4, FP8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_kernels(monkeypatch, backend, form):
    names = "column_scores", "prefill_sparse", "attend_blocks"
    seen = over_packed_rows(monkeypatch, prefill_checks, *names, form=form)
    prefill_checks.check_column_scores("cpu", backend, 19, 67)
    prefill_checks.check_prefill_sparse("cpu", backend, 33, 20, 7, edges=(16,))
    prefill_checks.check_blocks("cpu", backend, 2, 1)
    assert seen == [form] * 5


@pytest.mark.parametrize("form", [INT8, INT4, FP8])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_readers_in_plain_torch_see_the_rounded_values(backend, form):
    """Dense prefill, a sliding window and attention sums: what they give over the floats."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 1, 2, 90, 32, generator=generator)
    k, v = FORMS[form].keys.pack(k), FORMS[form].values.pack(v)
    wide = key_floats(k), floats(v)
    q = torch.randn(1, 21, 6, 32, generator=generator)
    found = prefill_dense(q, k, v, 69, 0.25, backend=backend)
    want = prefill_dense(q, *wide, 69, 0.25, backend=backend)
    assert torch.allclose(found, want, atol=1e-5)
    found = prefill_window(q, k, v, 69, 33, 0.25, backend=backend)
    assert torch.allclose(found, prefill_window(q, *wide, 69, 33, 0.25, backend=backend), atol=1e-5)
    assert torch.equal(column_sums(q[0], k[0], 69, 0.25), column_sums(q[0], wide[0][0], 69, 0.25))


@pytest.mark.parametrize("twice", [None, (3, 7)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("form", "dim", "dtype"),
    [(INT8, 24, F32), (INT8, 24, BF16), (INT4, 32, BF16), (INT4, 160, F32), (FP8, 24, BF16)],
)
def test_a_step_stores_what_pack_gives(backend, form, dim, dtype, twice):
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 2, 3, 2, dim, generator=generator).to(dtype)
    q = torch.randn(2, 3, 4, dim, generator=generator).to(dtype)
    k[0, 0, 0], v[0, 1, 0, 3], v[1, 0, 1] = 0.0, torch.nan, 1e-36
    v[1, 1] *= torch.logspace(-4, 4, dim)  # groups of 32 that differ in size
    if form != INT4:
        v[0, 1, 0, 3] = 1.0  # a step loses a NaN there
    bank = [torch.full((2, 2, 31, w), 5, dtype=form) for w in row_widths(dim, form)]
    ring = torch.zeros(2, 9, 4, dim, dtype=dtype)
    positions = torch.tensor([[4, 5, 6], [20, 21, 22]])
    store_step(k, v, q, bank[0], bank[1], ring, positions, twice, backend=backend)
    for side, new in enumerate((k, v)):
        untouched = torch.ones(2, 31, dtype=torch.bool)
        pack = (FORMS[form].values if side else FORMS[form].keys).pack
        for b in range(2):
            for j, at in enumerate(positions[b].tolist()):
                first, count = twice or (0, 0)
                rows = (at,) if twice is None else (first + at % 7, first + 7 + at % 7)
                for row in rows:
                    untouched[b, row] = False
                    assert torch.equal(as_bytes(bank[side][b, :, row]), as_bytes(pack(new[b, j])))
        held = bank[side].float().transpose(1, 2)
        assert bool((held[untouched] == 5).all())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_fused_store_rotates_and_packs(dtype):
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(1, 2, 8, 24, generator=generator).to(dtype)
    angle = torch.rand(1, 2, 12, generator=generator)
    results = []
    for run in (rotate_store_ref, rotate_store):
        bank = torch.zeros(2, 1, 2, 9, 32, dtype=torch.int8)
        ring = torch.zeros(1, 5, 4, 24, dtype=dtype)
        q = run(qkv, angle.cos(), angle.sin(), *bank, ring, torch.tensor([[3, 4]]))
        results.append((q, ring, floats(bank), scales(bank)))
    for want, found in zip(*results):
        assert torch.allclose(want.float(), found.float(), atol=1e-2 if dtype == BF16 else 1e-5)
    # one step of 8 bits at most, where the two round a half differently
    off = (results[0][2] - results[1][2]).abs() / results[0][3].unsqueeze(-1).clamp(min=1e-9)
    assert float(off.max()) < 1.01 and float((off > 0.5).float().mean()) < 0.02


def test_eight_bit_floats_are_off_by_a_sixteenth_of_themselves():
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    x[0], x[1], x[2, 3], x[3, 1] = 0.0, 1e-42, torch.nan, torch.inf
    rows = fp8.pack(x)
    assert rows.shape == (40, 72) and torch.equal(
        widen_values(rows, x.new_empty(40, 64))[4:], rows[4:, :64].float()
    )
    found = floats(rows)
    assert not found[:2].any() and not bool(torch.isfinite(found[2:4]).all(-1).any())
    # below 2^-6 of a scale values are subnormal: half of 2^-9
    allowed = torch.maximum(x[4:].abs() / 16, fp8.scales(rows)[4:, None] * 2.0**-10)
    assert bool(((found - x)[4:].abs() <= allowed * 1.0001).all())
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    every = every[torch.isfinite(every.float())]
    held = torch.cat([every, torch.ones(2).view(FP8)])
    assert torch.equal(fp8.values(held), every.float())
