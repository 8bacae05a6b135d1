"""What the engine asks of a GPU beside tensors: being the current one, waiting, and a clock.

torch's operators go to the device of their tensors. Triton launches, streams, events and captures
go to the *current* device, which is card 0 until somebody says otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from engine.base.errors import DeviceFailed, EngineError, OutOfDeviceMemory, OutOfHostMemory
from engine.base.figures import first_line

NO_MEMORY = "no memory left in this machine or under its limits (a container's, ulimit -v)"
# words of torch's and Python's errors where a CPU gives no memory
NO_RAM = ("DefaultCPUAllocator", "can't start new thread", "could not create a primitive")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def crossed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return x on a device; x itself where it lies there. Between GPUs the host does not wait:
    torch orders the copy behind the work of both.
    """
    if x.device == device:
        return x
    return x.to(device, non_blocking=x.is_cuda and device.type == "cuda")


def carried(x: torch.Tensor, into: torch.Tensor) -> None:
    """Copy x into a tensor of the same shape on another device, as `crossed`."""
    into.copy_(x, non_blocking=x.is_cuda and into.is_cuda)


def typed(error: BaseException) -> EngineError | None:
    """Return what a GPU's failure means to a user; None for an error of another kind."""
    name, module = type(error).__name__, type(error).__module__
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfDeviceMemory(
            f"no memory left on the GPU: {first_line(error)} Another process may have taken it; "
            f"free it and go on, or close sessions, or lower chunk or max_context"
        )
    if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_RAM):
        return OutOfHostMemory(
            f"{NO_MEMORY}: {first_line(error)}; close sessions, or lower chunk or max_context"
        )
    if module.startswith("triton") or name == "AcceleratorError" or "CUDA" in str(error):
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            return DeviceFailed(
                f"the GPU refused a launch: {name}: {first_line(error)}; if it happens again, "
                f"start anew, use backend='reference', or device='cpu'"
            )
    return None


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raise a GPU's failures as errors of the engine."""
    try:
        yield
    except Exception as error:
        meant = typed(error)
        if meant is None:
            raise
        raise meant from error


def synchronize(device: torch.device) -> None:
    """Wait on the host until a GPU has nothing left to do; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_all() -> None:
    """Wait on the host until no GPU of this process has anything left to do. Touches no card that
    the process has not used.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for card in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(card):  # type: ignore[attr-defined]
                torch.cuda.synchronize(card)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a card's warm-ups and captures, always the same: cuBLAS keeps a
    workspace (32 MiB on Hopper) for every stream that it ever ran on.

    Its priority is the usual one and a SideStream's is not: torch draws them from two pools, so
    that no lane of a captured step is the stream that captures.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect what is dropped now and nothing inside: a finalizer that unlocks memory or waits for
    a stream would spoil the capture under way.
    """
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class StepClock:
    """Seconds that decode steps take on a device.

    A call on a GPU returns when its work was issued, long before it ran, so there a step's time
    lies between two events around it. It is known once somebody has read the step's token.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._known = 0.0  # seconds of ended steps that `ended` has not returned yet
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def began(self) -> float | torch.cuda.Event:
        """A step begins now. Of one that breaks off nothing is counted."""
        if not self._gpu:
            return time.perf_counter()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        return start

    def ends(self, began: float | torch.cuda.Event) -> None:
        """Count the step that began at `began` and whose work is issued by now."""
        if isinstance(began, float):
            self._known += time.perf_counter() - began
            return
        stop = torch.cuda.Event(enable_timing=True)
        stop.record()
        self._running.append((began, stop))

    def ended(self, wait: bool = False) -> float:
        """Return the seconds of the steps that have ended since the last call. wait: first wait for
        those still running.
        """
        while self._running and (wait or self._running[0][1].query()):
            start, stop = self._running.popleft()
            stop.synchronize()
            self._known += start.elapsed_time(stop) / 1e3
        seconds, self._known = self._known, 0.0
        return seconds


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy. The tensor must outlive the view."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
