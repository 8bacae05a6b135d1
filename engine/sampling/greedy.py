"""Greedy sampling on the device: the next step reads the token there, and the host one step later.

A step on a GPU runs for milliseconds after the call that issued it. Were its token read first, the
GPU would stand still while the host wakes up, turns the token into text and issues the next step.
Here the next step is in the queue before: choose, copy, step, and only then does the host wait for
the copy, while the step runs.

The choice is a kernel of its own in front of the step and no part of the captured graph: the logits
may come from a prompt, a fork or a file as well, and a graph would copy to one address, which the
next replay overwrites while the host still reads it.
"""

from __future__ import annotations

import math

import torch

from engine.base.errors import EngineError


class DeviceArgmax:
    """The argmax of logits, computed on the device. token int64 [1, 1]: the input of the next step,
    written by `choose` or by the host.
    """

    def __init__(self, device: torch.device):
        # the token and its logit side by side: one copy of 16 bytes
        self._pair = torch.zeros(2, dtype=torch.int64, device=device)
        self.token = self._pair[:1].view(1, 1)
        self._logit = self._pair[1:].view(torch.float32)[:1]
        gpu = device.type == "cuda"
        self._on_host = torch.zeros(2, dtype=torch.int64, pin_memory=gpu)
        self._copied = torch.cuda.Event() if gpu else None

    def choose(self, logits: torch.Tensor) -> None:
        """Choose the argmax of logits float32 [vocab], the lowest id of equals, and start the copy
        to the host without waiting.
        """
        torch.max(logits.unsqueeze(0), 1, out=(self._logit, self._pair[:1]))
        self._on_host.copy_(self._pair, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> int:
        """Wait for the copy and return the chosen token. Raises EngineError if its logit is NaN or
        infinite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        require_finite(float(self._on_host[1:].view(torch.float32)[0]))
        return int(self._on_host[0])


def require_finite(value: float) -> None:
    """Raise EngineError if the largest logit is NaN or infinite."""
    if not math.isfinite(value):
        raise EngineError(
            f"the model's logits hold {value}: its weights are damaged or a computation overflowed "
            "(try dtype float32, and check_finite=True when loading)"
        )
