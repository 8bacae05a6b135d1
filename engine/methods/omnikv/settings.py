"""OmniKV's settings: which layers choose, how many tokens, and what the engine must provide.

Source: the OmniKV paper (ICLR 2025), section 4, Eq. 1-4. Filter layers attend to everything and
choose k tokens; the layers after them attend to those and the tail. Every K and V stays in the
bank. `official=True` follows the published code instead, to the last index
(engine/methods/omnikv/official.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.methods.omnikv.official import OfficialRuntime
from engine.methods.omnikv.prefill import AT_ONCE
from engine.methods.omnikv.prompt_rows import rows_over_link
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.selector import SELECTORS
from engine.plan.cpu_costs import CpuCosts, cpu_costs
from engine.plan.layers import PAPER_WAIT, TAIL_BLOCK, LayerPlan, Role, layer_plan
from engine.plan.mem import budget_from_mem
from engine.plan.needs import Needs
from engine.settings import at_most_one, boolean, fraction, integer, is_integer, one_of
from kernels.block_sparse import kept_bytes

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.plan.filter_layers import FilterLayers

DEFAULT_TOKENS = 2048


@dataclass(frozen=True)
class OmniKV(Method):
    """Settings of OmniKV.

    filter_layers: ascending distinct layer numbers, or None (omnikv.json beside the model, the
    published table, else a spread). tokens | share | mem: the budget k, at most one; none means
    2048 tokens. share and mem are parts of the bank's length at the end of the latest prefill.
    selector: last | uniform | exponential over `window` queries. scores: None (softmax over every
    key the query sees) | "softmax" | "raw". wait_layers: layers after a filter that attend to
    everything; they hide the load of an offloaded group and repair nothing. 1 is the paper's form.
    None: 0 (official: 1), or where filter_layers is None what comes with them: the calibration's, 1
    with a published set, 0 with a guess. tail: newest
    tokens that every layer sees. sink: first tokens that are always chosen, inside the budget.
    dense_below: contexts shorter than this run full attention; "auto" decides from byte counts and
    this CPU's measured costs, 0 never. prefill_ratio: r of chunked OmniKV-prefill, None for exact
    prefill: each block of `prefill_block` queries attends, in the sparse layers, to the
    r * prefill_block past tokens that every `prefill_stride`-th query of the block scores highest;
    the prompt's last `prefill_dense_end` tokens are read densely. dense_layers: "block_sparse"
    makes FULL and WAIT layers read, in prefill, only the key blocks that carry `dense_mass` of the
    attention as `dense_estimator` ("pooled" | "antidiagonal") estimates it from `dense_stride`
    tokens at a time (engine/methods/omnikv/block_sparse.py).
    """

    sliding = True
    capped = True

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
    dense_estimator: str = "pooled"

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
    def cannot_draft(self) -> str:
        if self.official:
            return "official=True follows the published code, which has no drafts"
        if self.prefill_ratio is not None or self.dense_layers != "dense":
            return "its prompt must be read densely; leave prefill_ratio and dense_layers out"
        return ""

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        """With the model's filter layers where none were given; Full() where it has none."""
        if self.filter_layers is not None:
            return self
        known = filter_layers()
        if not known.layers:
            return Full()
        wait = known.wait if self.wait_layers is None else self.wait_layers
        return replace(self, filter_layers=known.layers, wait_layers=wait)

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
        return layer_plan(config.num_layers, self.filter_layers or (), wait, config.local_layers)

    def bank_share(self, plan: LayerPlan) -> float | None:
        """Share of the bank that a budget by share or mem means, or None for a budget in tokens."""
        return budget_from_mem(self.mem, plan.dense_share) if self.mem is not None else self.share

    def budget(self, plan: LayerPlan, length: int) -> int:
        """k where the bank held `length` tokens at the end of the latest prefill."""
        share = self.bank_share(plan) if plan.sparse_layers else None
        if share is None:
            return DEFAULT_TOKENS if self.tokens is None else self.tokens
        return max(0 if self.official else 1, math.floor(share * length))

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Device bytes: scores (4 B a token, and 4 B for every block that prefill_ratio scores at
        once) and one row of indices per group.
        """
        forced = self.window if self.official else 0
        selected = 0
        if plan.sparse_layers:
            selected = max(1, min(capacity, self.budget(plan, capacity) + forced))
        scores = 4 * capacity * (1 + AT_ONCE if self.prefill_ratio else 1)
        return Needs(
            selected=selected,
            device_bytes=scores + 4 * selected * len(plan.groups) if selected else 0,
            window=0 if self.selector == "last" else self.window,
            prompt_rows=self._prompt_rows,
            tail=self.tail,
            offload=tuple(group.layers for group in plan.groups if group.layers),
            # the published code's tail is everything generated, which no ring of newest tokens
            # holds
            fetches=not self.official,
            # the published code's step number decides shapes: it is read on the host
            cuda_graph=not self.official,
            final_call=self._final_call,
            own_prompts=bool(self.prefill_ratio) or self.dense_layers != "dense",
        )

    @property
    def _prompt_rows(self) -> int:
        # a block's selection and its band, which begins up to a block of the tail earlier
        ratio = self.prefill_ratio
        return ratio * self.prefill_block + self.tail + TAIL_BLOCK if ratio else 0

    @property
    def _final_call(self) -> int | None:
        # the published code reads a prompt in one call; block-sparse dense layers read every call's
        # end densely
        if self.official or self.dense_layers != "dense":
            return None
        # a prompt that is read sparsely is read densely at its end
        return self.prefill_dense_end if self.prefill_ratio else 0

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """What a chunk's blocks choose, in every group, and how block-sparse layers choose."""
        found = 0
        if self.prefill_ratio:
            k = min(self.prefill_ratio * self.prefill_block, capacity)
            groups = sum(1 for group in self.plan(config).groups if group.layers)
            # positions, their rows where they are listed, the list
            found += 3 * 4 * groups * -(-chunk // self.prefill_block) * k
        if self.dense_layers == "block_sparse":
            found += kept_bytes(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                itemsize,
                chunk,
                capacity,
                self.dense_stride,
                self.dense_estimator,
            )
        return found

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """With a prefill_ratio what the blocks choose, each block something else, and the band."""
        if not self.prefill_ratio:
            return begin
        k = min(self.prefill_ratio * self.prefill_block, capacity)
        return rows_over_link(self, k, begin, stop, total, room, first)

    def dense_below_tokens(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, device_type: str, capacity: int
    ) -> int:
        """Context length from which sparse layers read fewer bytes than scoring, gathering and
        reading cost.

        A sparse layer reads k + tail tokens instead of n. A filter layer writes and reads one
        float32 score per head and token, and one score per token for the top-k. On a GPU bytes are
        all that counts. On a CPU a row that is gathered, a row of a filter layer and a choice cost
        more than their bytes: measured, by instruction set (engine/plan/cpu_costs.py).
        """
        if isinstance(self.dense_below, int):
            return self.dense_below
        sparse, filters = len(plan.sparse_layers), plan.count(Role.FILTER)
        if not sparse:
            return 0
        row = config.kv_bytes(itemsize)
        costs = cpu_costs(itemsize) if device_type == "cpu" else CpuCosts(filter=1, row=1)
        scoring = filters * (8 * config.num_heads + 12 + (costs.filter - 1) * row)
        per_token: float = sparse * row - scoring
        share = self.bank_share(plan)
        if share is not None:
            per_token -= sparse * row * share * costs.row
            fixed = sparse * row * self.tail * costs.row
        else:
            fixed = sparse * row * (self.budget(plan, capacity) + self.tail) * costs.row
        fixed += filters * costs.choice
        return math.ceil(fixed / per_token) if per_token > 0 else capacity + 1

    def validate(self, plan: LayerPlan) -> None:
        """Mem% must exceed what the dense layers take. A plan without sparse layers is legal; warn
        about it.
        """
        if self.mem is not None and (plan.sparse_layers or self.mem < 1.0):
            budget_from_mem(self.mem, plan.dense_share)
        if not plan.sparse_layers:
            warnings.warn(
                f"OmniKV with filter_layers={self.filter_layers} and "
                f"wait_layers={self.wait_layers} leaves no sparse layer of {plan.num_layers}: "
                "every layer runs full attention",
                stacklevel=3,
            )

    def validate_prompt(self, start: int, stop: int) -> None:
        """official: one prompt per session (the published code breaks silently on a second), as
        long as its windows.
        """
        if not self.official:
            return
        if start:
            raise SettingError(
                "official: the published code knows one prompt per session; a second prefill is "
                "not supported"
            )
        least = 2 if self.selector == "last" else max(2, self.window - 1)
        if stop < least:
            raise SettingError(
                f"official: found a prompt of {stop} tokens, expected at least {least} "
                f"(the published code fails below)"
            )

    def runtime(self, setup: Setup) -> Runtime:
        return OfficialRuntime(self, setup) if self.official else OmniKVRuntime(self, setup)


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


def _validate_budget(method: OmniKV) -> None:
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


def _validate_selection(method: OmniKV) -> None:
    one_of("selector", method.selector, SELECTORS)
    one_of("scores", method.scores, (None, "softmax", "raw"))
    integer("window", method.window, 1, 64)
    if method.wait_layers is not None:
        integer("wait_layers", method.wait_layers, 0)
    integer("tail", method.tail, 64)
    boolean("official", method.official)
    if method.dense_below != "auto":
        integer("dense_below", method.dense_below, 0)


def _validate_prefill(method: OmniKV) -> None:
    if method.prefill_ratio is not None:
        integer("prefill_ratio", method.prefill_ratio, 1)
    integer("prefill_block", method.prefill_block, 64)
    integer("prefill_stride", method.prefill_stride, 1)
    integer("prefill_dense_end", method.prefill_dense_end, 0)
    one_of("dense_layers", method.dense_layers, ("dense", "block_sparse"))
    one_of("dense_estimator", method.dense_estimator, ("pooled", "antidiagonal"))
    one_of("dense_stride", method.dense_stride, (4, 8, 16, 32))
    fraction("dense_mass", method.dense_mass)


def _validate_official(method: OmniKV) -> None:
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
