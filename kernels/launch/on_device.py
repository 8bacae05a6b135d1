"""Small tables that the host makes and a kernel reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(
    values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Bring numbers to a device: the tensor [len(values), ...] of a dtype.

    From pinned memory where the device is a GPU, so that the host goes on at once: a copy from
    ordinary memory waits until the stream has come to it, and a chunk of a prompt makes 35 to 50
    of them. torch keeps the pinned block until the copy has run.
    """
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
