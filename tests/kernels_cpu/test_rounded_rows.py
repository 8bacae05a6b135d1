"""Products of rows that are rounded to 8 bits, against float64 of the same whole numbers, by every
form of the kernel that this machine can run and by torch's operators.

Stops: a step of the wrong columns, a sum of 16 bits that saturates, what an offset of 128 adds left
in, a fold's scale one fold late, rows of a decode step that are rounded too, a default that moves.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.isa import isa
from kernels.native import library
from kernels.quant import native
from kernels.quant.linear import pack_quantised
from kernels.quant.matrix import Quantised
from kernels.quant.native import PARTS, Panels, product
from kernels.quant.rounding import to_int4, to_int8
from kernels.quant.torch_forms.rounded_rows import GROUP, ROWS, numbers, rounded_rows
from tests.kernels_cpu.parts import part
from tests.kernels_cpu.test_native_few_bits import drawn, error

NATIVE = pytest.mark.skipif(bool(library.missing()), reason=library.missing())
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def able():
    """The instruction sets that this machine runs, as far as rounded.cpp knows them apart."""
    known = [name for name in library.own_sets() if name not in ("avx512_bf16", "amx")]
    mine = library._set()
    return known[: known.index(mine) + 1] if mine in known else known


@pytest.fixture(
    scope="module", params=[*able(), *(["avx2, common"] if isa() in library.SETS else [])]
)
def multiply(request):
    """Multiply rows, x, by panels that round them, by the form of the kernel for a set; "common":
    without what only some of its CPUs have.
    """
    name, _, common = request.param.partition(", ")
    alone = part(name, "rounded.cpp")

    def product(x, panels):
        with mock.patch.object(native, "loaded", lambda: alone):
            return native._run("rounded", x, panels, common=bool(common))

    return product


@EXAMPLES
@given(
    rows=st.sampled_from([1, 3, 32]),
    columns=st.sampled_from([1, 31, 32, 33, 64, 101]),
    dtype=st.sampled_from(DTYPES),
    power=st.sampled_from([-130, -40, -8, 0, 9, 100]),
    seed=st.integers(0, 99),
)
def test_no_number_moves_by_more_than_half_a_step(rows, columns, dtype, power, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x = (x * 2.0**power).to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    x[0, :GROUP] = 0
    found = rounded_rows(x)
    assert found.shape == x.shape and (found[0, :GROUP] == 0).all()
    for start in range(0, columns, GROUP):
        part = x[:, start : start + GROUP].double()
        step = part.abs().amax(1, keepdim=True) / 127
        moved = (found[:, start : start + GROUP].double() - part).abs()
        # subnormal floats are coarser than such a step
        assert (moved <= step * (0.5 + 1e-4) + 2.0**-148).all()
    whole, steps = numbers(x)
    assert whole.abs().max() <= 127 and torch.equal(whole, whole.round())
    assert (whole.abs().amax(2)[steps > 2.0**-126] == 127).all()  # nothing is given away


def test_what_is_not_finite_is_its_groups_alone():
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(1))
    x[0, 40], x[1, 69] = float("nan"), float("-inf")
    found = rounded_rows(x)
    assert found[0, 32:64].isnan().all() and found[1, 64:].isnan().all()
    assert found[0, :32].isfinite().all() and found[1, :64].isfinite().all()


@NATIVE
@EXAMPLES
@given(
    kind=st.sampled_from(["int8", "int4"]),
    outputs=st.sampled_from([1, 15, 31, 32, 33, 130]),
    words=st.sampled_from([1, 3, 8, 32, 70, 131]),
    group=st.sampled_from([8, 16, 32, 48, 64, 128, 0]),
    offsets=st.booleans(),
    scales=st.sampled_from(DTYPES),
    count=st.sampled_from([32, 33, 37, 101]),
    seed=st.integers(0, 99),
)
def test_sums_are_those_of_the_rounded_rows(
    multiply, kind, outputs, words, group, offsets, scales, count, seed
):
    columns = words * PARTS[kind]
    columns -= 2 if not group and columns > 4 else 0
    weight = drawn(kind, outputs, columns, group or columns, offsets, scales, seed)
    panels = Panels.of(weight, rounds=True)
    dense = panels.rows(slice(None), torch.float64)
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    x[::3, ::7] = 4.0
    rounded = rounded_rows(x)
    expected = rounded.double() @ dense.t()
    found = multiply(x, panels)
    # values of 4 bits and their offset are summed apart; so are 128 times the scales
    reach = dense.abs() + 16 * panels.scales.double().abs().max() * (kind == "int4" and offsets)
    allowed = 1e-6 * (rounded.double().abs() @ reach.t()) + 1e-30
    assert ((found - expected).abs() <= allowed).all()
    assert error(found, expected) <= 2 * error(rounded @ dense.float().t(), expected) + 4e-7
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        assert torch.equal(multiply(narrow, panels), multiply(narrow.float(), panels).to(dtype))


@NATIVE
@pytest.mark.parametrize("kind, value", [("int8", -128), ("int8", 127), ("int4", 0), ("int4", 15)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_are_summed_whole(multiply, kind, value, sign):
    values = torch.full((17, 448 // (2 if kind == "int4" else 1)), value)
    values = values.to(torch.int8) if kind == "int8" else (values * 17).to(torch.uint8)
    panels = Panels.of(Quantised(kind, values, torch.ones(17, 1), 448), rounds=True)
    x = torch.full((33, 448), 127.0 * sign)
    x[1, ::2] *= -1
    expected = x.double() @ panels.rows(slice(None), torch.float64).t()
    assert torch.equal(multiply(x, panels).double(), expected)


@NATIVE
def test_rows_keep_to_themselves_whatever_the_threads(multiply):
    panels = Panels.of(drawn("int8", 200, 320, 32, False, torch.bfloat16, 3), rounds=True)
    before = torch.get_num_threads()
    for count in (32, 97, 1000):
        x = torch.randn(count, 320, generator=torch.Generator().manual_seed(count)).bfloat16()
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(multiply(x, panels))
        assert torch.equal(*found)
        spoilt = x.clone()
        spoilt[5, 300], spoilt[6] = float("inf"), 0
        again = multiply(spoilt, panels)
        assert again[5].isnan().all() and (again[6] == 0).all()
        assert torch.equal(again[:5], found[0][:5]) and torch.equal(again[7:], found[0][7:])
        assert torch.equal(multiply(x[7:].contiguous(), panels)[:25], found[0][7:32])
    torch.set_num_threads(before)


def weights_of(form):
    wide = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)) / 8
    if form in ("int4pack", "int4"):
        return to_int4(wide, 32)
    return to_int8(wide, None if form in ("digits", "vnni", "int8pack") else 32)


@pytest.mark.parametrize("form", ["blocks", "native", "digits", "vnni", "int8pack", "int4pack"])
def test_every_form_rounds_the_rows_of_a_prompt_and_no_others(form):
    able = native.usable() if form == "native" else True
    try:
        plain = pack_quantised(weights_of(form), None, torch.bfloat16, form)
    except (RuntimeError, AttributeError, NotImplementedError) as missing:
        pytest.skip(str(missing))
    if not able:
        pytest.skip("no C++ kernels")
    rounds = pack_quantised(weights_of(form), None, torch.bfloat16, form, rounds=True)
    x = torch.randn(ROWS + 1, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    for count in (1, 2, 8, ROWS - 1):
        assert torch.equal(rounds(x[:count]), plain(x[:count]))
    dense = weights_of(form).dense(torch.float64)
    for count in (ROWS, ROWS + 1):
        found, expected = rounds(x[:count]), rounded_rows(x[:count]).double() @ dense.t()
        assert error(found, expected) <= 2 * error(expected.bfloat16(), expected) + 1e-5
        assert error(found, expected) < error(plain(x[:count]), expected) / 2
        twin = rounds.on_torch()(x[:count])
        assert error(twin, expected) <= 2 * error(expected.bfloat16(), expected) + 1e-5


@NATIVE
def test_torchs_operators_stand_in_where_the_kernel_is_not_right(monkeypatch):
    panels = Panels.of(drawn("int4", 50, 96, 32, True, torch.bfloat16, 6), rounds=True)
    generator = torch.Generator().manual_seed(7)
    x, bias = torch.randn(40, 96, generator=generator), torch.randn(50, generator=generator)
    residual = torch.randn(40, 50, generator=generator)
    found = product(x, panels, bias, residual)
    gated = product(x, panels, bias, gated=True)
    monkeypatch.setattr(native._ROUNDED, "usable", lambda: False)
    assert (product(x, panels, bias, residual) - found).abs().max() <= 1e-4
    assert (product(x, panels, bias, gated=True) - gated).abs().max() <= 1e-4


@NATIVE
def test_the_default_takes_no_other_path(monkeypatch):
    """Panels that nobody asked to round never meet the kernel."""
    weight = drawn("int8", 48, 64, 32, False, torch.bfloat16, 8)
    assert not Panels.of(weight).rounds and not pack_quantised(weight, None, torch.float32).rounds
    seen, run = [], native._run
    monkeypatch.setattr(native, "_run", lambda how, *given: seen.append(how) or run(how, *given))
    for count in (1, 8, 31, 32, 600):
        for dtype in (torch.float32, torch.bfloat16):
            product(torch.randn(count, 64).to(dtype), Panels.of(weight))
    assert "rounded" not in seen and set(seen) <= {"few", "many", "integers", "tiles"}
