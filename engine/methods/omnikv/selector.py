"""The context selector: how scores become a selection. Pure functions and one frozen value; no
model, no bank.
"""

import torch

from engine.errors import SettingError

SELECTORS = ("last", "uniform", "exponential")


def window_weights(selector, window, device="cpu"):
    """alpha of OmniKV Eq. 4, newest query last: float32 [window].

    "uniform": 1 each; "exponential": 2^(j - W) up to the newest's 2^0 (the same ranking as the
    paper's up to a factor); "last": only the newest.
    """
    if selector == "uniform":
        return torch.ones(window, device=device)
    if selector == "exponential":
        return torch.pow(2.0, torch.arange(1 - window, 1, device=device, dtype=torch.float32))
    if selector == "last":
        return torch.ones(1, device=device)
    raise SettingError(f"selector: found {selector!r}, expected one of {', '.join(SELECTORS)}")
