"""Rows of K and V rounded to few bits, and transformed, by the C++ kernels.

The bits are those of the forms in torch (kernels/rows/int8.py, rows_int4.py, rows_fp8.py,
hadamard.py), in a tenth of their time.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.native.kinds import PACKED, Kind
from kernels.native.library import Binding, loaded
from kernels.rows.transform_size import query_factor, run_length

LANES = 16  # rows are whole vectors
LONGEST, LONGEST_INT4 = 1024, 256  # elements of a row


# each module that rounds or transforms adds what its own operators give
INT8, INT4, FP8 = Binding("int8 rows"), Binding("int4 rows"), Binding("fp8 rows")
TRANSFORM = Binding("the Hadamard transform")
# of packed rows of a dtype: what rounds them, and the elements that it takes at most
_PACKING = {
    torch.int8: (INT8, LONGEST),
    torch.uint8: (INT4, LONGEST_INT4),
    torch.float8_e4m3fn: (FP8, LONGEST),
}


def takes(binding: Binding, x: torch.Tensor) -> bool:
    """Whether the C++ kernels of a binding run, and take rows like x [.., D], on a CPU: a D of
    whole vectors, LONGEST at most.
    """
    dim = x.shape[-1]
    return not dim % LANES and dim <= LONGEST and binding.usable()


def packs(rows: torch.dtype, dim: int) -> bool:
    """Whether the C++ kernels round rows [.., dim] into packed rows [.., bytes] of a dtype."""
    binding, most = _PACKING.get(rows, (None, 0))
    if binding is None or dim % LANES or dim > most:
        return False
    return binding.usable() and TRANSFORM.usable()


def rows_to_try() -> torch.Tensor:
    """Rows [40, 64] for self-tests: large, small and zero ones."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    return x * 10.0 ** torch.arange(-30, 10, 1)[:, None] * (torch.arange(40) > 0)[:, None]


def pack(x: torch.Tensor, out: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Round rows x [.., D] of any float dtype into out [.., bytes of a row], of one byte an
    element, contiguous, and return it. kind: INT8, FP8, INT4_KEYS or INT4_VALUES. D is as `takes`
    says, of int4 256 at most. K is transformed before. Mutates out.
    """
    library = loaded()
    assert out.is_contiguous()
    wide = x.float().contiguous()
    library.omnikv_pack(
        ctypes.c_void_p(wide.data_ptr()),
        ctypes.c_long(wide.numel() // max(1, wide.shape[-1])),
        wide.shape[-1],
        out.shape[-1],
        kind,
        torch.get_num_threads(),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def transform(x: torch.Tensor, run: int, factor: int) -> torch.Tensor:
    """Transform rows [.., D] of any float dtype: the Hadamard transform of runs of `run` elements
    and of the halves, divided by `factor` (kernels/rows/transform_size.py). Returns float32
    [.., D], new; sums are float64.
    """
    library = loaded()
    wide = x.float().contiguous()
    out = torch.empty_like(wide)
    library.omnikv_transform(
        ctypes.c_void_p(wide.data_ptr()),
        ctypes.c_long(wide.numel() // max(1, wide.shape[-1])),
        wide.shape[-1],
        run,
        ctypes.c_double(factor),
        torch.get_num_threads(),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def stored_queries(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return queries [.., D] float32 for products with the rows of K as k holds them: transformed
    for packed rows, else q itself.
    """
    if k.dtype not in PACKED:
        return q
    return transform(q, run_length(q.shape[-1]), query_factor(q.shape[-1]))
