"""Costs of OmniKV's layers on a CPU, in bytes that a dense layer would have read in the same time:
the constants behind `dense_below="auto"`, with and without our C++ kernels.

Counting bytes alone chose the slower method where one kind of layer reads its bytes at another rate
than the rest. Measured by `python -m tools.speed.cpu_forms` (docs/PERFORMANCE.md) and rounded up,
so that an automatic choice errs towards full attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot

import torch

from kernels.launch.isa import isa, multiplies
from kernels.native.library import missing


@dataclass(frozen=True)
class CpuCosts:
    """Costs relative to a dense layer's: filter, that of a filter layer over as many rows; row,
    that of a row which a sparse layer gathers and reads; query, what a further token of a step adds
    to the layer's attention, per query head of a K/V head. kv: a byte of K and V in units of a byte
    of weights (`attention`); weight: what a further token of a step adds to the weight products.
    choice: bytes that a dense layer reads while one filter layer's tokens are chosen and handed on.
    scored: what leaving the last token's scores adds to a layer of several tokens, beside one
    token's. kept: as row, of a draft in exact mode, whose rows lie far apart in a long bank; 0: as
    row. tiles: whether rows are read while tiles of four queries are computed, and weights meet
    2, 4 or 8 tokens at a time; query is then a query's arithmetic beside reading its row.
    """

    filter: float
    row: float
    query: float = 0.0
    kv: float = 1.0
    weight: float = 0.0
    choice: int = 0
    scored: float = 0.0
    kept: float = 0.0
    tiles: bool = False

    def attention(self, group: int, tokens: int = 1) -> float:
        """A byte of K and V of a layer with `group` query heads a K/V head in a step of `tokens`
        tokens, in units of a byte of weights.
        """
        if not self.tiles:
            return self.kv * (1 + self.query * group * (tokens - 1))
        queries = group * tokens
        if queries > TILE:
            queries = -(-queries // TILE) * TILE
        return self.kv * hypot(1, self.query * queries)

    def products(self, tokens: int) -> float:
        """The weight products of a step of `tokens` tokens, beside those of one."""
        taken = 1 << (tokens - 1).bit_length() if self.tiles else tokens
        return 1 + self.weight * (taken - 1)


TILE = 4  # queries that meet a row at once
# AMX and CPUs of other makes: filter and row are what was assumed for every CPU before, the others
# were measured with avx512_bf16 (docs/EXACT.md)
_OTHER = {
    2: CpuCosts(filter=1.5, scored=1.5, row=3.0, query=0.06, kv=2.5, weight=0.05),
    4: CpuCosts(filter=1.5, scored=1.5, row=3.0, query=0.09, kv=1.6, weight=0.5),
}
# torch's operators, by instruction set and bytes of an element (2: bfloat16 and float16, whichever
# is worse); filter and row are the worst of two machines; query, kv and weight are bfloat16's and
# float32's, of layers of two shapes (`python -m tools.studies.exact kernels`), in "default"
# estimates
COSTS = {
    "default": {
        2: CpuCosts(filter=2.0, scored=2.0, row=3.0, query=0.09, kv=2.0, weight=1.1),
        4: CpuCosts(filter=1.35, scored=1.35, row=3.0, query=0.09, kv=1.6, weight=0.5),
    },
    "avx2": {
        2: CpuCosts(filter=1.45, scored=1.45, row=4.0, query=0.06, kv=2.5, weight=0.63),
        4: CpuCosts(filter=1.25, scored=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
    "avx512": {
        2: CpuCosts(filter=1.25, scored=1.25, row=4.0, query=0.06, kv=2.0, weight=0.75),
        4: CpuCosts(filter=1.25, scored=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
    "avx512_bf16": {
        2: CpuCosts(filter=1.25, scored=1.25, row=4.0, query=0.06, kv=2.5, weight=0.05),
        4: CpuCosts(filter=1.25, scored=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
}
# our C++ kernels, which read chosen rows where they lie; beside attention that is this fast
# choosing shows. The worst of two shapes, as above (benchmarks/results/exact/kernels-tiles-*)
_CHOICE = CpuCosts(filter=1.3, row=1.7, choice=1_000_000, scored=0.3)
_PAIRS = {
    # a layer of 131,072 rows of 4 K/V heads of 64 takes hypot(4.7, 0.53 q) ms for q queries a head
    2: replace(_CHOICE, query=0.113, kv=1.3, weight=0.14, kept=2.4, tiles=True),
    4: replace(_CHOICE, query=0.12, kv=1.3, weight=0.17),
}
NATIVE = {
    "avx2": {
        2: replace(_CHOICE, query=0.39, kv=2.4, weight=0.4),
        4: replace(_CHOICE, query=0.16, kv=1.9, weight=0.22),
    },
    "avx512": {2: replace(_CHOICE, query=0.31, kv=1.7, weight=0.2), 4: _PAIRS[4]},
    "avx512_bf16": _PAIRS,
    "amx": _PAIRS,
}


# (kv, weight) where weights are held in few bits, by kind, bytes of an element and whether 16-bit
# products run: `python -m tools.studies.exact kernels`, the deep shape's and the 1B shape's layers.
# The former's short rows cost 3 times as much a byte in int8; kv lies between the two
FEW_BITS = {
    "int8": {2: ((1.7, 0.16), (1.7, 0.12)), 4: ((1.0, 0.13), (1.0, 0.13))},
    "int4": {2: ((0.9, 0.3), (1.6, 0.35)), 4: ((0.5, 0.3), (1.0, 0.35))},
}
NATIVE_FEW_BITS = {"int8": (1.2, 0.18), "int4": (1.2, 0.45)}  # (kv, weight), of the slower shape


def cpu_costs(
    itemsize: int, found: str | None = None, kind: str = "", compiled: bool | None = None
) -> CpuCosts:
    """Look up the costs for elements of `itemsize` bytes; found: an instruction set of
    kernels/launch/isa.py, None for this machine's; kind: "int8" or "int4" for weights in few bits;
    compiled: whether our C++ kernels run, None: as in this process.
    """
    found, size = isa() if found is None else found, 2 if itemsize < 4 else 4
    compiled = not missing() if compiled is None else compiled
    ours = compiled and found in NATIVE
    costs = (NATIVE if ours else COSTS).get(found, _OTHER)[size]
    if not kind:
        return costs
    few = FEW_BITS[kind][size][multiplies(torch.bfloat16, found)]
    kv, weight = NATIVE_FEW_BITS[kind] if ours else few
    return replace(costs, kv=kv, weight=weight)
