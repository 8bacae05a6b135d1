"""The C++ kernels of a layer's halves: products with what is around them, the norm, the rotation
with the store, and what a prompt's chunk has between its products, against float64 and torch's own
operators.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.isa import isa
from kernels.layer.linear import pack_linear
from kernels.layer.native_product import Product, reads
from kernels.layer.native_step import (
    act_rows,
    copy_rows,
    normalize_rows,
    rotate_rows,
    rotate_store,
    stores,
)
from kernels.layer.norm import normalize_rows_ref
from kernels.layer.prompt_fused import rotate_rows_ref, swiglu_rows_ref
from kernels.layer.rotate_store import rotate_store_ref
from kernels.native.library import missing
from kernels.rows.forms import DTYPES as NAMED
from kernels.rows.forms import FORMS, as_bytes
from tests.no_compiler import no_compiler

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = settings(max_examples=40, deadline=None, derandomize=True)
EPS = 1e-5
WIDE = "avx512", "avx512_bf16", "amx"  # vectors of 16: a row has the bits that it has alone


def normed(x, norm, offset):
    """A norm as the model makes it; with an offset a wide one, of float32 or more inside."""
    if offset is None:
        return F.rms_norm(x, x.shape[-1:], None, EPS) * norm
    wide = x if x.dtype == torch.float64 else x.float()
    return (F.rms_norm(wide, x.shape[-1:], None, EPS) * (norm.to(wide.dtype) + offset)).to(x.dtype)


def around(x, weight, bias, norm, residual, gated, offset):
    """What a `Product` computes, by torch's operators in the dtype of what is given."""
    if norm is not None:
        x = normed(x, norm, offset)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13, 16]),
    inputs=st.sampled_from([1, 7, 16, 63, 72, 160, 1100, 2500]),
    outputs=st.sampled_from([1, 5, 16, 17, 33, 48]),
    bias=st.booleans(),
    norm=st.booleans(),
    offset=st.sampled_from([None, 0.0, 1.0]),
    residual=st.booleans(),
    gated=st.booleans(),
    wide=st.booleans(),
    scale=st.sampled_from([1.0, 150.0]),
    seed=st.integers(0, 99),
)
def test_a_product_is_within_twice_torchs_own_error(
    dtype, rows, inputs, outputs, bias, norm, offset, residual, gated, wide, scale, seed
):
    """Of the largest value: single ones of few roundings may be further from torch's."""
    torch.manual_seed(seed)
    scale = min(scale, 20.0) if dtype == torch.float16 else scale  # whose products stay finite
    weight = (torch.randn(outputs * (1 + gated), inputs) * scale / inputs**0.5).to(dtype)
    given = {
        "x": torch.randn(rows, inputs).to(dtype),
        "weight": weight,
        "bias": torch.randn(len(weight)).to(dtype) if bias else None,
        "norm": torch.randn(inputs).to(dtype) if norm else None,
        "residual": torch.randn(rows, outputs).to(dtype) if residual else None,
    }
    assert reads(weight)
    double = {k: v if v is None else v.double() for k, v in given.items()}
    exact, own = (around(**each, gated=gated, offset=offset) for each in (double, given))
    made = Product(weight, given["bias"])
    found = made(given["x"], given["norm"], EPS, given["residual"], gated, wide, offset)
    assert found.shape == own.shape and found.dtype == (torch.float32 if wide else dtype)
    limit = 2 * (own.double() - exact).abs().max()
    limit += torch.finfo(dtype).eps * exact.abs().max() + scale * inputs * 2**-26
    assert (found.double() - exact).abs().max() <= limit
    assert not wide or torch.equal(found, found.to(dtype).float())
    if isa() in WIDE:
        last = None if given["residual"] is None else given["residual"][-1:]
        alone = made(given["x"][-1:], given["norm"], EPS, last, gated, wide, offset)
        assert torch.equal(alone, found[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_read_where_it_lies_and_as_often_as_it_is_faster(dtype):
    """Rows beyond those, other dtypes and the twin on torch are torch's; one tensor is held."""
    torch.manual_seed(0)
    weight, x = torch.randn(24, 40).to(dtype), torch.randn(1, 3, 40).to(dtype)
    linear = pack_linear(weight)
    assert linear.weight is weight and linear.own(x) is linear.product
    torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=2e-2, atol=2e-2)
    weight.zero_()
    assert not linear(x).any()
    most = linear.product.most_rows
    assert linear.own(x.new_empty(most, 40)) and not linear.own(x.new_empty(most + 1, 40))
    assert not linear.own(x[:, :0]) and linear(x[:, :0]).shape == (1, 0, 24)
    assert not reads(weight.t())
    twin = linear.on_torch()
    assert twin.weight is weight and not twin.native and not twin.own(x) and linear.native
    with no_compiler():
        assert not pack_linear(weight).native


def test_products_do_not_depend_on_the_threads():
    torch.manual_seed(0)
    weight, x = torch.randn(1100, 300), torch.randn(3, 300)
    given, before = (x, torch.randn(300), EPS, torch.randn(3, 550), True), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(Product(weight)(*given))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("size", [1, 64, 333])
def test_a_norm_is_within_twice_torchs_own_error(dtype, size, offset):
    torch.manual_seed(size)
    x, weight = torch.randn(2, 3, size).to(dtype) * 5, torch.randn(size).to(dtype)
    exact = normed(x.double(), weight.double(), offset)
    own = normalize_rows_ref(x, weight, EPS) if offset is None else normed(x, weight, offset)
    error = (normalize_rows(x, weight, EPS, offset).double() - exact).abs().max()
    assert error <= 2 * (own.double() - exact).abs().max() + 2**-22 * exact.abs().max()


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 2]),
    queries=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([2, 20, 64]),
    part=st.sampled_from([1, 2]),
    layout=st.sampled_from(["heads", "tokens"]),
    ring=st.booleans(),
    offset=st.sampled_from(["no norms", None, 1.0]),
)
def test_rows_are_rotated_and_stored_as_torch_does(
    dtype, batch, queries, dim, part, layout, ring, offset
):
    """To the bit: after the norm of a head, too, as here every head's is exact."""
    torch.manual_seed(dim)
    heads, kv_heads, slots = 6, 2, 11
    pairs = max(1, dim // 2 // part)
    qkv = torch.randn(batch, queries, heads + 2 * kv_heads, dim).to(dtype)
    angle = torch.randn(batch, queries, pairs)
    positions = torch.tensor([[9], [4]])[:batch] + torch.arange(queries)
    shape = (batch, kv_heads, 24, dim) if layout == "heads" else (batch, 24, kv_heads, dim)
    norms = None
    if offset != "no norms":
        qkv = qkv.sign()
        norms = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    results = []
    for run in (rotate_store, rotate_store_ref):
        k, v = torch.zeros(2, *shape, dtype=dtype)
        k, v = (rows if layout == "heads" else rows.transpose(1, 2) for rows in (k, v))
        held = torch.zeros(batch, slots, heads, dim, dtype=dtype)
        twice = (2, 10) if ring else None
        given, more = qkv.clone(), {}
        if norms is not None and run is rotate_store:
            more = {"norms": norms, "eps": 0.0, "offset": offset}
        elif norms is not None:
            q_norm, k_norm = (norm.float() + (offset or 0.0) for norm in norms)
            given[:, :, :heads] = given[:, :, :heads] * q_norm
            given[:, :, heads:-kv_heads] = given[:, :, heads:-kv_heads] * k_norm
        cos, sin = angle.cos(), angle.sin()
        if run is rotate_store_ref:
            # what does not rotate is turned by nothing
            still = dim // 2 - pairs
            lies = torch.cat(
                (
                    torch.arange(pairs),
                    torch.arange(2 * pairs, 2 * pairs + still),
                    torch.arange(pairs, 2 * pairs),
                    torch.arange(2 * pairs + still, dim),
                )
            )
            cos = torch.cat((cos, torch.ones(batch, queries, still)), -1)
            sin = torch.cat((sin, torch.zeros(batch, queries, still)), -1)
            back = torch.argsort(lies)
            q = run(given[..., lies], cos, sin, k, v, held, positions, twice)
            q, k, v, held = (rows[..., back] for rows in (q, k, v, held))
        else:
            q = run(given, cos, sin, k, v, held, positions, twice, **more)
        results.append((q, k, v, held))
    for name, one, other in zip(("q", "k", "v", "ring"), *results):
        assert torch.equal(one, other), name


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from([1, 2]),
    length=st.sampled_from([1, 7, 64, 131]),
    heads=st.sampled_from([(4, 4), (4, 1), (8, 1), (3, 0)]),
    dim=st.sampled_from([2, 20, 64]),
    rotated=st.sampled_from([1, 2]),
    more=st.sampled_from([0, 2]),
    own_angles=st.booleans(),
    offset=st.sampled_from(["no norms", None, 1.0]),
)
def test_a_chunk_is_rotated_as_torch_does(
    dtype, batch, length, heads, dim, rotated, more, own_angles, offset
):
    """To the bit, where a head's norm is exact too; what is no query or key stays as it is."""
    torch.manual_seed(length)
    (heads, kv_heads), pairs = heads, max(1, dim // 2 // rotated)
    turned = heads + kv_heads
    qkv = torch.randn(batch, length, turned + more, dim).to(dtype)
    angle = torch.randn(batch if own_angles else 1, length, pairs)
    norms, given = None, {}
    if offset != "no norms":
        qkv = qkv.sign()
        norms = torch.randn(2, dim).to(dtype).unbind()
        given = {"norms": norms, "eps": 0.0, "offset": offset}
    expected = qkv.clone()
    if norms is not None:
        q_norm, k_norm = (norm.float() + (offset or 0.0) for norm in norms)
        expected[:, :, :heads] = expected[:, :, :heads] * q_norm
        expected[:, :, heads:turned] = expected[:, :, heads:turned] * k_norm
    found = rotate_rows(qkv, angle.cos(), angle.sin(), heads, kv_heads, **given)
    assert torch.equal(qkv, expected)
    turns = expected[..., : 2 * pairs]
    turns = rotate_rows_ref(turns, angle.cos(), angle.sin(), turned)
    still = expected[:, :, :turned, 2 * pairs :]
    assert torch.equal(found, torch.cat((turns, still), -1))


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from([*NAMED]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    heads=st.sampled_from([(1, 1), (4, 1), (8, 8)]),
    queries=st.sampled_from([1, 3]),
    twice=st.sampled_from([None, (0, 8), (5, 11)]),
    norms=st.booleans(),
    unit=st.booleans(),
    scale=st.sampled_from([1e-30, 1.0, 300.0]),
)
def test_rows_in_few_bits_are_those_of_floats_that_are_rounded(
    dtype, name, dim, heads, queries, twice, norms, unit, scale
):
    """To the bit, wherever they lie; nothing else of the bank changes."""
    torch.manual_seed(dim + queries)
    form, (count, kv_heads), batch = FORMS[NAMED[name]], heads, 2
    qkv = (torch.randn(batch, queries, count + 2 * kv_heads, dim) * scale).to(dtype)
    angles = torch.rand(2, batch, queries, dim // 2).unbind()
    positions = torch.tensor([[3], [17]]) + torch.arange(queries)
    norms = tuple(torch.randn(2, dim).to(dtype)) if norms else None
    given = positions, twice, norms, EPS, None, unit
    assert stores(NAMED[name], dtype, dim)
    plain = [torch.zeros(batch, kv_heads, 40, dim, dtype=dtype) for _ in "kv"]
    rings = [torch.zeros(batch, 4, count, dim, dtype=dtype) for _ in "ab"]
    expected = rotate_store(qkv.clone(), *angles, *plain, rings[0], *given)
    sides = form.keys, form.values
    held = [
        torch.full((batch, 40, kv_heads, side.width(dim)), 7, dtype=torch.uint8) for side in sides
    ]
    views = [rows.view(NAMED[name]).transpose(1, 2) for rows in held]
    found = rotate_store(qkv.clone(), *angles, *views, rings[1], *given)
    assert torch.equal(found, expected) and torch.equal(*rings)
    first, size = twice or (0, 0)
    written = {
        int(p) % size + first + more if size else int(p) for p in positions[0] for more in (0, size)
    }
    for side, rows, packed in zip(sides, plain, held):
        same = as_bytes(side.pack(rows)).view(torch.uint8).transpose(1, 2)
        for at in range(40):
            still = torch.full_like(packed[0, at], 7)
            assert torch.equal(packed[0, at], same[0, at] if at in written else still)
        assert (packed[1] != 7).any()


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([0, 1, 3, 130]),
    size=st.sampled_from([1, 15, 16, 17, 1100]),
    scale=st.sampled_from([1.0, 40.0, 200.0]),
)
def test_swiglu_is_within_twice_torchs_own_error(dtype, rows, size, scale):
    torch.manual_seed(size)
    both = (torch.randn(2, rows, 2 * size) * scale).to(dtype)
    exact, own, found = (turn(both) for turn in (_exact_swiglu, swiglu_rows_ref, act_rows))
    assert found.shape == own.shape and found.dtype == dtype
    error = (found.double() - exact).abs()
    # exp is within 2 units in the last place, a quotient and a product follow it
    limit = 2 * (own.double() - exact).abs() + 8 * torch.finfo(dtype).eps * exact.abs()
    finite = exact.abs() < torch.finfo(dtype).max
    nothing = max(torch.finfo(dtype).tiny, 1e-33)  # silu of less than -88, scaled
    assert (error <= limit + nothing)[finite].all()


def _exact_swiglu(both):
    return swiglu_rows_ref(both.double())


def test_rows_of_a_chunk_do_not_depend_on_the_threads():
    torch.manual_seed(0)
    x, weight, angle = torch.randn(1, 300, 12, 64), torch.randn(768), torch.randn(1, 300, 32)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            normed = normalize_rows(x.flatten(2), weight, EPS)
            turned = rotate_rows(x.clone(), angle.cos(), angle.sin(), 8, 2, (weight[:64],) * 2, EPS)
            found.append((normed, turned, act_rows(x.flatten(2))))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int8))
def test_rows_are_copied_wherever_they_lie(dtype):
    """By any number of threads, beside rows that stay; what is no such copy is torch's."""
    torch.manual_seed(4)
    source = torch.randint(-99, 99, (2, 701, 5, 67)).to(dtype)[..., 1:65].transpose(1, 2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            held = torch.full((2, 5, 800, 66), 7).to(dtype)
            expected = held.clone()
            expected[:, :, 3:704, :64] = source
            copy_rows(held[:, :, 3:704, :64], source)
            assert torch.equal(held, expected)
            copy_rows(held[:, :, :701, 1:65], source.double())
            assert torch.equal(held[:, :, :701, 1:65], source)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 20, 64])
def test_values_of_unit_size_and_rows_of_another_layer(dtype, dim):
    """V divided by its root mean square; a layer that reads another's rows keeps its queries; and
    one whose V is K, as it was rotated.
    """
    torch.manual_seed(dim)
    heads, kv_heads, eps = 3, 2, 1e-6
    qkv, positions = torch.randn(1, 4, heads + 2 * kv_heads, dim).to(dtype), torch.arange(7, 11)
    cos, sin = (f(torch.randn(1, 4, dim // 2)) for f in (torch.cos, torch.sin))
    places = [torch.zeros(1, kv_heads, 20, dim, dtype=dtype) for _ in range(4)]
    rings = [torch.zeros(1, 5, heads, dim, dtype=dtype) for _ in range(3)]
    more = cos, sin, *places[:2], rings[0], positions[None]
    q = rotate_store(qkv.clone(), *more, eps=eps, unit=True)
    v = qkv[:, :, heads + kv_heads :]
    exact = F.rms_norm(v.double(), (dim,), None, eps).transpose(1, 2)
    own = F.rms_norm(v, (dim,), None, eps).transpose(1, 2)
    found = places[1][:, :, 7:11]
    limit = 2 * (own.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit
    alone = rotate_store(
        qkv[:, :, :heads].contiguous(), cos, sin, None, None, rings[1], positions[None]
    )
    assert torch.equal(alone, q) and torch.equal(rings[1], rings[0])
    both = qkv[:, :, : heads + kv_heads].contiguous()
    same = rotate_store(both, cos, sin, places[2], None, rings[2], positions[None])
    assert torch.equal(same, q) and torch.equal(places[2], places[0])
    norm = torch.randn(dim).to(dtype)
    normed_first = qkv[:, :, :heads].clone()
    alone = rotate_store(
        normed_first, cos, sin, None, None, rings[1], positions[None], None, (norm, None), eps
    )
    expected = normalize_rows(qkv[:, :, :heads].contiguous(), norm, eps)
    assert torch.equal(rings[1][:, positions % 5], expected[:, -5:]) and alone.shape == q.shape
