"""The context selector's weights of a window of queries. A pure function; no model, no bank."""

from __future__ import annotations

import torch

from engine.base.errors import SettingError

SELECTORS = ("last", "uniform", "exponential")


def window_weights(selector: str, window: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """alpha of OmniKV Eq. 4, newest query last: float32 [window].

    "uniform": 1 each; "exponential": 2^(j - W) up to the newest's 2^0 (the paper's ranking, up to a
    factor); "last": only the newest.
    """
    if selector == "uniform":
        return torch.ones(window, device=device)
    if selector == "exponential":
        return torch.pow(2.0, torch.arange(1 - window, 1, device=device, dtype=torch.float32))
    if selector == "last":
        return torch.ones(1, device=device)
    raise SettingError(f"selector: found {selector!r}, expected one of {', '.join(SELECTORS)}")
