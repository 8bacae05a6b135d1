"""CUDA streams beside the main one, and the events that order them. On a CPU none of it does
anything: work is done at once and in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A CUDA stream beside the main one; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        # ahead of the main stream: a lane's few programs would wait behind thousands of a layer's
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None

    @contextlib.contextmanager
    def after_main(self) -> Iterator[None]:
        """Issue the work inside to this stream, behind all that the current stream was given so
        far.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Make work issued to this stream from now on wait for an event of another stream."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event behind all work issued to this stream so far; None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def synchronize(self) -> None:
        """Wait on the host until this stream is empty (close, truncate, fork; never in a step)."""
        if self._stream is not None:
            self._stream.synchronize()


def wait(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Make the device's current stream wait for an event of a side stream; the host does not
    wait.
    """
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def record_main(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows within the device, on the current stream."""
    target.copy_(source)
