"""Check a mixture's kernels: interpreted (tests/kernels) and compiled on a GPU (tests/cuda).

The oracle is a loop over tokens and experts in float64. The rule is that of kernel_checks.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.experts.choose import Choice, best_experts, choose_experts
from kernels.experts.mix import mix_experts
from kernels.experts.open import SILU, Activation, activated, open_experts
from kernels.experts.stack import Stack
from kernels.experts.sum import sum_experts
from kernels.quant.rounding import to_int4, to_int8
from kernels.quant.words import Words
from tests.kernels.support.kernel_checks import assert_close

F32, BF16 = torch.float32, torch.bfloat16
CLAMP = Activation("clamped", 0.7, 1.702)  # a limit that random numbers reach
GELU, RELU2 = Activation("gelu_tanh"), Activation("relu2")
Wide = list[torch.Tensor]  # matrices [E, O, I] and biases [E, O] in float64


def noise(
    seed: int, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0, device: str = "cpu"
) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def made(
    count: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = F32,
    kind: str = "floats",
    bias: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Stack, Wide]:
    """A stack of random matrices, floats or of few bits, and the same in float64."""
    given = noise(seed + 1, count, outputs, dtype=dtype, device=device)
    dense, stack = [], None
    for number in range(count):
        weight = noise(100 * seed + number, outputs, inputs, scale=inputs**-0.5, device=device)
        held: torch.Tensor | Words = weight.to(dtype)
        exact = weight.to(dtype).double()
        if kind != "floats":
            few = to_int4(weight, 32) if kind == "int4" else to_int8(weight, 64, 0, BF16)
            held, exact = Words.of(few), few.dense(torch.float64)
        one = given[number] if bias else None
        stack = stack or Stack.like(count, held, one)
        assert stack.takes(held, one)
        stack.put(number, held, one)
        dense.append(exact)
    assert stack is not None
    biases = given.double() if bias else torch.zeros_like(given, dtype=torch.float64)
    return stack, [torch.stack(dense), biases]


def mixture(
    count: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    kind: str = "floats",
    bias: bool = False,
    device: str = "cpu",
    activation: Activation = SILU,
) -> tuple[tuple[Stack, Stack], tuple[Wide, Wide], torch.Tensor]:
    """Both stacks of a mixture, the same in float64, and a router."""
    up, wide_up = made(count, activation.made * width, hidden, dtype, kind, bias, 1, device)
    down, wide_down = made(count, hidden, width, dtype, kind, bias, 2, device)
    router = noise(9, count, hidden, dtype=dtype, scale=hidden**-0.5, device=device)
    return (up, down), (wide_up, wide_down), router


def oracle(
    x: torch.Tensor,
    logits: torch.Tensor,
    up: Wide,
    down: Wide,
    per_token: int,
    normalise: bool,
    activation: Activation,
) -> torch.Tensor:
    """Every token and every expert by itself, in float64."""
    out = torch.zeros(len(x), down[0].shape[1], dtype=torch.float64, device=x.device)
    for row, its in enumerate(logits.tolist()):
        best = sorted(sorted(range(len(its)), key=lambda e: (-its[e], e))[:per_token])
        shares = torch.softmax(logits[row].double(), 0)
        total = shares[best].sum() if normalise else 1.0
        for e in best:
            both = up[0][e] @ x[row].double() + up[1][e]
            part = down[0][e] @ activated(both, activation) + down[1][e]
            out[row] += part * shares[e] / total
    return out


def in_torch(
    x: torch.Tensor,
    logits: torch.Tensor,
    up: Wide,
    down: Wide,
    per_token: int,
    normalise: bool,
    activation: Activation,
) -> torch.Tensor:
    """The same by torch's operators, in the dtype of x."""
    shares, ids = best_experts(logits, per_token, normalise)
    out = torch.zeros(len(x), down[0].shape[1], dtype=x.dtype, device=x.device)
    for row in range(len(x)):
        for place, e in enumerate(ids[row].tolist()):
            matrices = [t[e].to(x.dtype) for t in (*up, *down)]
            part = F.linear(activated(F.linear(x[row], *matrices[:2]), activation), *matrices[2:])
            out[row] += part * shares[row, place].to(x.dtype)
    return out


def run_parts(
    x: torch.Tensor,
    logits: torch.Tensor,
    stacks: tuple[Stack, Stack],
    per_token: int,
    normalise: bool,
    activation: Activation = SILU,
) -> torch.Tensor:
    """The three launchers over given logits."""
    choice = choose_experts(logits, per_token, normalise)
    return sum_experts(open_experts(x, stacks[0], choice, activation), stacks[1], choice)


def check_mixture(
    device: str,
    rows: int,
    count: int,
    per_token: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    normalise: bool = True,
    activation: Activation = SILU,
    kind: str = "floats",
) -> None:
    """Check a mixture against the oracle; biases go with the clamped activation."""
    bias = activation.kind == "clamped"
    stacks, wide, router = mixture(count, hidden, width, dtype, kind, bias, device, activation)
    x = noise(rows, rows, hidden, dtype=dtype, device=device)
    router_bias = noise(3, count, dtype=dtype, device=device) if bias else None
    logits = F.linear(x, router, router_bias)
    given = logits, *wide, per_token, normalise, activation
    exact, plain = oracle(x, *given), in_torch(x, *given)
    found = run_parts(x, logits, stacks, per_token, normalise, activation)
    what = f"{kind}, {rows} rows, {per_token} of {count}"
    assert found.dtype == dtype and found.shape == x.shape and torch.isfinite(found).all(), what
    assert_close(found, exact, plain, dtype, what)
    if dtype == F32:  # else a router's logit in another last place may choose another expert
        whole = mix_experts(x, (router, router_bias), stacks, per_token, normalise, activation)
        torch.testing.assert_close(whole, found, rtol=1e-4, atol=1e-5)


def assert_same_choice(found: Choice, wanted: Choice, **close: float) -> None:
    """Everything that is listed; what lies beyond is not written."""
    count = int(wanted.listed)
    assert int(found.listed) == count
    for name in ("experts", "members"):
        assert torch.equal(getattr(found, name)[:count], getattr(wanted, name)[:count]), name
    torch.testing.assert_close(found.shares[:count], wanted.shares[:count], **close)


PLACES = (0, 1, 4, 7, 8, 11, 15)  # of 16 rows


def assert_rows_alone(
    stacks: tuple[Stack, Stack], router: torch.Tensor, x: torch.Tensor, counts: tuple[int, ...]
) -> None:
    """Rows of x [16, hidden] have the bits that they have alone, at any place, among so many rows
    and among more than a launch takes.
    """

    def run(rows: torch.Tensor) -> torch.Tensor:
        return mix_experts(rows, (router, None), stacks, 3, True, CLAMP, rows)

    alone = {j: run(x[j : j + 1]) for j in PLACES}
    for first, count in (*((0, count) for count in counts), (7, 5)):
        found = run(x[first : first + count])
        for j in PLACES:
            if first <= j < first + count:
                assert torch.equal(found[j - first], alone[j][0]), f"row {j} among {count}"
    found = run(torch.cat([x, x[:5]]))
    for j in (*PLACES, 16, 17, 20):
        assert torch.equal(found[j], alone[j % 16][0]), f"row {j} of 21"
