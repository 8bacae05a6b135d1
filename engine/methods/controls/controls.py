"""OmniKV with the selection taken away: what a comparison must be able to tell from OmniKV.

Each reads as many bytes as OmniKV at the same settings (`omnikv_one`: fewer) and has its filter
layers, wait layers, tail and prefill. A claim about OmniKV's selection that a control satisfies too
is no claim about the selection: the filter layers, which read everything, carried it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.random_bits import draw, factors, numbers
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class OmniKVOne(OmniKV):
    """OmniKV that chooses one token, the one with the highest score.

    Settings as OmniKV's; tokens, share and mem are checked and then mean 1.
    """

    full_prompts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse(self, "sink", "official", "prefill_ratio", "residual")

    @property
    def name(self) -> str:
        return "omnikv_one"

    def budget(self, plan: LayerPlan, length: int) -> int:
        """1, whatever the settings."""
        return 1

    def bank_share(self, plan: LayerPlan) -> float | None:
        """None: its budget is in tokens."""
        return None


@dataclass(frozen=True)
class Unscored(OmniKV):
    """Base of the controls that choose without looking at a score."""

    named = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse(self, "selector", "scores", "sink", "official", "prefill_ratio")


@dataclass(frozen=True)
class OmniKVNewest(Unscored):
    """OmniKV that chooses the k newest tokens before the tail: a window."""

    full_prompts = True

    @property
    def name(self) -> str:
        return "omnikv_newest"

    def runtime(self, setup: Setup) -> Runtime:
        return NewestRuntime(self, setup)


@dataclass(frozen=True)
class OmniKVRandom(Unscored):
    """OmniKV that draws k of the tokens before the tail, all equally likely, anew for every group
    in every step.

    seed: of the draw, which depends on it, on the step's position and on the group, and on nothing
    else: a step that is run again draws the same tokens.
    """

    full_prompts = True

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("seed", self.seed, 0)

    @property
    def name(self) -> str:
        return "omnikv_random"

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """OmniKV's, and a random number of 4 B for every token."""
        needs = super().needs(plan, config, capacity, itemsize)
        more = 4 * capacity if needs.selected else 0
        return replace(needs, device_bytes=needs.device_bytes + more)

    def runtime(self, setup: Setup) -> Runtime:
        return RandomRuntime(self, setup)


class UnscoredRuntime(OmniKVRuntime):
    """A filter layer attends to everything; its group's choice comes from `rank`."""

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        out, scores = self.attend_dense(layer, q, step), self.scores[:, : step.bucket]
        self.rank(self._group(layer), scores, step)
        self.choose(self._group(layer), scores, step)
        return out

    def rank(self, group: int, scores: torch.Tensor, step: Step) -> None:
        """Write scores [B, bucket] float32: the highest are chosen."""
        raise NotImplementedError

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """Empty: nothing was scored."""
        return {}


class NewestRuntime(UnscoredRuntime):
    """The score of a token is its position, exact in float32 up to 16.7 million tokens."""

    def __init__(self, method: OmniKV, setup: Setup):
        super().__init__(method, setup)
        self.scores.copy_(torch.arange(self.scores.shape[1], device=setup.device))

    def rank(self, group: int, scores: torch.Tensor, step: Step) -> None:
        """Nothing: no step changes the scores."""


class RandomRuntime(UnscoredRuntime):
    """Buffer: numbers [capacity] int32, of which every step and group makes its scores."""

    method: OmniKVRandom

    def __init__(self, method: OmniKVRandom, setup: Setup):
        super().__init__(method, setup)
        self.numbers = numbers(method.seed, self.scores.shape[1], setup.device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 4 * self.numbers.numel()

    def rank(self, group: int, scores: torch.Tensor, step: Step) -> None:
        """In place, as int32: no temporary grows with the context."""
        seeds = factors(step.visible, self.method.seed, self.plan.number_of(group))
        draw(self.numbers[: step.bucket], seeds, scores)


def _refuse(method: OmniKV, *fields: str) -> None:
    """Raise SettingError where a field that this control cannot have was set."""
    for field in fields:
        if getattr(method, field) != getattr(OmniKV, field):
            raise SettingError(
                f"{field}: found {getattr(method, field)!r}, but {method.name} is a control "
                "without it; leave it out"
            )
