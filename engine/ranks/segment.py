"""placeholder"""
from __future__ import annotations

import torch


class Segment:
    """placeholder"""

    def adds(self, x: torch.Tensor) -> bool:
        return False

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gathered(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out
