"""A mixture of experts chosen, opened and summed on the device, interpreted, against a loop over
tokens and experts in float64.

Stops: a row that gets another one's experts or shares, an expert that is left out or read for rows
that did not choose it, ties that go to the higher id, NaN that spreads to other rows, a row whose
bits follow its neighbours.
"""

import pytest
import torch
import torch.nn.functional as F

from kernels.experts.choose import best_experts, choose_experts, choose_experts_ref
from kernels.experts.mix import mix_experts, mixes
from kernels.experts.open import SILU, open_experts, open_experts_ref
from kernels.experts.sum import sum_experts, sum_experts_ref
from tests.kernels.support.expert_checks import (
    CLAMP,
    GELU,
    RELU2,
    assert_rows_alone,
    assert_same_choice,
    check_mixture,
    made,
    mixture,
    noise,
    oracle,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# rows, experts, chosen of each
SHAPES = [
    (1, 4, 1), (1, 32, 4), (1, 128, 8), (2, 4, 4), (2, 128, 1), (7, 32, 4), (7, 128, 8), (16, 4, 1),
    (16, 32, 8), (16, 128, 8), (3, 5, 2),
]  # fmt: skip


@pytest.mark.parametrize("rows, count, best", SHAPES)
@pytest.mark.parametrize("dtype, normalise", [(F32, True), (F32, False), (BF16, True)])
def test_a_choice(rows, count, best, dtype, normalise):
    """In bfloat16 many logits are equal."""
    logits = noise(rows, rows, count, dtype=dtype)
    found = choose_experts(logits, best, normalise)
    close = dict(rtol=1e-5, atol=1e-7)
    assert_same_choice(found, choose_experts_ref(logits, best, normalise), **close)
    assert found.shares.shape == (min(count, rows * best), rows)
    if normalise:
        listed = found.shares[: int(found.listed)]
        torch.testing.assert_close(listed.sum(0), torch.ones(rows), **close)


@pytest.mark.parametrize("rows, count, best", [*SHAPES, (1, 256, 8), (5, 256, 8)])
@pytest.mark.parametrize("dtype, normalise", [(F32, True), (F32, False), (BF16, True)])
def test_a_choice_by_sigmoids_with_a_correction(rows, count, best, dtype, normalise):
    """The correction chooses others than the sigmoids alone, and is in no share."""
    logits, correction = noise(rows, rows, count, dtype=dtype), noise(9, count)
    found = choose_experts(logits, best, normalise, correction)
    wanted = choose_experts_ref(logits.double(), best, normalise, correction.double())
    close = dict(rtol=1e-5, atol=1e-7, check_dtype=False)
    assert_same_choice(found, wanted, **close)
    shares, ids = best_experts(logits, best, normalise, correction)
    assert sorted(set(ids.flatten().tolist())) == wanted.experts[: int(wanted.listed)].tolist()
    listed = wanted.shares[: int(wanted.listed)]
    torch.testing.assert_close(shares.sum().double(), listed.sum(), rtol=1e-5, atol=0)
    alone = choose_experts_ref(logits.double(), best, normalise)
    if count >= 32 and best > 1:
        assert alone.experts.tolist() != wanted.experts.tolist()
    wrong = torch.full_like(logits, float("nan"))
    spoilt = choose_experts(wrong, best, normalise, correction)
    assert spoilt.shares[: int(spoilt.listed)].isnan().all()


@pytest.mark.parametrize("value", [0.0, -0.0, 3.5, -1e30])
def test_equal_logits_go_to_the_lower_id(value):
    logits = torch.full((3, 32), value)
    logits[1, 20:25] = 4.0
    logits[2, ::2] = -logits[2, ::2] if value == 0 else value
    found = choose_experts(logits, 4, True)
    assert found.experts[: int(found.listed)].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert found.members[:8].tolist() == [0b101] * 4 + [0b010] * 4
    assert_same_choice(found, choose_experts_ref(logits, 4, True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_router_that_is_not_a_number_spoils_its_own_rows(normalise):
    """A whole row and one logit of a row, infinities, and rows beside them."""
    logits = noise(5, 6, 32)
    logits[1] = float("nan")
    logits[2, 31] = float("nan")
    logits[3, 7] = float("inf")
    logits[4, :30] = float("-inf")
    found = choose_experts(logits, 4, normalise)
    listed = found.shares[: int(found.listed)]
    chosen = (found.members[: int(found.listed), None] >> torch.arange(6)) & 1
    assert (chosen.sum(0) == 4).all()
    assert found.experts[: int(found.listed)].max() < 32
    bad = listed.isnan().any(0)
    assert bad.tolist() == [False, True, True, True, False, False]
    alone = choose_experts(logits[5:].contiguous(), 4, normalise)
    mine = chosen[:, 5].bool()
    assert torch.equal(listed[mine, 5], alone.shares[:, 0])


@pytest.mark.parametrize("rows, count, best", SHAPES)
@pytest.mark.parametrize(
    "dtype, normalise, activation", [(F32, False, SILU), (BF16, True, CLAMP), (F16, True, SILU)]
)
def test_a_mixture_is_that_of_a_loop_in_float64(rows, count, best, dtype, normalise, activation):
    """Widths that fill no tile, and several rounds of columns; biases under the clamp."""
    hidden, width = (300, 37) if (rows, count) == (3, 5) else (20, 12)
    check_mixture("cpu", rows, count, best, hidden, width, dtype, normalise, activation)


@pytest.mark.parametrize("rows, count, best", [(1, 4, 1), (3, 5, 2), (16, 6, 3)])
@pytest.mark.parametrize("dtype, activation", [(F32, GELU), (BF16, GELU), (F16, RELU2)])
def test_a_mixture_with_another_activation(rows, count, best, dtype, activation):
    """Gemma 4's, and Nemotron 3's without a gate, whose outputs fill a tile by themselves."""
    check_mixture("cpu", rows, count, best, 300, 37, dtype, True, activation)


@pytest.mark.parametrize(
    "rows, kind, activation", [(1, "int4", GELU), (3, "int4", RELU2), (16, "int8", RELU2)]
)
def test_experts_of_few_bits_with_another_activation(rows, kind, activation):
    check_mixture("cpu", rows, 4, 2, 64, 64, F16, True, activation, kind)


@pytest.mark.parametrize(
    "kind, dtype, activation",
    [("int4", F16, SILU), ("int4", BF16, CLAMP), ("int8", BF16, SILU)],
)
@pytest.mark.parametrize("rows, count, best", [(1, 32, 4), (3, 2, 2), (16, 8, 2)])
def test_experts_of_few_bits(kind, rows, count, best, dtype, activation):
    """Groups of 32 and 64; columns that fill no round, and some that do."""
    hidden, width = (64, 576) if rows == 3 else (64, 64)
    check_mixture("cpu", rows, count, best, hidden, width, dtype, True, activation, kind)


@pytest.mark.parametrize("activation", [CLAMP, GELU, RELU2])
@pytest.mark.parametrize("kind", ["floats", "int4"])
def test_the_references_are_the_kernels(kind, activation):
    """Each launcher's own, what is written and nothing else; with a residual."""
    stacks, _, router = mixture(8, 96, 64, F32, kind, True, activation=activation)
    x = noise(4, 5, 96)
    choice = choose_experts(F.linear(x, router), 2, True)
    opened = open_experts(x, stacks[0], choice, activation)
    wanted = open_experts_ref(x, stacks[0], choice, activation)
    for slot in range(int(choice.listed)):
        for row in range(5):
            if choice.members[slot] >> row & 1:
                torch.testing.assert_close(opened[slot, row], wanted[slot, row])
    residual = noise(6, 5, 96)
    found = sum_experts(opened, stacks[1], choice, residual)
    torch.testing.assert_close(found, sum_experts_ref(wanted, stacks[1], choice, residual))


def test_a_router_with_an_input_and_scales_of_its_own():
    """Gemma 4's: the experts' rows are others than those that choose, and each expert's shares have
    a factor; in float64 by hand, eager and compiled.
    """
    stacks, wide, router = mixture(6, 40, 24, F32, activation=GELU)
    x, read, scale = noise(1, 18, 40), noise(2, 18, 40), noise(3, 6)
    logits, exact = F.linear(read, router), torch.zeros(18, 40, dtype=torch.float64)
    for e in range(6):
        wide[1][0][e] *= scale[e].double()
    exact = oracle(x, logits, *wide, 3, True, GELU)

    def run(x):
        given = (router, None), stacks, 3, True, GELU
        return mix_experts(x, *given, x, routed=read, scale=scale)

    torch.testing.assert_close(run(x), (x + exact).float(), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), run(x))
    few = logits[:5].contiguous(), 3, True, None, scale
    assert_same_choice(choose_experts(*few), choose_experts_ref(*few), rtol=1e-5, atol=1e-7)


def test_all_rows_choose_the_same_expert():
    """One expert is listed, with sixteen rows; nothing of the others is read."""
    (up, down), wide, _ = mixture(32, 40, 24, F32)
    for stack in (up, down):
        for number in set(range(32)) - {31}:
            stack.expert(number)[0].fill_(float("nan"))
    logits = noise(1, 16, 32)
    logits[:, 31] = 9.0
    x = noise(2, 16, 40)
    choice = choose_experts(logits, 1, True)
    assert int(choice.listed) == 1 and choice.experts[0] == 31 and choice.members[0] == 0xFFFF
    found = sum_experts(open_experts(x, up, choice), down, choice)
    wide = [(m.nan_to_num(), b) for m, b in wide]
    torch.testing.assert_close(
        found.double(), oracle(x, logits, *wide, 1, True, SILU), rtol=1e-4, atol=1e-5
    )


def test_what_is_not_a_number_stays_in_its_row_and_in_its_expert():
    """A row of NaN, a router of NaN for one row, and an expert of NaN that two rows chose."""
    (up, down), _, _ = mixture(8, 40, 24, F32)
    logits = noise(1, 6, 8)
    logits[:, 3] = torch.tensor([9.0, -9, -9, 9, -9, -9])
    logits[1] = float("nan")
    x = noise(2, 6, 40)
    x[2] = float("nan")
    up.expert(3)[0].fill_(float("nan"))
    choice = choose_experts(logits, 2, True)
    for activation in (SILU, CLAMP, GELU):
        found = sum_experts(open_experts(x, up, choice, activation), down, choice)
        assert found.isnan().any(1).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("kind, dtype", [("floats", BF16), ("floats", F32), ("int4", BF16)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind, dtype):
    stacks, _, router = mixture(4, 32, 32, dtype, kind, bias=True)
    assert_rows_alone(stacks, router, noise(3, 16, 32, dtype=dtype), (16,))


def test_torch_compile_takes_a_mixture_as_one_operator():
    """Of floats with biases, and of few bits: one graph, for one row and for more than a launch
    takes.
    """
    for kind, activation in (("floats", CLAMP), ("int4", SILU)):
        stacks, _, router = mixture(3, 32, 32, F32, kind, bias=activation == CLAMP)

        def run(x, stacks=stacks, router=router, activation=activation):
            return mix_experts(x + 1, (router, None), stacks, 2, True, activation, x)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for rows in (1, 18):
            x = noise(rows, rows, 32)
            assert torch.equal(compiled(x), run(x))
        torch._dynamo.reset()


def test_what_the_kernels_take():
    assert mixes(512, 1 << 20) and not mixes(513, 8) and not mixes(512, 1 << 22)
    with pytest.raises(ValueError, match="found 17 rows, expected 1 to 16"):
        choose_experts(noise(0, 17, 4), 1, True)
    stack, _ = made(3, 4, 64, kind="int4")
    other, _ = made(1, 4, 64, kind="int8")
    assert not stack.takes(other.weight, None)
    assert not stack.takes(stack.expert(0)[0], noise(0, 4))
