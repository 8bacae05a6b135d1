"""What a further token of a step costs in each kernel: the constants of engine/plan/cpu_costs.py.

Layers of a shape by themselves: attention over every row, and the products of one layer with the
head's share of them. Thread CPU time of one thread; calls with 1, 2, ... 8 tokens take turns, so
that what else the machine does falls on all of them alike. An instruction set is taken away as
tools/speed/cpu_forms.py does it: by the environment, before torch is loaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.methods.exact import MOST_DRAFTS
from engine.model.config.config import ModelConfig
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.launch.isa import isa
from kernels.layer.linear import Linear, pack_linear
from kernels.quant.linear import QuantisedLinear, choose_quantised_form
from kernels.quant.rounding import to_int4, to_int8

KINDS = ("plain", "int8", "int4")
WIDTHS = tuple(range(1, MOST_DRAFTS + 2))
WEIGHT_BYTES = 96 << 20  # of copies that take turns: more than a core's caches hold
GROUP = 32  # columns under a scale of int4


@dataclass
class Cost:
    """Milliseconds by tokens of a step, 1 to 8. what: "attention" or how the weights are held;
    nbytes: read by one call; further: what a further token adds, in calls of one token (least
    squares).
    """

    isa: str
    shape: str
    dtype: str
    what: str
    nbytes: int
    milliseconds: list[float]

    @property
    def further(self) -> float:
        """Slope of the cost over the tokens, relative to one token's."""
        one = self.milliseconds[0]
        more = [(w - 1, t / one - 1) for w, t in zip(WIDTHS, self.milliseconds)]
        return sum(x * y for x, y in more) / sum(x * x for x, _ in more)

    @property
    def rate(self) -> float:
        """GB/s of a call of one token."""
        return self.nbytes / self.milliseconds[0] / 1e6

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self) | {"further": round(self.further, 4), "rate": round(self.rate, 2)}


def attention(shape: str, config: ModelConfig, dtype: torch.dtype, rows: int, turns: int) -> Cost:
    """One layer over `rows` rows, for steps of every width."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    k, v = torch.randn(2, 1, kv_heads, rows + 64, dim).to(dtype).unbind(0)
    length = torch.tensor([rows], dtype=torch.int32)
    largest = ScratchShape(
        1, WIDTHS[-1], heads, kv_heads, dim, rows + 64, scored=True, window=16, dtype=dtype
    )
    scratch = make_scratch(largest, "cpu")
    queries = [torch.randn(1, width, heads, dim).to(dtype) for width in WIDTHS]

    def call(q: torch.Tensor) -> Callable[[], object]:
        return lambda: decode_dense(q, k, v, length, dim**-0.5, scratch=scratch)

    found = in_turns([call(q) for q in queries], turns)
    nbytes = rows * config.kv_bytes(dtype.itemsize)
    return Cost(isa(), shape, str(dtype)[6:], "attention", nbytes, found)


def weights(shape: str, config: ModelConfig, dtype: torch.dtype, kind: str, turns: int) -> Cost:
    """Four products of a layer, for steps of every width. kind: "plain", "int8" or "int4"."""
    hidden, inner, wide = config.hidden_size, config.intermediate_size, config.q_size
    shapes = [(wide + 2 * config.kv_size, hidden), (hidden, wide)]
    shapes += [(2 * inner, hidden), (hidden, inner)]
    layers = [[_linear(pair, dtype, kind) for pair in shapes]]
    nbytes = sum(linear.nbytes for linear in layers[0])
    while len(layers) * nbytes < WEIGHT_BYTES:
        layers.append([_linear(pair, dtype, kind) for pair in shapes])

    def call(width: int) -> Callable[[], object]:
        given = [torch.randn(1, width, columns).to(dtype) for _, columns in shapes]
        return lambda: [w(x) for layer in layers for w, x in zip(layer, given)]

    found = [t / len(layers) for t in in_turns([call(width) for width in WIDTHS], turns)]
    return Cost(isa(), shape, str(dtype)[6:], kind, nbytes, found)


def _linear(pair: tuple[int, int], dtype: torch.dtype, kind: str) -> Linear | QuantisedLinear:
    weight = (torch.randn(pair) * pair[1] ** -0.5).to(dtype)
    if kind == "plain":
        return pack_linear(weight)
    held = to_int8(weight) if kind == "int8" else to_int4(weight, GROUP)
    columns = pair[1] if kind == "int8" else GROUP
    form = choose_quantised_form(kind, pair, columns, dtype, torch.device("cpu"))
    return QuantisedLinear(held, None, dtype, form)


def in_turns(calls: list[Callable[[], object]], turns: int) -> list[float]:
    """Thread CPU milliseconds of every call: median over turns of all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for call, own in zip(calls, times):
            began = time.thread_time()
            call()
            if turn:
                own.append(1000 * (time.thread_time() - began))
    return [statistics.median(own) for own in times]
