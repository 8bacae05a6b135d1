"""Rows of K and V rounded to few bits, and transformed, by the C++ kernels.

The bits are those of the forms in torch (kernels/rows_int8.py, rows_int4.py, rows_fp8.py,
hadamard.py), in a tenth of their time.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.native.library import loaded, native
from kernels.transform_size import query_factor, run_length

LANES = 16  # rows are whole vectors
LONGEST = 1024  # elements of a row
PACKED = (torch.int8, torch.uint8, torch.float8_e4m3fn)  # of such rows: kernels/rows.py
KINDS = {"int8": 3, "int4_keys": 4, "int4_values": 5, "fp8": 6}


def packs(x: torch.Tensor) -> bool:
    """Whether the C++ kernels take rows like x [.., D]."""
    dim = x.shape[-1]
    return (
        x.device.type == "cpu" and not dim % LANES and dim <= LONGEST and native() is not None
    )  # fmt: skip


def pack(x: torch.Tensor, out: torch.Tensor, kind: str) -> torch.Tensor:
    """Round rows x [.., D] of any float dtype into out [.., bytes of a row], contiguous, and return
    it. kind: a key of KINDS; int4 takes a D of 256 at most.
    """
    library = loaded()
    assert out.is_contiguous()
    wide = x.float().contiguous()
    library.omnikv_pack(
        ctypes.c_void_p(wide.data_ptr()),
        ctypes.c_long(wide.numel() // max(1, wide.shape[-1])),
        wide.shape[-1],
        out.shape[-1],
        KINDS[kind],
        torch.get_num_threads(),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def transform(x: torch.Tensor, run: int, factor: int) -> torch.Tensor:
    """Transform rows [.., D] of any float dtype: the Hadamard transform of runs of `run` elements
    and of the halves, divided by `factor`. Returns float32; sums are float64.
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
    """Return float32 queries [.., D] for products with the rows of K as k holds them."""
    if k.dtype not in PACKED:
        return q
    return transform(q, run_length(q.shape[-1]), query_factor(q.shape[-1]))
