"""Which implementation of a kernel runs: decided here once for all launchers."""

from kernels._triton import HAVE_TRITON

BACKENDS = ("auto", "reference", "cpu", "triton")


def choose(backend, tensor):
    """Resolve a launcher's `backend` to "reference", "cpu" or "triton" for a tensor; `choose_for`
    its device.
    """
    return choose_for(backend, tensor.device)


def choose_for(backend, device):
    """Resolve a launcher's `backend` for a torch.device, which need not be there: plans ask for
    machines that they only describe.

    "auto" is "triton" for CUDA tensors where triton imports, "cpu" for CPU tensors and "reference"
    elsewhere. A named backend is taken as it is ("triton" on CPU tensors works under
    TRITON_INTERPRET=1). Raises ValueError for an unknown backend, and for "triton" where triton is
    not installed.
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
