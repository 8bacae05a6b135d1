"""H2O: keep the newest tokens and the heavy hitters, those that have received most attention so
far.

Source: Zhang et al., H2O (NeurIPS 2023), Algorithm 1. Per query head, score_j = sum over all
queries so far of the softmax attention to j; budget = heavy + recent, half each. As in the OmniKV
paper's baseline: scores are reduced over a group by their maximum, and the first prompt is cut
after the first step of the answer. Default share: the original code's 10% + 10%.
"""

from dataclasses import dataclass

from engine.methods.evict.shared.accumulated_scores import Accumulating


@dataclass(frozen=True)
class H2O(Accumulating):
    """Settings as Accumulating's, with the defaults of the OmniKV paper's baseline."""

    full_prompts = True

    cut: str = "first_step"
