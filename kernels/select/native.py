"""The k largest scores by the C++ kernel: three passes that count and one that writes."""

from __future__ import annotations

import ctypes

import torch

from kernels.native.library import Binding, loaded

BINDING = Binding("the top-k")


def selects(scores: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and selects from scores [B, T] float32, last dim contiguous,
    into out [B, K] int32, contiguous, on a CPU.
    """
    return scores.dtype == torch.float32 and out.is_contiguous() and BINDING.usable()


def select(
    scores: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`select_topk` of kernels/select/topk.py: scores [B, T] float32, last dim contiguous; lo, hi,
    k [B] of whole numbers; out int32 [B, K] and counts int32 [B], contiguous, which it mutates.
    """
    library = loaded()
    assert scores.stride(1) == 1
    lo, hi, k = (t.int().contiguous() for t in (lo, hi, k))
    library.omnikv_topk(
        ctypes.c_void_p(scores.data_ptr()), ctypes.c_long(scores.stride(0)), *scores.shape,
        *(ctypes.c_void_p(t.data_ptr()) for t in (lo, hi, k, out)),
        out.shape[1], ctypes.c_void_p(counts.data_ptr()),
    )  # fmt: skip
