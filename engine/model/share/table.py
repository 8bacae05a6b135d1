"""An embedding of which each rank holds the rows of some tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.config.share import Part
from kernels.quant.linear import QuantisedLinear


class SharedTable:
    """The rows of the tokens of `part`. Those of other ranks' tokens are zeros here, and `join`
    adds the ranks' rows: a sum with zeros changes no bit.
    """

    def __init__(
        self,
        table: torch.Tensor | QuantisedLinear,
        part: Part,
        join: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.table, self.part, self.join = table, part, join
        self.nbytes = table.nbytes

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens int64 [...] to rows [..., hidden]."""
        mine = (tokens >= self.part.first) & (tokens < self.part.stop)
        own = torch.where(mine, tokens - self.part.first, 0)
        table = self.table
        rows = table[own] if isinstance(table, torch.Tensor) else table.gather(own)
        return self.join(torch.where(mine.unsqueeze(-1), rows, torch.zeros_like(rows)))
