"""OmniKV: filter layers attend to everything and choose k tokens; the layers after them attend to
those and the tail. Every K and V stays in the bank.

Source: the OmniKV paper (ICLR 2025), section 4, Eq. 1-4. `official=True` follows the published code
instead, to the last index (engine/methods/omnikv/official.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.bank.row_origins import Span
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.methods.omnikv.official import OfficialRuntime
from engine.methods.omnikv.prefill import AT_ONCE
from engine.methods.omnikv.prompt_rows import read_by_blocks, rows_over_link
from engine.methods.omnikv.residual import DRAWING, ResidualRuntime
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import Settings
from engine.model.config.config import ModelConfig
from engine.plan.cpu_costs import CpuCosts, cpu_costs
from engine.plan.filter_layers import FilterLayers
from engine.plan.layers import TAIL_BLOCK, LayerPlan, Role, budget_from_mem
from engine.plan.needs import Needs
from kernels.prefill.block_sparse import kept_bytes


@dataclass(frozen=True)
class OmniKV(Settings):
    """OmniKV, with the fields of `Settings`."""

    full_prompts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual != "none" and type(self).runtime is not OmniKV.runtime:
            raise SettingError(
                f"residual: found {self.residual!r}, but {self.name} chooses its own way and "
                "estimates nothing; leave it out, or use omnikv"
            )

    @property
    def cannot_draft(self) -> str:
        if self.official:
            return "official=True follows the published code, which has no drafts"
        if self.prefill_ratio is not None or self.dense_layers != "dense":
            return "its prompt must be read densely; leave prefill_ratio and dense_layers out"
        return ""

    @property
    def chooses_verified(self) -> bool:
        # a verification has its last query's scores, and no others' ways
        return type(self) is OmniKV and self.selector == "last" and self.residual == "none"

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        """With the model's filter layers where none were given; Full() where it has none."""
        if self.filter_layers is not None:
            return self
        known = filter_layers()
        if not known.layers:
            return Full()
        wait = known.wait if self.wait_layers is None else self.wait_layers
        return replace(self, filter_layers=known.layers, wait_layers=wait)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Device bytes: scores (4 B a token, and 4 B for every block that prefill_ratio scores at
        once) and one row of indices per group; with a residual also two numbers a token, a row of
        weights per group and the tokens that are drawn.
        """
        forced = self.window if self.official else 0
        selected = 0
        if plan.chooses:
            selected = max(1, min(capacity, self.budget(plan, capacity) + forced))
        scores = 4 * capacity * (1 + AT_ONCE if self.prefill_ratio else 1)
        rows = len(plan.groups)
        if self.residual != "none":
            scores += 8 * capacity + 4 * self.drawn(selected)
            rows *= 2
        return Needs(
            selected=selected,
            device_bytes=scores + 4 * selected * rows if selected else 0,
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
            own_prompts=self._own_prompts,
            sliding=True,
            capped=True,
            recurrent=not self._own_prompts and not self.official,
            latent=not self.official,
        )

    @property
    def _own_prompts(self) -> bool:
        return bool(self.prefill_ratio) or self.dense_layers != "dense"

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
            groups = len(self.filter_layers or ())  # of a part of the layers: at most
            if all(config.ends):
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

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """With a prefill_ratio or block-sparse layers not all of a prompt is read fully."""
        spans = super().prompt_origins(plan, begin, first, stop, total)
        return read_by_blocks(self, plan, spans, first, total)

    def dense_below_tokens(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, device_type: str, capacity: int
    ) -> int:
        """Context length from which sparse layers read fewer bytes than scoring, gathering and
        reading cost.

        A sparse layer reads k + tail tokens instead of n. A filter layer writes and reads one
        float32 score per head and token, and one score per token for the top-k. On a GPU bytes are
        all that counts. On a CPU a row that is gathered, a row of a filter layer and a choice cost
        more than their bytes: measured, by instruction set (engine/plan/cpu_costs.py). With
        `residual` a filter layer chooses twice: it reads a number of each token, writes its chance
        and ranks that as it does the scores.
        """
        if isinstance(self.dense_below, int):
            return self.dense_below
        sparse, filters = len(plan.sparse_layers), plan.count(Role.FILTER)
        if not sparse:
            return 0
        row = config.kv_bytes(itemsize)
        costs = cpu_costs(itemsize) if device_type == "cpu" else CpuCosts(filter=1, row=1)
        scoring = filters * (8 * config.num_heads + 12 + (costs.filter - 1) * row)
        choices = filters * (1 if self.residual == "none" else 2)
        scoring += (choices - filters) * DRAWING
        per_token: float = sparse * row - scoring
        share = self.bank_share(plan)
        if share is not None:
            per_token -= sparse * row * share * costs.row
            fixed = sparse * row * self.tail * costs.row
        else:
            fixed = sparse * row * (self.budget(plan, capacity) + self.tail) * costs.row
        fixed += choices * costs.choice
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
        if self.residual != "none":
            return ResidualRuntime(self, setup)
        return OfficialRuntime(self, setup) if self.official else OmniKVRuntime(self, setup)
