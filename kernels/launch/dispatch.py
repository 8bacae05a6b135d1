"""Choose which implementation of a kernel runs, once for all launchers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.launch.triton import HAVE_TRITON

# those under which a CPU's weights take the form that runs fastest
ON_CPU = ("auto", "cpu", "native")
# those under which C++ kernels run where they can
NATIVE = ("auto", "native")
BACKENDS = ("auto", "reference", "cpu", "native", "triton")


def choose(backend: str, tensor: torch.Tensor, native: Callable[[], bool] | None = None) -> str:
    """Resolve a launcher's `backend` for a tensor to "reference", "cpu", "native" or "triton".

    native: whether the launcher's C++ kernel takes this call, None without such a kernel. Asked at
    most once, and only under "auto" and "native" with a tensor on a CPU; the answer is "native"
    then. "cpu" is torch's operators alone. Raises ValueError as `choose_for` does.
    """
    chosen = choose_for(backend, tensor.device)
    on_cpu = backend in NATIVE and tensor.device.type == "cpu"
    return "native" if on_cpu and native is not None and native() else chosen


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
        # kernels that C++ has not run on torch's operators
        return "cpu" if backend == "native" else backend
    if device.type == "cuda" and HAVE_TRITON:
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"
