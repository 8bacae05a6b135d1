"""Choose which implementation of a kernel runs, once for all launchers."""

from __future__ import annotations

import torch

from kernels._triton import HAVE_TRITON
from kernels.native import library
from kernels.trial import fault

library.trial = fault  # before a CPU's kernels run for the first time
BACKENDS = ("auto", "reference", "cpu", "triton")


def choose(backend: str, tensor: torch.Tensor) -> str:
    """Resolve a launcher's `backend` for a tensor, see `choose_for`."""
    return choose_for(backend, tensor.device)


def choose_for(backend: str, device: torch.device) -> str:
    """Resolve a launcher's `backend` to "reference", "cpu" or "triton" for a device.

    The device need not exist: a plan may describe another machine. "auto" is "triton" on CUDA where
    the package imports, "cpu" on a CPU and "reference" elsewhere. A named backend is taken as it is
    ("triton" on CPU tensors works under TRITON_INTERPRET=1). Raises ValueError for an unknown
    backend, and for "triton" where the package is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "triton" and not HAVE_TRITON:
        raise ValueError(
            "backend: found 'triton', but the package triton is not installed; use 'auto'"
        )
    if backend != "auto":
        return backend
    if device.type == "cuda" and HAVE_TRITON:
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"
