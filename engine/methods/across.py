"""The interface of what chooses tokens across the heads of several processes (engine/ranks/)."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.attention.scratch import Scratch


class Across(Protocol):
    """Chooses by the maxima over the heads of all ranks, of which a method knows its own. alone:
    each rank chooses by its own heads.
    """

    alone: bool

    def select(
        self,
        scores: torch.Tensor,
        lo: torch.Tensor,
        hi: torch.Tensor,
        k: torch.Tensor,
        out: torch.Tensor,
        counts: torch.Tensor,
        scratch: Scratch | None = None,
        backend: str = "auto",
        counted: bool = False,
    ) -> None:
        """As kernels.select.topk.select_topk; writes to scores too."""
        ...
