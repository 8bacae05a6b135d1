"""CUDA streams beside the main one, and the events that order them. On a CPU all of it does
nothing.
"""

import contextlib

import torch


class SideStream:
    """A CUDA stream beside the main one. On a CPU everything happens at once and in order, and
    nothing here does anything.
    """

    def __init__(self, device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_main(self):
        """Run what is issued inside on this lane, behind everything that the current stream was
        given so far.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait_event(self, event):
        """What is issued on this lane from now on waits for an event of another lane."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record_event(self):
        """An event behind everything issued on this lane so far; None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def synchronize(self):
        """Wait on the host until the lane is empty (close, truncate, fork: never in a step)."""
        if self._stream is not None:
            self._stream.synchronize()


def wait(event):
    """The current stream waits for a lane's event; the host does not."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def record_main(device):
    """An event on the current stream; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def copy_rows(target, source):
    """Rows within the device, on whatever lane is current."""
    target.copy_(source)
