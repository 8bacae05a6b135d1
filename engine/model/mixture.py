"""A mixture of experts in place of a layer's MLP: a router scores all experts for every token, the
best few of them run, and their outputs are added with the router's weights.

A decode step reads its token's own experts, per_token in each layer. On a GPU the device chooses
them, and one launch multiplies by all of them (kernels/experts): so the step asks the host for
nothing and is captured. On a CPU one call of the C++ kernels chooses and runs them. Where there are
no kernels, the host runs the chosen ones one after the other. A prompt's chunk, and several rows of
experts in few bits, are sorted by expert, and the host reads once a layer how many rows each has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kernels.experts.choose import best_experts
from kernels.experts.mix import mix_experts, mixes
from kernels.experts.native_experts import NativeExperts
from kernels.experts.native_rows import add_rows, moves_rows, take_rows
from kernels.experts.open import SILU, Activation, activated
from kernels.experts.route import Routing, route_experts, router_logits
from kernels.experts.stack import Stack
from kernels.layer.gemv import MOST_ROWS
from kernels.layer.linear import Linear, pack_linear
from kernels.layer.native_product import Product
from kernels.layer.native_step import act_rows
from kernels.quant.linear import QuantisedLinear, pack_quantised
from kernels.quant.matrix import Quantised
from kernels.quant.native import FewBits
from kernels.quant.words import Words

if TYPE_CHECKING:
    Matrix = Linear | QuantisedLinear


@dataclass(frozen=True)
class Experts:
    """The mixture of a model's layers: `count` experts of `width` in each, of which a token takes
    `per_token`. normalise: whether the weights of the chosen sum to one. dense: layers that have
    the plain MLP of intermediate_size instead. bias: whether router and experts have biases.
    activation: of an expert (kernels/experts/open.py). stored: how a checkpoint holds experts, each
    "apart", "stacked" in one tensor by input or "rows" by output, or in "mxfp4"
    (engine/model/tensors.py). shared: width of an expert that every token takes beside its own, 0:
    there is none; shared_gate: whether the sigmoid of a product of its input multiplies what it
    adds. sigmoid: sigmoids in place of the softmax, chosen with a correction
    (kernels/experts/choose.py). beside: Gemma 4's, which runs beside the layer's MLP: the router
    has a norm and scales of its own. routing: another way from logits to a choice
    (kernels/experts/route.py), in place of `sigmoid`.
    """

    count: int
    per_token: int
    width: int
    normalise: bool
    dense: tuple[int, ...] = ()
    bias: bool = False
    activation: Activation = SILU
    stored: str = "apart"
    shared: int = 0
    shared_gate: bool = True
    sigmoid: bool = False
    beside: bool = False
    routing: Routing | None = None

    @property
    def corrected(self) -> bool:
        """Whether a learned correction takes part in the choice."""
        return self.sigmoid or (self.routing is not None and self.routing.corrected)

    @property
    def outputs(self) -> int:
        """Outputs of an expert's first matrix: gate and up, or up alone."""
        return self.activation.made * self.width

    def parameters(self, hidden: int, read: bool = False) -> int:
        """Weights of one layer's mixture; `read`: those that one token reads."""
        experts, each = self.per_token if read else self.count, hidden * (self.activation.made + 1)
        biases = self.count + experts * (self.outputs + hidden) if self.bias else 0
        biases += self.count + 4 * hidden if self.beside else 0
        own = self.count * hidden + experts * each * self.width + biases
        own += self.count if self.corrected else 0
        gate = hidden if self.shared and self.shared_gate else 0
        return own + each * self.shared + gate


@dataclass(eq=False)
class Mixture:
    """One layer's router, and the two matrices of every expert.

    stacks: those of all experts in one tensor each, gate and up first, of which `gate_up` and
    `down` are views: where the device chooses. None: the host does.
    """

    experts: Experts
    router: torch.Tensor  # [count, hidden]
    gate_up: Sequence[Matrix]  # [outputs, hidden]
    down: Sequence[Matrix]  # [hidden, width]
    bias: torch.Tensor | None = None  # of the router, or the correction of the choice, [count]
    stacks: tuple[Stack, Stack] | None = None
    # beside an MLP: of the router's input, [hidden], and of every expert's share, [count]
    scale: torch.Tensor | None = None
    share: torch.Tensor | None = None
    # adds what all ranks' shares of the experts bring, where each has a part of their width
    join: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def routers(self) -> list[torch.Tensor]:
        """The router's tensors."""
        own = (self.router, self.bias, self.scale, self.share)
        return [tensor for tensor in own if tensor is not None]

    @property
    def matrices(self) -> list[Matrix]:
        """The experts' matrices."""
        return [*self.gate_up, *self.down]

    def mapped(self, change: Callable[[Any], Any]) -> Mixture:
        """Return the same mixture with what `change` makes of each of its experts' matrices."""
        gate_up, down = ([change(m) for m in held] for held in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)

    def on_host(self) -> Mixture:
        """Return the same mixture, of the same memory, whose experts the host chooses."""
        return self if self.stacks is None else replace(self, stacks=None)

    def choose_on_host(self) -> None:
        """Let the host choose from now on. The memory stays: an expert's matrices are its views."""
        self.stacks = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the experts that x [B, S, hidden] chooses, or `routed` in its place, and add
        `residual`: [B, S, hidden].
        """
        if self.join is None:
            return self._mixed(x, residual, routed)
        out = self.join(self._mixed(x, None, routed))
        return out if residual is None else residual + out

    def _mixed(
        self, x: torch.Tensor, residual: torch.Tensor | None, routed: torch.Tensor | None
    ) -> torch.Tensor:
        flat = x.flatten(0, 1)
        if self.stacks is not None and (torch.compiler.is_compiling() or len(flat) <= MOST_ROWS):
            experts, router = self.experts, (self.router, self.bias)
            given = router, self.stacks, experts.per_token, experts.normalise, experts.activation
            added, read = (None if t is None else t.flatten(0, 1) for t in (residual, routed))
            more = experts.sigmoid, experts.routing, read, self.share
            return mix_experts(flat, *given, added, *more).view_as(x)
        read = flat if routed is None else routed.flatten(0, 1)
        native = None if torch.compiler.is_compiling() else self._native
        if native is not None and len(flat) <= native.rows:
            added = None if residual is None else residual.flatten(0, 1)
            chosen = self.route(read) if self.experts.routing is not None else None
            return native(flat, added, None if routed is None else read, chosen).view_as(x)
        chosen = self.route(read)
        out = (self._one_row if len(flat) == 1 else self._sorted)(flat, *chosen).view_as(x)
        return out if residual is None else residual + out

    @property
    def of_a_row(self) -> NativeExperts | None:
        """What one call of C++ needs to run a row on the CPU, or None."""
        alone = self.join is None and self.stacks is None and self.experts.routing is None
        return self._native if alone else None

    @cached_property
    def _native(self) -> NativeExperts | None:
        """All experts and the router as the C++ kernels take them; None where they do not."""
        firsts, lasts = sides = [
            [p for p in map(_of_a_row, held) if p is not None] for held in (self.gate_up, self.down)
        ]
        experts, count, dtype = self.experts, self.experts.count, self.router.dtype
        whole = len(firsts) == len(lasts) == count
        if not whole or not NativeExperts.takes(self.router, sides, experts.per_token):
            return None
        bias, correction = (None, self.bias) if experts.corrected else (self.bias, None)
        given = experts.per_token, experts.normalise, experts.activation
        bias = None if bias is None else bias.to(dtype)
        return NativeExperts(self.router, firsts, lasts, *given, bias, correction, self.share)

    def _one_row(
        self, flat: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Run a decode step's experts where there are no C++ kernels for them: one activation and
        one sum for all of them.
        """
        numbers = chosen[0].tolist()
        both = torch.cat([self.gate_up[number](flat) for number in numbers])
        opened = activated(both, self.experts.activation).split(1)
        parts = torch.cat([self.down[number](part) for number, part in zip(numbers, opened)])
        return torch.mm(weights, parts)

    def _sorted(
        self, flat: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Run many rows' experts, ascending, each with all of its rows at once. The host waits once
        for the device, for the rows of each. C++ kernels add in float32.
        """
        ours, ids = self.gate_up[0].native and moves_rows(flat), chosen.flatten()
        counts = ids.new_zeros(self.experts.count).scatter_add_(0, ids, torch.ones_like(ids))
        order = torch.argsort(ids, stable=True)
        rows, shares = order // chosen.shape[1], weights.flatten()[order]
        out = torch.zeros_like(flat, dtype=torch.float32 if ours else flat.dtype)
        shares, start = shares.float() if ours else shares, 0
        for number, count in enumerate(counts.tolist()):
            if not count:
                continue
            mine, start = slice(start, start + count), start + count
            x = take_rows(flat, rows[mine]) if ours else flat[rows[mine]]
            part = self.down[number](self._opened(number, x, ours))
            if ours:
                add_rows(out, part, rows[mine], shares[mine])
            else:
                out.index_add_(0, rows[mine], part * shares[mine, None])
        return out.to(flat.dtype)

    def _opened(self, number: int, x: torch.Tensor, ours: bool) -> torch.Tensor:
        """An expert's first matrix for x [n, hidden], and its activation: [n, width]. ours: by the
        C++ kernels.
        """
        matrix, activation = self.gate_up[number], self.experts.activation
        if not ours:
            return activated(matrix(x), activation)
        if activation == SILU and isinstance(matrix, Linear):
            if (product := matrix.own(x)) is not None:
                return product(x, gated=True)
            if (strips := matrix.strips(x)) is not None:
                return strips(x, gated=True)
        return act_rows(matrix(x), *activation)

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows [T, hidden]: (weights in their dtype, numbers int64), both
        [T, per_token].
        """
        experts, bias = self.experts, self.bias
        taken, correction = (experts.per_token, experts.normalise), None
        if experts.corrected:
            correction, bias = bias, None
        if experts.routing is None:
            logits = torch.nn.functional.linear(flat, self.router, bias)
            shares, chosen = best_experts(logits, *taken, correction)
        else:
            logits = router_logits(flat, self.router)
            shares, chosen = route_experts(logits, *taken, experts.routing, correction)
        if self.share is not None:
            shares = shares * self.share[chosen]
        return shares.to(flat.dtype), chosen


def _of_a_row(matrix: Matrix) -> Product | FewBits | None:
    """A matrix as C++ kernels take it that multiply a row by it themselves."""
    if isinstance(matrix, Linear):
        return matrix.product
    return matrix.of_a_row if isinstance(matrix, QuantisedLinear) else None


class Stacks:
    """The experts of a model's layers while they arrive, each put into its place of the tensor that
    holds all of its layer.
    """

    def __init__(self, experts: Experts, hidden: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = experts.count, dtype
        self._possible = mixes(experts.count, max(experts.outputs, hidden))
        self._held: dict[str, Stack] = {}
        self._apart: set[str] = set()

    def take(
        self,
        name: str,
        weight: torch.Tensor | Quantised,
        bias: torch.Tensor | None,
        form: str,
        few_bits: str,
    ) -> Matrix:
        """Return an expert's matrix in the memory of its layer. name: "LAYER.experts.NUMBER.PART";
        form, few_bits: as `assemble` has them. One of another form than the first of its layer
        stays apart, and the host chooses there.
        """
        layer, _, number, part = name.split(".")
        key = f"{layer}.{part}"
        own: Matrix
        if isinstance(weight, Quantised):
            own = pack_quantised(weight, bias, self._dtype, few_bits)
            held: torch.Tensor | Words | None = _words(own)
        else:
            own, held = pack_linear(weight, bias, form=form), weight
        stack = self._held.get(key)
        if held is not None and self._possible and stack is None:
            stack = self._held[key] = Stack.like(self._count, held, bias)
        if held is None or stack is None or not stack.takes(held, bias):
            self._apart.add(key)
            return own
        stack.put(int(number), held, bias)
        mine, bias = stack.expert(int(number))
        if isinstance(mine, torch.Tensor):
            return pack_linear(mine, bias, form=form)
        assert isinstance(own, QuantisedLinear)
        return own.lying_in(mine, bias)

    def of(self, layer: int) -> tuple[Stack, Stack] | None:
        """The two tensors of a layer, where both hold all of its experts."""
        keys = f"{layer}.gate_up", f"{layer}.down"
        if self._apart & set(keys):
            return None
        return self._held[keys[0]], self._held[keys[1]]


def _words(matrix: QuantisedLinear) -> Words | None:
    """The words of a matrix that a kernel can index; None where inputs are permuted."""
    return None if matrix.permutation is not None else matrix.words
