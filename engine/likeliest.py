"""The token with the greatest logit, chosen where the logits lie: the next step reads it there, and
the host one step later.

A step on a GPU runs for milliseconds after the call that issued it. Were its token read first, the
GPU would stand still while the host wakes up, turns the token into text and issues the next step.
Here the next step is in the queue before: choose, copy, step, and only then does the host wait for
the copy, while the step runs.

The choice is a kernel of its own in front of the step and no part of the captured graph: the logits
may come from a prompt, a fork or a file as well, and a graph would copy to one address, which the
next replay overwrites while the host still reads it.
"""

from __future__ import annotations

import torch

from engine.sampling import require_finite


class Likeliest:
    """token int64 [1, 1]: what the next step reads, chosen or filled in by the host."""

    def __init__(self, device: torch.device):
        # the token and its logit side by side: one copy of 16 bytes
        self._pair = torch.zeros(2, dtype=torch.int64, device=device)
        self.token = self._pair[:1].view(1, 1)
        self._logit = self._pair[1:].view(torch.float32)[:1]
        gpu = device.type == "cuda"
        self._on_host = torch.zeros(2, dtype=torch.int64, pin_memory=gpu)
        self._copied = torch.cuda.Event() if gpu else None

    def choose(self, logits: torch.Tensor) -> None:
        """Choose from logits float32 [vocab], the lowest id of equals, and start the copy to the
        host. Nothing waits.
        """
        torch.max(logits.unsqueeze(0), 1, out=(self._logit, self._pair[:1]))
        self._on_host.copy_(self._pair, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> int:
        """The chosen token, as soon as the step before has ended. Raises EngineError where its
        logit is NaN or infinite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        require_finite(float(self._on_host[1:].view(torch.float32)[0]))
        return int(self._on_host[0])
