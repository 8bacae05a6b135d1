"""The whole mixture of a decode step on the device: the router's product, the choice, gate and up,
the sum. Four launches, whatever was chosen, which torch.compile takes as one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.experts.choose import MOST_EXPERTS, choose_experts
from kernels.experts.open import SILU, Activation, open_experts
from kernels.experts.route import Routing, listed, route_experts, router_logits
from kernels.experts.stack import Stack
from kernels.experts.sum import sum_experts
from kernels.layer.gemv import MOST_ROWS, multiply_rows
from kernels.quant.words import Words


def mixes(count: int, outputs: int) -> bool:
    """Whether the kernels take so many experts with so many outputs each."""
    return count <= MOST_EXPERTS and count * outputs < 2**31


def mix_experts(
    x: torch.Tensor,
    router: tuple[torch.Tensor, torch.Tensor | None],
    stacks: tuple[Stack, Stack],
    per_token: int,
    normalise: bool,
    activation: Activation = SILU,
    residual: torch.Tensor | None = None,
    sigmoid: bool = False,
    routing: Routing | None = None,
    routed: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the experts that the rows of x [R, I] choose and add residual [R, I]: [R, I] in x's
    dtype.

    router: its matrix [E, I], contiguous, and its bias [E] or None; with sigmoid, or a routing that
    corrects, its correction. routing: as `route_experts` takes it, by torch's operators in place of
    the kernel that chooses; the matrix is float32 then. routed [R, I]: what the router reads in
    place of x, and scale [E]: of each expert's shares, both without a routing.
    stacks: the first matrix [2 W, I] or [W, I] and the last [I, W] of every expert, which `mixes`.
    Everything else as in `choose_experts` and `open_experts`. More than MOST_ROWS rows run some at
    a time.
    """
    if torch.compiler.is_compiling():
        parts = [t for stack in stacks for t in _parts(stack)]
        kinds, forms = zip(*(_form(stack) for stack in stacks))
        kind, *limits = activation
        return mix_experts_op(
            x, *router, parts, ",".join(kinds), [n for form in forms for n in form],
            per_token, normalise, kind, limits, residual, sigmoid,
            [] if routing is None else [*routing], routed, scale,
        )  # fmt: skip
    return _mixed(
        x, router, stacks, per_token, normalise, activation, residual, sigmoid, routing, routed,
        scale,
    )  # fmt: skip


def _mixed(
    x: torch.Tensor,
    router: tuple[torch.Tensor, torch.Tensor | None],
    stacks: tuple[Stack, Stack],
    per_token: int,
    normalise: bool,
    activation: Activation,
    residual: torch.Tensor | None,
    sigmoid: bool,
    routing: Routing | None,
    routed: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    found, (matrix, bias) = [], router
    for start in range(0, len(x), MOST_ROWS):
        rows = slice(start, start + MOST_ROWS)
        mine = x[rows].contiguous()
        added = None if residual is None else residual[rows].contiguous()
        if routing is None:
            read = mine if routed is None else routed[rows].contiguous()
            logits = multiply_rows(read, matrix, None if sigmoid else bias)
            given = logits, per_token, normalise
            choice = choose_experts(*given, bias if sigmoid else None, scale)
        else:
            logits = router_logits(mine, matrix)
            chosen = route_experts(logits, per_token, normalise, routing, bias)
            choice = listed(*chosen, len(matrix))
        opened = open_experts(mine, stacks[0], choice, activation)
        found.append(sum_experts(opened, stacks[1], choice, added))
    return found[0] if len(found) == 1 else torch.cat(found)


def _parts(stack: Stack) -> list[torch.Tensor | None]:
    """The tensors of a stack: floats or values, bias, scales, offsets."""
    if isinstance(stack.weight, torch.Tensor):
        return [stack.weight, stack.bias, None, None]
    return [stack.weight.values, stack.bias, stack.weight.scales, stack.weight.offsets]


def _form(stack: Stack) -> tuple[str, list[int]]:
    """What else makes a stack of its tensors: the kind of its words, "" for floats; experts, inputs
    and the words' group.
    """
    weight = stack.weight
    if isinstance(weight, torch.Tensor):
        return "", [stack.count, stack.inputs, 0]
    return weight.kind, [stack.count, stack.inputs, weight.group]


def _stack(parts: Sequence[torch.Tensor | None], kind: str, form: Sequence[int]) -> Stack:
    values, bias, scales, offsets = parts
    count, inputs, group = form
    assert values is not None
    if scales is None:
        return Stack(count, values, bias)
    return Stack(
        count, Words(kind, (values.shape[0], inputs), values, scales, offsets, group), bias
    )


@torch.library.custom_op("omnikv::mix_experts", mutates_args=())
def mix_experts_op(
    x: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    parts: Sequence[torch.Tensor | None],
    kinds: str,
    forms: Sequence[int],
    per_token: int,
    normalise: bool,
    kind: str,
    limits: Sequence[float],
    residual: torch.Tensor | None,
    sigmoid: bool,
    routing: Sequence[float],
    routed: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """`mix_experts` in plain tensors: of both stacks what `_parts` and `_form` give, one after the
    other. An operator that a compiler does not look into.
    """
    half, sizes = len(parts) // 2, len(forms) // 2
    one, other = kinds.split(",")
    gate_up = _stack(parts[:half], one, forms[:sizes])
    down = _stack(parts[half:], other, forms[sizes:])
    router_both = router, router_bias
    stacks, activation = (gate_up, down), Activation(kind, *limits)
    given = x, router_both, stacks, per_token, normalise, activation, residual, sigmoid
    return _mixed(*given, Routing.of(routing) if routing else None, routed, scale)


@mix_experts_op.register_fake
def _(
    x: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    parts: Sequence[torch.Tensor | None],
    kinds: str,
    forms: Sequence[int],
    per_token: int,
    normalise: bool,
    kind: str,
    limits: Sequence[float],
    residual: torch.Tensor | None,
    sigmoid: bool,
    routing: Sequence[float],
    routed: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape)
