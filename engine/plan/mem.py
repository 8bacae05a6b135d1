"""The paper's Mem% formula: a + b (1 - a), from a token budget and back."""

from engine.errors import SettingError


def budget_from_mem(mem, dense_share):
    """Share of the bank that Mem% allows: (mem - a) / (1 - a) with a the plan's dense share
    (METHODS.md 3.2, items 6 and 7).

    Raises SettingError where mem is below what the dense layers take already, or the plan has no
    sparse layer.
    """
    if dense_share >= 1.0:
        raise SettingError(
            "mem: this plan has no sparse layer, so every budget is 100%; choose other filter layers"
        )
    if mem <= dense_share:
        raise SettingError(
            f"mem: found {mem:g}, expected more than {dense_share:.4g}, which the full, filter and wait layers "
            f"of this plan take already (fewer filter layers or wait_layers=0 lower it)"
        )
    # 0.7 of a plan at 0.625 is 0.2, not 0.19999999999999996
    return round((mem - dense_share) / (1.0 - dense_share), 12)


def mem_from_budget(tokens, prompt, dense_share):
    """The paper's Mem% of a budget: a + b (1 - a), b = tokens / prompt, at most 1."""
    return dense_share + min(1.0, tokens / max(1, prompt)) * (1.0 - dense_share)
