"""The OmniKV paper's Mem%: the share of the bank that a step reads.

Mem% = a + b (1 - a), where a is the share of the layers that read everything and b the share of
the bank that the other layers read.
"""

from engine.errors import SettingError


def budget_from_mem(mem: float, dense_share: float) -> float:
    """Return the share b of the bank that Mem% leaves to the sparse layers: (mem - a) / (1 - a).

    dense_share: a, LayerPlan.dense_share. Raises SettingError if the dense layers alone read `mem`
    or more, or if the plan has no sparse layer.
    """
    if dense_share >= 1.0:
        raise SettingError(
            "mem: this plan has no sparse layer, so every budget is 100%; "
            "choose other filter layers"
        )
    if mem <= dense_share:
        raise SettingError(
            f"mem: found {mem:g}, expected more than {dense_share:.4g}, which the full, filter and "
            "wait layers of this plan take already (fewer filter layers or wait_layers=0 lower it)"
        )
    # 0.7 of a plan at 0.625 is 0.2, not 0.19999999999999996
    return round((mem - dense_share) / (1.0 - dense_share), 12)


def mem_from_budget(tokens: int | float, prompt: int, dense_share: float) -> float:
    """Return the Mem% of a budget of `tokens`: a + b (1 - a), b = tokens / prompt, at most 1."""
    return dense_share + min(1.0, tokens / max(1, prompt)) * (1.0 - dense_share)
