"""The C++ products with weights of few bits against float64, under every instruction set that this
machine can run.

Stops: a panel's last rows or a row's last columns left out, a group's scale one column late, a sign
lost, sums that depend on the threads, an outlier that takes its neighbours' bits.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.isa import isa
from kernels.native import library
from kernels.quant import native
from kernels.quant.matrix import Quantised, packed_nibbles
from kernels.quant.native import PARTS, Panels, held_as_panels, panel_bytes, product
from kernels.quant.rounding import to_int4, to_int8
from tests.kernels_cpu.parts import part

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=library.missing())

SETS = sorted({next(iter(library.own_sets())), isa()})
if isa() in library.SETS and isa() != "avx2":
    SETS.append("whole")  # numbers, in every build
SOURCES = "few_bits.cpp", "integers.cpp", "rounded.cpp"
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=SETS)
def compiled(request):
    """The library for an instruction set, in place of this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        whole = request.param == "whole"
        own = whole or request.param == isa()
        made = library.native() if own else part(request.param, *SOURCES)
        patch.setattr(native, "loaded", lambda: made)
        if whole:
            patch.setattr(native, "prefers_integers", lambda made: True)
        yield request.param


def drawn(kind, rows, columns, group, offsets, scales, seed):
    """A matrix of random values under random scales."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "int8":
        values = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    else:
        values = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
        values = packed_nibbles(values)
    shape = rows, -(-columns // group)
    scale = ((torch.rand(shape, generator=generator) + 0.5) / 128).to(scales)
    beside = torch.randn(shape, generator=generator).to(scales) / 16 if offsets else None
    return Quantised(kind, values, scale, group, beside)


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@EXAMPLES
@given(
    kind=st.sampled_from(["int8", "int4"]),
    rows=st.sampled_from([1, 2, 15, 16, 33, 130]),
    words=st.sampled_from([1, 3, 32, 70]),
    group=st.sampled_from([8, 32, 64, 96, 128, 160, 0]),
    offsets=st.booleans(),
    scales=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.sampled_from([1, 2, 3, 4, 7, 8, 9, 18, 32, 41, 485]),
    seed=st.integers(0, 99),
)
def test_a_product_errs_no_more_than_torchs(
    compiled, kind, rows, words, group, offsets, scales, dtype, count, seed
):
    columns = words * PARTS[kind]
    # a row whose last group is short, or one group that is no whole word
    columns -= 2 if not group and columns > 4 else 0
    weight = drawn(kind, rows, columns, group or columns, offsets, scales, seed)
    # as AWQ has them, read by column
    turned = dataclasses.replace(weight, values=weight.values.t().contiguous().t())
    panels = Panels.of(turned)
    assert torch.equal(panels.quantised(slice(None)).values, weight.values)
    assert panels.nbytes == panel_bytes(kind, weight.shape, weight.group, offsets)
    dense = panels.rows(slice(None), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    expected = x.double() @ dense.t() + bias.double()
    found = product(x, panels, bias)
    assert found.shape == (count, rows) and found.dtype == dtype
    plain = F.linear(x, dense.to(dtype), bias)
    assert error(found, expected) <= 2 * error(plain, expected) + 4e-7
    residual = torch.randn(count, rows, generator=generator).to(dtype)
    assert torch.equal(product(x, panels, bias, residual), found + residual)
    wide = product(x, panels, bias, out_dtype=torch.float32)
    assert torch.equal(wide, found.float())
    if rows % 2 == 0:
        gate, up = found.chunk(2, -1)
        expected = F.silu(gate) * up
        gated = product(x, panels, bias, gated=True)
        # one rounding of SiLU apart
        assert error(gated, expected.double()) <= 2 * torch.finfo(dtype).eps
        assert torch.equal(
            product(x, panels, bias, residual[:, ::2].contiguous(), True), gated + residual[:, ::2]
        )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_hostile_weights_stay_what_they_are(compiled, kind):
    wide = torch.randn(40, 192, generator=torch.Generator().manual_seed(1)) / 8
    wide[0] = 0
    wide[1, 7] = 1e4
    wide[2] = 1e-40
    wide[3] = 0.25
    wide[4, 64:128] = 0
    weight = to_int4(wide, 64) if kind == "int4" else to_int8(wide, 64)
    panels = Panels.of(weight)
    dense = panels.rows(slice(None), torch.float64)
    assert error(dense.float(), weight.dense(torch.float64)) < 4e-3
    # a group of 4 bits sums its values and its offset apart: what those reach is what may be lost
    reach = dense.abs().view(40, 3, 64).amax(2, keepdim=True).expand(40, 3, 64).reshape(40, 192)
    for count in (1, 20):
        x = torch.randn(count, 192, generator=torch.Generator().manual_seed(2))
        x[:, 5] *= 1e5  # beside which activations of 8 bits would be nothing
        expected = x.double() @ dense.t()
        found = product(x, panels)
        scale = x.double().abs() @ reach.t()
        assert ((found - expected).abs() <= 3e-6 * scale + 1e-37).all()
        x[-1, 3] = float("nan")
        spoilt = product(x, panels)
        assert spoilt[-1].isnan().all() and torch.equal(spoilt[:-1], found[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_threads_or_on_other_rows(compiled, dtype):
    panels = Panels.of(drawn("int8", 200, 256, 32, False, torch.bfloat16, 3))
    before = torch.get_num_threads()
    for count in (1, 6, 600):
        x = torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(dtype)
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(product(x, panels))
        assert torch.equal(*found)
        some = product(x[: max(1, count - 3)].contiguous(), panels)
        if count != 6:
            assert torch.equal(some, found[0][: len(some)])
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind, value", [("int8", -128), ("int8", 127), ("int4", 0), ("int4", 15)])
@pytest.mark.parametrize("group", [32, 112, 128, 448])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_saturate(compiled, kind, value, group, sign):
    values = torch.full((20, 448), value, dtype=torch.int8 if kind == "int8" else torch.uint8)
    values = packed_nibbles(values) if kind == "int4" else values
    weight = Quantised(kind, values, torch.ones(20, -(-448 // group)), group)
    dense = Panels.of(weight).rows(slice(None), torch.float64)
    for size, lost in ((384.0, 2e-6), (1e-37, 5e-4)):  # the scale of the second is subnormal
        x = torch.full((33, 448), size * sign).bfloat16()
        x[1, ::2] *= -1
        found = product(x, Panels.of(weight), out_dtype=torch.float32)
        rounded = (x.double() @ dense.t()).bfloat16().double()
        reach = x.double().abs() @ dense.abs().t()
        assert ((found - rounded).abs() <= lost * reach + rounded.abs() * 2**-8).all()


def test_hostile_rows_of_16_bits_keep_to_themselves(compiled):
    """Zeros, subnormal rows, one huge number, and what is not finite, among 40 rows."""
    panels = Panels.of(drawn("int8", 70, 1024, 32, False, torch.float16, 7))
    dense = panels.rows(slice(None), torch.float64)
    x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(8))
    x[0], x[1], x[2], x[3, 700] = 0.0, x[1] * 1e-38, x[2] * 1e30, 1e4
    x = x.bfloat16()
    found, expected = product(x, panels), x.double() @ dense.t()
    plain = F.linear(x, dense.bfloat16())
    assert (found[0] == 0).all()
    for row in range(1, 40):
        allowed = 2 * error(plain[row], expected[row])
        assert error(found[row], expected[row]) <= allowed + (1e-3 if row == 1 else 0)
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[5, 300] = bad
        again = product(spoilt, panels)
        assert not again[5].isfinite().any()
        assert torch.equal(again[:5], found[:5]) and torch.equal(again[6:], found[6:])


def test_rows_are_gathered_and_scales_keep_their_bits():
    weight = drawn("int4", 50, 96, 32, True, torch.float32, 4)
    halves = dataclasses.replace(
        weight, scales=weight.scales.half().float(), offsets=weight.offsets.half().float()
    )
    panels = Panels.of(halves)
    assert panels.scales.dtype == torch.float16  # as a GGUF file has it
    picked = torch.tensor([49, 0, 17])
    assert torch.equal(panels.rows(picked, torch.float32), halves.rows(picked, torch.float32))
    small = dataclasses.replace(weight, scales=weight.scales * 1e-7)
    kept = Panels.of(small).scales
    assert kept.dtype == torch.bfloat16  # float16 has no such numbers
    whole = drawn("int8", 50, 96, 96, False, torch.float32, 5)
    assert Panels.of(whole).scales.dtype == torch.float32


def test_what_panels_do_not_hold_is_refused():
    assert held_as_panels("int8", 12, 24) and held_as_panels("int4", 24, 24)
    assert not held_as_panels("int4", 12, 24)
    assert not held_as_panels("fp8", 32, 64) and not held_as_panels("int8", 32, 64, plain=False)
    with pytest.raises(ValueError, match="no panels"):
        Panels.of(to_int8(torch.ones(4, 64), outliers=2))


def test_a_compiler_of_graphs_sees_one_operator():
    panels = Panels.of(drawn("int4", 48, 64, 32, True, torch.bfloat16, 6))
    held = panels.values, panels.scales, panels.offsets, None, "int4", 32, 48, 64, False
    x = torch.randn(3, 64)
    torch.library.opcheck(
        native.multiply_panels_op,
        (x, *held),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert torch.equal(native.multiply_panels_op(x, *held), product(x, panels))
