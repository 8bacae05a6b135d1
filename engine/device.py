"""What the engine asks of a GPU beside tensors: being the current one, waiting, and a clock.

torch's operators go to the device of their tensors. Triton launches, streams, events and captures
go to the *current* device, which is card 0 until somebody says otherwise.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait on the host until a GPU has nothing left to do; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
