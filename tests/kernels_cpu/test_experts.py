"""A mixture of experts for a few rows in one C++ call, against float64.

Stops: an expert that nobody chose, a share of another one, columns behind the last, bits that hang
on the number of threads.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.experts.choose import best_experts
from kernels.experts.native_experts import _BINDING, NativeExperts
from kernels.experts.open import Activation, activated
from kernels.layer.native_product import Product
from kernels.layer.native_step import ACTIVATIONS
from kernels.quant.native import FewBits, Panels
from kernels.quant.rounding import to_int4, to_int8

pytestmark = pytest.mark.skipif(not _BINDING.usable(), reason="no C++ kernels here")

KINDS = {"silu": Activation(), "gelu_tanh": Activation("gelu_tanh"), "relu2": Activation("relu2")}
KINDS["clamped"] = Activation("clamped", 0.7, 1.702)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """A mixture with random weights and a row."""

    def __init__(self, seed, count, taken, hidden, width, dtype, activation, biases, rows=1):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, by=1.0):
            return (torch.randn(*shape, generator=generator) * by).to(dtype)

        made = activation.made * width
        self.taken, self.activation, self.dtype = taken, activation, dtype
        self.router, self.x = draw(count, hidden, by=3 * hidden**-0.5), draw(rows, hidden)
        self.first = draw(count, made, hidden, by=hidden**-0.5)
        self.last = draw(count, hidden, width, by=width**-0.5)
        self.residual, self.routed = draw(rows, hidden), draw(rows, hidden)
        self.first_bias = draw(count, made, by=0.3) if biases else [None] * count
        self.last_bias = draw(count, hidden, by=0.3) if biases else [None] * count
        self.router_bias, self.correction = draw(count), draw(count, by=0.2)
        self.factors = draw(count).abs()
        pairs = (self.first, self.first_bias), (self.last, self.last_bias)
        self.products = [[Product(w, b) for w, b in zip(*pair)] for pair in pairs]

    def choice(self, normalise, read, corrected, biased):
        """Shares and numbers by torch's operators."""
        logits = F.linear(read, self.router, self.router_bias if biased else None)
        correction = self.correction if corrected else None
        shares, numbers = best_experts(logits, self.taken, normalise, correction)
        return logits, shares, numbers

    def sum(self, shares, numbers, residual, dtype):
        """The experts of a choice and the residual, in a dtype."""
        found = torch.zeros(*self.x.shape, dtype=dtype)
        for row, (mine, own) in enumerate(zip(shares.tolist(), numbers.tolist())):
            for share, number in zip(mine, own):
                both = self.first[number], self.first_bias[number]
                both = [None if t is None else t.to(dtype) for t in both]
                middle = activated(F.linear(self.x[row].to(dtype), *both), self.activation)
                both = self.last[number], self.last_bias[number]
                both = [None if t is None else t.to(dtype) for t in both]
                found[row] += share * F.linear(middle, *both)
        return found if residual is None else residual.to(dtype) + found


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.sampled_from([1, 2, 7, 16, 17, 65]),
    taken=st.integers(1, 9),
    hidden=st.sampled_from([1, 15, 16, 31, 33, 64, 97]),
    width=st.sampled_from([1, 7, 15, 16, 17, 31, 40]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(ACTIVATIONS),
    biases=st.booleans(),
    how=st.sampled_from(["softmax", "all", "sigmoids", "sigmoids, all", "elsewhere"]),
    residual=st.booleans(),
    apart=st.booleans(),
    rows=st.sampled_from([1, 1, 2, 3, 5, 8]),
)
def test_a_mixture_is_what_float64_says(
    seed, count, taken, hidden, width, dtype, kind, biases, how, residual, apart, rows
):
    taken = min(taken, count)
    case = Case(seed, count, taken, hidden, width, dtype, KINDS[kind], biases, rows)
    normalise, corrected = "all" not in how, "sigmoids" in how
    routed = case.routed if apart else None
    read, biased = routed if apart else case.x, biases and not corrected  # no family has both
    logits, shares, numbers = case.choice(normalise, read, corrected, biased)
    ranks = logits.float() if not corrected else logits.float().sigmoid() + case.correction.float()
    gaps = ranks.sort(descending=True).values.diff().abs()[:, : case.taken]
    if (
        gaps.numel()
        and gaps.min() < (0.001 if dtype == torch.float32 else 0.02)
        and how != "elsewhere"
    ):
        return  # a last bit of the router's product may choose another expert
    shares = shares * case.factors[numbers]
    given = (shares.to(dtype), numbers) if how == "elsewhere" else None
    native = NativeExperts(
        case.router, *case.products, case.taken, normalise, case.activation,
        case.router_bias if biased else None,
        case.correction if corrected else None,
        case.factors,
    )  # fmt: skip
    added = case.residual if residual else None
    found = native(case.x, added, routed, given).double()
    shares = shares.to(dtype)
    wanted = case.sum(shares, numbers, added, torch.float64)
    plain = case.sum(shares, numbers, added, dtype).double()
    step = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    bound = 2 * (plain - wanted).abs().max() + step * (1 + wanted.abs().max())
    assert (found - wanted).abs().max() <= bound
    # the control: the share of one expert for another's is seen
    if case.taken > 1 and wanted.abs().max() > 0.1:
        other = case.sum(shares.flip(1), numbers, added, torch.float64)
        if (other - wanted).abs().max() > 2 * bound:
            assert (found - other).abs().max() > bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit_and_ties_go_to_the_lower_number(dtype):
    case = Case(3, 12, 4, 640, 400, dtype, KINDS["silu"], False)
    case.router[5:8] = case.router[2]  # four equal logits
    case.x[0] = case.router[2] * 20
    native = NativeExperts(case.router, *case.products, 3, True)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found += [native(case.x, case.residual) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)
    third = torch.full((1, 3), 1 / 3, dtype=dtype)
    wanted = case.sum(third, torch.tensor([[2, 5, 6]]), case.residual, torch.float64)
    torch.testing.assert_close(found[0].double(), wanted, atol=5e-2, rtol=3e-2)
    other = case.sum(third, torch.tensor([[5, 6, 7]]), case.residual, torch.float64)
    assert (other - wanted).abs().max() > 0.3


def test_nan_and_infinity_come_through():
    case = Case(4, 6, 2, 64, 32, torch.float32, KINDS["silu"], False)
    native = NativeExperts(case.router, *case.products, 2, True)
    case.x[0, 3] = float("nan")
    assert native(case.x).isnan().all()
    clean = Case(4, 6, 2, 64, 32, torch.float32, KINDS["silu"], False)
    chosen = clean.choice(True, clean.x, False, False)[2][0].tolist()
    with torch.no_grad():
        for number in set(range(6)) - set(chosen):
            clean.first[number] = float("nan")
            clean.last[number] = float("inf")
    assert NativeExperts(clean.router, *clean.products, 2, True)(clean.x).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.sampled_from([1, 2, 7, 16, 65]),
    taken=st.integers(1, 9),
    hidden=st.sampled_from([16, 48, 64, 96]),
    width=st.sampled_from([16, 32, 40, 80]),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from([("int8", 0), ("int8", 16), ("int4", 8), ("int4", 16)]),
    kind=st.sampled_from(ACTIVATIONS),
    biases=st.booleans(),
    corrected=st.booleans(),
    elsewhere=st.booleans(),
    residual=st.booleans(),
)
def test_experts_in_few_bits_err_no_more_than_twice_torchs(
    seed, count, taken, hidden, width, dtype, form, kind, biases, corrected, elsewhere, residual
):
    """Against float64 of the same rounded weights; by any number of threads the same bits."""
    (name, group), taken = form, min(taken, count)
    if width % (group or 1) or hidden % (group or 1):
        width, hidden = 48, 64
    case = Case(seed, count, taken, hidden, width, dtype, KINDS[kind], biases)
    sides = []
    for weights, bias in ((case.first, case.first_bias), (case.last, case.last_bias)):
        few = [to_int8(w, group or None) if name == "int8" else to_int4(w, group) for w in weights]
        sides.append([FewBits(Panels.of(w), b) for w, b in zip(few, bias)])
    case.first, case.last = (
        torch.stack([one.weight.rows(slice(None), torch.float64) for one in side]) for side in sides
    )
    assert NativeExperts.takes(case.router, sides, taken)
    correction = case.correction if corrected else None
    mixture = NativeExperts(
        case.router, *sides, taken, True, KINDS[kind], case.router_bias, correction
    )
    assert mixture.rows == 1
    _, shares, numbers = case.choice(True, case.x, corrected, True)
    shares = shares.to(dtype)
    added = case.residual if residual else None
    found = mixture(case.x, added, chosen=(shares, numbers) if elsewhere else None)
    exact, own = (case.sum(shares, numbers, added, kept) for kept in (torch.float64, dtype))
    limit = 2 * (own.double() - exact).abs().max() + 8 * torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit + 1e-6
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = mixture(case.x, added, chosen=(shares, numbers) if elsewhere else None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again, found)


def test_experts_of_several_forms_are_not_taken():
    case = Case(0, 3, 2, 64, 32, torch.float32, KINDS["silu"], False)
    eight = [FewBits(Panels.of(to_int8(w)), None) for w in case.first]
    four = [FewBits(Panels.of(to_int4(w, 16)), None) for w in case.last]
    assert NativeExperts.takes(case.router, [eight, four], 2)  # each side is of one
    assert not NativeExperts.takes(case.router, [[*eight[:2], four[0]], four], 2)
    assert not NativeExperts.takes(case.router, [eight, case.products[1]], 2)
    assert NativeExperts.takes(case.router, case.products, 2)
    assert not NativeExperts.takes(case.router.half(), case.products, 2)
