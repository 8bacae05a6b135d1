"""Weights in few bits: what is rounded is as near as it must be, every form multiplies what it
holds, and holds the bytes that it says. The oracle is float64.
"""

from dataclasses import replace

import pytest
import torch

from kernels.native.library import native
from kernels.quant.linear import (
    DIGITS,
    FORMS,
    QuantisedLinear,
    able_forms,
    choose_quantised_form,
    held_bytes,
)
from kernels.quant.matrix import Quantised, joined, nibbles, packed_nibbles
from kernels.quant.rounding import to_int4, to_int8
from kernels.quant.torch_forms.int4_tiles import tile_rows
from tests.clocks import set_clock

ROWS = (1, 3, 8, 270)  # below and above what each form multiplies itself


def weight(rows=128, columns=192, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 8


def hostile():
    """Rows of zeros, one huge outlier, subnormal numbers, one value, large and small beside."""
    found = weight()
    found[0] = 0
    found[1, 7] = 1e4
    found[2] = 1e-40
    found[3] = 0.25
    found[4, ::2] *= 1e-6
    return found


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def test_int8_is_within_half_a_step_of_every_weight():
    wide = hostile()
    found = to_int8(wide)
    step = wide.abs().amax(1, keepdim=True) / 127
    assert ((found.dense(torch.float64) - wide).abs() <= step * 0.501 + 1e-30).all()
    assert found.per_row and torch.isfinite(found.scales).all() and (found.scales > 0).all()
    # a matrix of few bits is rounded again, from what it stands for
    again = to_int8(to_int4(weight(), 64))
    assert relative(again.dense(torch.float64), to_int4(weight(), 64).dense(torch.float64)) < 0.01


@pytest.mark.parametrize("group", [32, 64, 96])
def test_int4_errs_less_than_plain_rounding_and_is_exact_on_its_own_grid(group):
    wide = weight()
    grouped = wide.view(128, -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    plain = ((grouped - low) / (high - low) * 15).round() / 15 * (high - low) + low
    found = to_int4(wide, group).dense(torch.float64)
    assert (found - wide).norm() < 0.99 * (plain.view_as(wide) - wide).norm()
    assert torch.isfinite(to_int4(hostile(), group).dense(torch.float32)).all()
    # values that are a scale times whole numbers come back as they are
    steps = torch.randint(0, 16, (128, 192), generator=torch.Generator().manual_seed(1)).float()
    steps.view(128, -1, group)[:, :, 0], steps.view(128, -1, group)[:, :, 1] = 0, 15
    exact = steps * 0.125 - 0.75
    assert torch.equal(to_int4(exact, group).dense(torch.float32), exact)


def test_a_group_that_does_not_divide_is_refused():
    for group in (0, 3, 7, 80):
        with pytest.raises(ValueError, match="group"):
            to_int4(weight(), group)


def held(kind, group=64):
    found = hostile()
    found[1, 7] = 4.0
    if kind == "int4":
        return to_int4(found, group)
    return to_int8(found, group or None, outliers=0 if group else OUTLIERS[kind])


OUTLIERS = {"int8": 0, "int8 and outliers": 3}


def forms(kind, group, dtype):
    found = able_forms("int8 in groups" if group and kind == "int8" else kind.split()[0], dtype)
    return [form for form in found if form != "native" or "outliers" not in kind]


def test_outliers_leave_the_scale_to_the_others():
    wide = hostile()
    found = to_int8(wide, outliers=3)
    dense = found.dense(torch.float64)
    assert torch.equal(dense[1, 7].float(), wide[1, 7])  # kept as it is
    fourth = wide.abs().topk(4, 1).values[:, 3:]
    assert ((dense - wide).abs() <= fourth / 127 * 0.501 + 1e-30).all()
    assert relative(dense[5:], wide[5:].double()) < 0.9 * relative(
        to_int8(wide).dense(torch.float64)[5:], wide[5:].double()
    )
    for wrong in (dict(group=7), dict(group=0), dict(group=64, outliers=3)):
        with pytest.raises(ValueError, match="group"):
            to_int8(wide, **wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int8_in_groups_is_within_half_a_step_and_errs_less_than_plain_rounding(dtype):
    wide = hostile()
    found = to_int8(wide, 32, dtype=dtype)
    grouped = wide.view(128, -1, 32)
    error = found.dense(torch.float64).view(128, -1, 32) - grouped
    step = found.scales.double()[..., None]
    assert (error.abs() <= step * 0.501 + 1e-30).all() and not found.per_row
    plain = grouped.abs().amax(2, keepdim=True).clamp_min(1e-30) / 127
    assert (step <= plain * 1.035)[grouped.abs().amax(2) > 1e-30].all()
    rounded = (grouped / plain).round() * plain
    assert error[4:].norm() < 0.94 * (rounded - grouped)[4:].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "kind,group",
    [("int8", 0), ("int8 and outliers", 0), ("int8", 32), ("int8", 64), ("int4", 32), ("int4", 64)],
)
def test_every_form_multiplies_what_it_holds(kind, group, dtype):
    matrix = held(kind, group)
    dense = matrix.dense(torch.float64)
    bias = weight()[0][:128].to(dtype)
    picked = torch.tensor([[7, 0, 127], [64, 1, 63]])
    for form in forms(kind, group, dtype):
        if form == "int4pack" and matrix.shape[0] % tile_rows():
            continue
        linear = QuantisedLinear(matrix, bias, dtype, form)
        assert relative(linear.weight, dense) < (4e-3 if dtype == torch.bfloat16 else 3e-3)
        if form not in DIGITS:
            found = linear.gather(picked)
            assert found.dtype == dtype and torch.equal(found, linear.weight[picked])
        for rows in ROWS:
            x = weight(rows, 192, seed=rows)
            x[:, 5] *= 400  # an outlier that would leave 8-bit activations three bits
            x[0] = 0 if rows == 3 else x[0]
            x = x.to(dtype)
            expected = x.double() @ dense.t() + bias.double()
            found = linear(x[None])
            assert found.shape == (1, rows, 128) and found.dtype == dtype
            assert relative(found[0], expected) < 4e-3, (form, rows)
            if dtype == torch.float32 and form in DIGITS:
                assert relative(found[0], expected) < 1e-3


def digit_forms():
    return [form for form in able_forms("int8", torch.float32) if form in DIGITS]


def test_rows_do_not_share_a_scale():
    """One row with huge values leaves the others as they are."""
    for form in digit_forms():
        linear = QuantisedLinear(held("int8", 0), None, torch.float32, form)
        x = weight(4, 192)
        alone = linear(x[1:2])
        x[0] *= 1e5
        assert torch.equal(linear(x)[1:2], alone)


def test_permuted_inputs_tables_and_short_groups():
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(40, generator=generator)
    values = torch.randint(0, 16, (6, 40), generator=generator, dtype=torch.uint8)
    scales, table = torch.rand(6, 3, generator=generator), torch.randn(16, generator=generator)
    matrix = Quantised("int4", packed_nibbles(values), scales, 16, None, order, table)
    assert torch.equal(nibbles(matrix.values), values)
    expected = torch.empty(6, 40)
    for row in range(6):
        for column in range(40):
            number = table[int(values[row, column])] * scales[row, column // 16]
            expected[row, order[column]] = number
    assert torch.allclose(matrix.dense(torch.float32), expected)
    x = torch.randn(2, 40, generator=generator)
    linear = QuantisedLinear(matrix, None, torch.float32, "blocks")
    assert torch.allclose(linear(x), x @ expected.t(), atol=1e-5)
    assert joined([matrix, matrix]).shape == (12, 40)
    assert joined([matrix, to_int8(weight(6, 40))]) is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tiled_forms_take_permuted_inputs(kind):
    if not tile_rows():
        pytest.skip("this torch has no 4-bit product")
    order = torch.randperm(192, generator=torch.Generator().manual_seed(5))
    matrix = replace(held(kind, 32), permutation=order)
    linear = QuantisedLinear(matrix, None, torch.bfloat16, "pair" if kind == "int8" else "int4pack")
    dense = matrix.dense(torch.float64)
    assert relative(linear.weight, dense) < 4e-3
    for rows in ROWS:
        x = weight(rows, 192).bfloat16()
        assert relative(linear(x), x.double() @ dense.t()) < 4e-3


def test_forms_are_chosen_by_what_the_machine_has_and_by_shape(monkeypatch):
    """And by no clock: two processes would hold one file in forms that round differently."""
    cpu, found = torch.device("cpu"), dict[str, tuple[str, ...]]()

    def choose(kind, shape, group, dtype=torch.bfloat16, **named):
        return choose_quantised_form(kind, shape, group, dtype, cpu, **named)

    monkeypatch.setattr("kernels.quant.linear.able_forms", lambda kind, dtype: found[kind])
    monkeypatch.setattr("kernels.quant.linear.tile_rows", lambda: 64)
    grouped = "int8 in groups"
    found |= {
        "int8": ("vnni", "digits", "int8pack", "blocks"),
        grouped: ("pair", "blocks"),
        "int4": ("int4pack", "blocks"),
    }
    assert choose("int8", (64, 64), 64) == "vnni"
    assert choose("int8", (64, 64), 32) == "pair" and choose("int4", (64, 64), 32) == "int4pack"
    assert choose("int8", (65, 64), 32) == "blocks"  # no whole tile
    assert choose("int8", (64, 64), 16) == "blocks"  # groups of 16
    assert choose("int4", (65, 64), 32) == "blocks"  # no whole tile
    assert choose("int4", (64, 64), 32, plain=False) == "blocks"
    found["int8"] = ("digits", "int8pack", "blocks")
    assert choose("int8", (64, 64), 64) == "digits"
    found["int8"] = ("int8pack", "blocks")
    assert choose("int8", (64, 64), 64) == "int8pack"
    # with a compiler
    found |= {kind: ("native", *forms) for kind, forms in found.items()}
    for kind, shape, group in (("int8", (7, 64), 64), ("int8", (7, 64), 16), ("int4", (7, 64), 8)):
        assert choose(kind, shape, group) == "native"
    assert choose("int8", (64, 64), 64, outliers=True) == "int8pack"
    assert choose("int4", (64, 60), 20) == "blocks"  # no whole word


def test_no_clock_is_read_where_a_form_is_chosen(monkeypatch):
    for name in ("thread_time", "perf_counter", "monotonic", "time", "process_time"):
        set_clock(monkeypatch, name, None)  # TypeError where it is read
    for kind, group in (("int8", 64), ("int8", 32), ("int4", 32)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            form = choose_quantised_form(kind, (64, 64), group, dtype, torch.device("cpu"))
            assert form in FORMS


@pytest.mark.parametrize("columns", [192, 512, 600])
def test_bytes_are_those_that_the_tensors_take(columns):
    matrix = to_int8(weight(128, columns))
    assert QuantisedLinear(matrix, None, torch.float32, "blocks").nbytes == matrix.nbytes
    assert matrix.nbytes == held_bytes("int8", (128, columns), columns, False, "blocks")
    sparse = to_int8(weight(128, columns), outliers=2)
    assert sparse.nbytes == held_bytes("int8", (128, columns), columns, False, "blocks", 2)
    for form in digit_forms():
        whole, part = (QuantisedLinear(m, None, torch.float32, form) for m in (matrix, sparse))
        csr = part.sparse.csr
        tensors = (csr.crow_indices(), csr.col_indices(), csr.values())
        held = sum(t.numel() * t.element_size() for t in tensors)
        assert part.nbytes == whole.nbytes + held
        assert csr.values().data_ptr() == part.sparse.outliers.data_ptr()
        if form == "vnni":  # scales, and the zero points that the product asks for
            assert whole.nbytes == torch.ops.mkldnn._nbytes(whole.digits.packed) + 8 * 128
    if native() is not None:
        for held in (matrix, to_int8(weight(100, columns), 8), to_int4(weight(128, columns), 8)):
            panels = QuantisedLinear(held, None, torch.float32, "native")
            tensors = (panels.panels.values, panels.panels.scales, panels.panels.offsets)
            taken = sum(t.numel() * t.element_size() for t in tensors if t is not None)
            offsets = held.offsets is not None
            said = held_bytes(held.kind, held.shape, held.group, offsets, "native")
            assert panels.nbytes == taken == said
    if tile_rows() and columns % 64 == 0:
        small = to_int4(weight(128, columns), 64)
        linear = QuantisedLinear(small, None, torch.bfloat16, "int4pack")
        tensors = (linear.tiles[0].packed, linear.tiles[0].zeros)
        assert linear.nbytes == sum(t.numel() * t.element_size() for t in tensors)
        assert small.nbytes == held_bytes("int4", (128, columns), 64, True, "blocks")
        pair = QuantisedLinear(to_int8(weight(128, columns), 64), None, torch.bfloat16, "pair")
        tensors = [t for tiles in pair.tiles for t in (tiles.packed, tiles.zeros)]
        assert pair.nbytes == sum(t.numel() * t.element_size() for t in tensors)
