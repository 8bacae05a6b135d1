"""What OmniKV's layers cost on a CPU, in bytes that a dense layer would have read in the same time:
the constants behind `dense_below="auto"`.

Counting bytes alone chose the slower method where one kind of layer reads its bytes at another rate
than the rest. Measured by `python -m tools.cpu_forms` (docs/PERFORMANCE.md) and rounded up, so that
an automatic choice errs towards full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.isa import isa


@dataclass(frozen=True)
class CpuCosts:
    """Costs relative to a dense layer's: filter, that of a filter layer over as many rows; row,
    that of a row which a sparse layer gathers and reads; query, what a further token of a step adds
    to the layer's attention, per query head of a K/V head. kv: a byte of K and V in units of a byte
    of weights; weight: what a further token of a step adds to the weight products.
    """

    filter: float
    row: float
    query: float = 0.0
    kv: float = 1.0
    weight: float = 0.0


# AMX and CPUs of other makes: filter and row are what was assumed for every CPU before, the others
# were measured with avx512_bf16 (docs/EXACT.md)
_OTHER = {
    2: CpuCosts(filter=1.5, row=3.0, query=0.06, kv=2.5, weight=0.05),
    4: CpuCosts(filter=1.5, row=3.0, query=0.09, kv=1.6, weight=0.5),
}
# by instruction set and bytes of an element (2: bfloat16 and float16, whichever is worse); filter
# and row are the worst of two machines. avx512 without bfloat16 instructions: query and kv as with
# them, weight as on avx2, which emulates their products too
COSTS = {
    "default": {
        2: CpuCosts(filter=2.0, row=3.0, query=0.09, kv=2.0, weight=1.1),
        4: CpuCosts(filter=1.35, row=3.0, query=0.09, kv=1.6, weight=0.5),
    },
    "avx2": {
        2: CpuCosts(filter=1.45, row=4.0, query=0.06, kv=2.0, weight=1.1),
        4: CpuCosts(filter=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
    "avx512": {
        2: CpuCosts(filter=1.25, row=4.0, query=0.06, kv=2.5, weight=1.1),
        4: CpuCosts(filter=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
    "avx512_bf16": {
        2: CpuCosts(filter=1.25, row=4.0, query=0.06, kv=2.5, weight=0.05),
        4: CpuCosts(filter=1.25, row=3.7, query=0.09, kv=1.6, weight=0.5),
    },
}


def cpu_costs(itemsize: int, found: str | None = None) -> CpuCosts:
    """Look up the costs for elements of `itemsize` bytes; found: an instruction set of
    kernels/isa.py, None for this machine's.
    """
    return COSTS.get(isa() if found is None else found, _OTHER)[2 if itemsize < 4 else 4]
