"""OmniKV's settings: which layers choose, how many tokens, and what is refused.

Source: the OmniKV paper (ICLR 2025), section 4, Eq. 1-4. engine/methods/omnikv/method.py has what
the engine must provide for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.checks import at_most_one, boolean, fraction, integer, is_integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.methods.omnikv.selector import SELECTORS
from engine.model.config.config import ModelConfig
from engine.plan.layers import PAPER_WAIT, LayerPlan, budget_from_mem, layer_plan
from engine.plan.needs import MOST_WINDOW

DEFAULT_TOKENS = 2048


@dataclass(frozen=True)
class Settings(Method):
    """Settings of OmniKV.

    filter_layers: ascending distinct layer numbers, or None (omnikv.json beside the model, the
    published table, else a spread). tokens | share | mem: the budget k, at most one; none means
    2048 tokens. share and mem are parts of the bank's length at the end of the latest prefill.
    selector: last | uniform | exponential over `window` queries. scores: None (softmax over every
    key the query sees) | "softmax" | "raw". wait_layers: layers after a filter that attend to
    everything; they hide the load of an offloaded group and repair nothing. 1 is the paper's form.
    None: 0 (official: 1). If filter_layers is None too, the number stored with them: by the
    calibration; 1 for a published set; 0 for a guess. tail: newest tokens that every layer sees.
    sink: first tokens that are always chosen, inside the budget.
    dense_below: contexts shorter than this run full attention; "auto" decides from byte counts and
    this CPU's measured costs, 0 never. prefill_ratio: r of chunked OmniKV-prefill, None for exact
    prefill: each block of `prefill_block` queries attends, in the sparse layers, to the
    r * prefill_block past tokens that every `prefill_stride`-th query of the block scores highest;
    the prompt's last `prefill_dense_end` tokens are read densely. dense_layers: "block_sparse"
    makes FULL and WAIT layers read, in prefill, only the key blocks that carry `dense_mass` of the
    attention, estimated from the means of `dense_stride` tokens
    (engine/methods/omnikv/block_sparse.py). residual: what becomes of what is not chosen:
    "none" | "sample": `residual_share` of the budget is drawn by chance from it, and stands for all
    of it | "unweighted": drawn, but stands for itself (engine/methods/omnikv/residual.py).
    residual_seed: of the draw, which depends on the step's position and the group beside it.
    """

    named = False

    filter_layers: tuple[int, ...] | None = None
    tokens: int | None = None
    share: float | None = None
    mem: float | None = None
    selector: str = "last"
    window: int = 16
    scores: str | None = None
    wait_layers: int | None = None
    tail: int = 256
    sink: int = 0
    dense_below: int | str = "auto"
    official: bool = False
    prefill_ratio: int | None = None
    prefill_block: int = 256
    prefill_stride: int = 1
    prefill_dense_end: int = 512
    dense_layers: str = "dense"
    dense_mass: float = 0.9
    dense_stride: int = 8
    residual: str = "none"
    residual_share: float = 0.25
    residual_seed: int = 0

    def __post_init__(self) -> None:
        if self.filter_layers is not None:
            object.__setattr__(self, "filter_layers", _filters(self.filter_layers))
            if self.wait_layers is None:
                object.__setattr__(self, "wait_layers", self._default_wait)
        if self.official is True and self.dense_below == "auto":
            object.__setattr__(self, "dense_below", 0)
        _validate_budget(self)
        _validate_selection(self)
        _validate_prefill(self)
        _validate_residual(self)
        if self.official:
            _validate_official(self)

    @property
    def kind(self) -> str:
        """What is ranked: "softmax" or "raw" scores (official: raw for `last`, softmax for the
        windows).
        """
        if self.scores is not None:
            return self.scores
        return "raw" if self.official and self.selector == "last" else "softmax"

    @property
    def _default_wait(self) -> int:
        """Wait layers where nobody says: none, and the published code's one with official."""
        return PAPER_WAIT if self.official else 0

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Layer plan for a model; filter_layers must have been completed by then."""
        block = config.block
        if (block.score_cap or block.sinks) and (self.official or self.dense_layers != "dense"):
            what = "official" if self.official else "dense_layers"
            raise SettingError(
                f"{what}: knows neither a cap on attention scores nor attention sinks, found a "
                f"model with them ({config.family}); leave {what} out"
            )
        wait = self._default_wait if self.wait_layers is None else self.wait_layers
        others = config.local_layers, config.recurrent_layers
        return layer_plan(config.num_layers, self.filter_layers or (), wait, *others)

    def bank_share(self, plan: LayerPlan) -> float | None:
        """Share of the bank that a budget by share or mem means, or None for a budget in tokens."""
        return budget_from_mem(self.mem, plan.dense_share) if self.mem is not None else self.share

    def budget(self, plan: LayerPlan, length: int) -> int:
        """k where the bank held `length` tokens at the end of the latest prefill."""
        share = self.bank_share(plan) if plan.chooses else None
        if share is None:
            return DEFAULT_TOKENS if self.tokens is None else self.tokens
        return max(0 if self.official else 1, math.floor(share * length))

    def drawn(self, k: int) -> int:
        """Of k tokens that a sparse layer reads before the tail, those that chance draws."""
        return 0 if self.residual == "none" else math.floor(self.residual_share * k)


def _filters(value: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not numbers or not all(map(is_integer, numbers)):
        raise SettingError(
            f"filter_layers: found {value!r}, expected a non-empty tuple of layer numbers such as "
            "(2, 8, 18)"
        )
    if numbers[0] < 0 or any(a >= b for a, b in zip(numbers, numbers[1:])):
        raise SettingError(
            f"filter_layers: found {numbers}, expected distinct ascending numbers from 0 on"
        )
    return numbers


def _validate_budget(method: Settings) -> None:
    at_most_one(method, "tokens", "share", "mem")
    if method.tokens is not None:
        integer("tokens", method.tokens, 0 if method.official else 1)
    for name in ("share", "mem"):
        if getattr(method, name) is not None:
            fraction(name, getattr(method, name))
    integer("sink", method.sink, 0)
    if method.tokens is not None and method.sink > method.tokens:
        raise SettingError(
            f"sink: found {method.sink}, expected at most the budget of {method.tokens} tokens"
        )


def _validate_selection(method: Settings) -> None:
    one_of("selector", method.selector, SELECTORS)
    one_of("scores", method.scores, (None, "softmax", "raw"))
    integer("window", method.window, 1, MOST_WINDOW)
    if method.wait_layers is not None:
        integer("wait_layers", method.wait_layers, 0)
    integer("tail", method.tail, 64)
    boolean("official", method.official)
    if method.dense_below != "auto":
        integer("dense_below", method.dense_below, 0)


def _validate_prefill(method: Settings) -> None:
    if method.prefill_ratio is not None:
        integer("prefill_ratio", method.prefill_ratio, 1)
    integer("prefill_block", method.prefill_block, 64)
    integer("prefill_stride", method.prefill_stride, 1)
    integer("prefill_dense_end", method.prefill_dense_end, 0)
    one_of("dense_layers", method.dense_layers, ("dense", "block_sparse"))
    one_of("dense_stride", method.dense_stride, (4, 8, 16, 32))
    fraction("dense_mass", method.dense_mass)


def _validate_residual(method: Settings) -> None:
    one_of("residual", method.residual, ("none", "sample", "unweighted"))
    fraction("residual_share", method.residual_share)
    integer("residual_seed", method.residual_seed, 0)
    if method.residual == "none":
        return
    if method.residual_share == 1:
        raise SettingError("residual_share: found 1, expected less: filter layers choose the rest")
    if method.official:
        raise SettingError(
            "residual: the published code estimates nothing; leave it out with official=True"
        )
    if method.tokens is not None and method.sink > method.tokens - method.drawn(method.tokens):
        raise SettingError(
            f"sink: found {method.sink}, expected at most the "
            f"{method.tokens - method.drawn(method.tokens)} tokens that residual_share="
            f"{method.residual_share:g} leaves of {method.tokens}"
        )


def _validate_official(method: Settings) -> None:
    """Refuse what the published code does not have."""
    if method.selector != "last" and method.scores == "raw":
        raise SettingError(
            "scores: found 'raw' with a windowed selector, expected None or 'softmax' (official)"
        )
    if method.dense_layers != "dense":
        raise SettingError(
            "dense_layers: the published code reads prompts densely; leave it out with "
            "official=True"
        )
    if method.prefill_ratio is not None:
        raise SettingError(
            "prefill_ratio: the published code has no sparse prefill; leave it out with "
            "official=True"
        )
    if method.sink or method.mem is not None:
        raise SettingError(
            "official: sink and mem do not exist in the published code; leave them out"
        )
