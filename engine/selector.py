"""The context selector: how scores become a selection. Pure functions and one frozen value; no model, no bank."""

import torch

from engine.errors import SettingError

SELECTORS = ("last", "uniform", "exponential")


def window_weights(selector, window, device="cpu"):
    """alpha of OmniKV Eq. 4, newest query last: float32 [window].

    "uniform": 1 each; "exponential": 2^(j - W) up to the newest's 2^0 (the same ranking as the paper's up to a factor);
    "last": only the newest.
    """
    if selector == "uniform":
        return torch.ones(window, device=device)
    if selector == "exponential":
        return torch.pow(2.0, torch.arange(1 - window, 1, device=device, dtype=torch.float32))
    if selector == "last":
        return torch.ones(1, device=device)
    raise SettingError(f"selector: found {selector!r}, expected one of {', '.join(SELECTORS)}")


def budget_from_mem(mem, dense_share):
    """Share of the bank that Mem% allows: (mem - a) / (1 - a) with a the plan's dense share (METHODS.md 3.2, items 6 and 7).

    Raises SettingError where mem is below what the dense layers take already, or the plan has no sparse layer.
    """
    if dense_share >= 1.0:
        raise SettingError("mem: this plan has no sparse layer, so every budget is 100%; choose other filter layers")
    if mem <= dense_share:
        raise SettingError(f"mem: found {mem:g}, expected more than {dense_share:.4g}, which the full, filter and wait layers "
                           f"of this plan take already (fewer filter layers or wait_layers=0 lower it)")
    return round((mem - dense_share) / (1.0 - dense_share), 12)      # 0.7 of a plan at 0.625 is 0.2, not 0.19999999999999996


def mem_from_budget(tokens, prompt, dense_share):
    """The paper's Mem% of a budget: a + b (1 - a), b = tokens / prompt, at most 1."""
    return dense_share + min(1.0, tokens / max(1, prompt)) * (1.0 - dense_share)
