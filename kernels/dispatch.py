"""Which implementation of a kernel runs: decided here once for all launchers."""

from kernels._triton import HAVE_TRITON

PATHS = ("auto", "reference", "cpu", "triton")


def choose(path, tensor):
    """Resolve a launcher's `path` to "reference", "cpu" or "triton" for a tensor; `choose_for` its
    device.
    """
    return choose_for(path, tensor.device)


def choose_for(path, device):
    """Resolve a launcher's `path` for a torch.device, which need not be there: plans ask for
    machines that they only describe.

    "auto" is "triton" for CUDA tensors where triton imports, "cpu" for CPU tensors and "reference"
    elsewhere. A named path is taken as it is ("triton" on CPU tensors works under
    TRITON_INTERPRET=1). Raises ValueError for an unknown path, and for "triton" where triton is not
    installed.
    """
    if path not in PATHS:
        raise ValueError(f"path: found {path!r}, expected one of {', '.join(PATHS)}")
    if path == "triton" and not HAVE_TRITON:
        raise ValueError(
            "path: found 'triton', but the package triton is not installed; use 'auto'"
        )
    if path != "auto":
        return path
    if device.type == "cuda" and HAVE_TRITON:
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"
