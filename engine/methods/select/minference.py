"""MInference 1.0: prefill by a sparse pattern per head, its lines ranked from the newest queries;
decode is full attention.

Source: MInference 1.0 (Jiang et al., NeurIPS 2024), section 3, and microsoft/MInference
(minference_forward.py). Patterns: engine/methods/select/minference_patterns.py. Published defaults:
("vertical_slash", 1000, 6096) for heads that no table names, lines ranked by the last 64 queries,
the first 30 columns and the nearest 100 diagonals always among them; a table per model from an
offline search by the attention mass kept (tools/calibrate/minference.py), or a published one
(engine/methods/select/minference_table.py). Every query head chooses for itself, so nothing is
reduced over a group. Lines are ranked once per prompt, by its last 64 queries: a prompt is one
chunk, whatever the plan's, with the activations that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Bank
from engine.base.checks import fraction
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.select.minference_patterns import (
    BLOCK,
    DEFAULT,
    LAST,
    Lines,
    Pattern,
    Pooled,
    a_shape,
    checked,
    line_sums,
    line_sums_bytes,
    sizes,
    vertical_slash,
)
from engine.methods.select.minference_table import read_table
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.softmax import PLAIN
from kernels.prefill.dense import attend_chunk, attend_rows, prefill_dense, prefill_dense_lse
from kernels.prefill.merge import merge


@dataclass(frozen=True)
class MInference(Method):
    """patterns: one pattern for all heads, a table [layer][query head] of them, or a file that
    holds one (read_table). share: scales their sizes to add up to this share of the tokens seen
    (the published minima of 30 columns and 50 diagonals stay); None: as they are. Blocks of 64
    queries read all tokens on their diagonals, so more is read where diagonals lie apart:
    `pairs_read` counts it.
    """

    patterns: tuple[Any, ...] | str | Path = DEFAULT
    share: float | None = None

    def __post_init__(self) -> None:
        table = self.patterns
        if isinstance(table, (str, Path)):
            table = read_table(Path(table))
        single = isinstance(table, (tuple, list)) and table and isinstance(table[0], str)
        if not single and not (
            isinstance(table, (tuple, list))
            and table
            and all(isinstance(r, (tuple, list)) and r for r in table)
        ):
            raise SettingError(
                f"patterns: found {str(table)[:60]!r}, expected a pattern, a table "
                "[layer][query head] of them, or a file that holds one"
            )
        object.__setattr__(
            self,
            "patterns",
            checked(table) if single else tuple(tuple(map(checked, row)) for row in table),
        )
        if self.share is not None:
            fraction("share", self.share)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """All layers FULL: a step reads everything. Raises SettingError for another model's
        table.
        """
        self.table(config)
        return super().plan(config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # the last layer's lines are ranked by 64 queries too, and all lines by a prompt's last ones
        return Needs(
            offload=plan.each_layer,
            whole_layer=True,
            every_query=True,
            one_chunk=True,
            final_call=None,
            own_prompts=True,
            cuda_graph=True,
            sliding=True,
            latent=True,
        )

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """All so far, the chunk included: a layer in host memory is read whole."""
        return stop

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """The lines of a whole prompt as they are ranked, where a head has any."""
        if all(pattern[0] != "vertical_slash" for row in self.table(config) for pattern in row):
            return 0
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return line_sums_bytes(*heads, itemsize, capacity)

    def table(self, config: ModelConfig) -> tuple[tuple[Pattern, ...], ...]:
        """Patterns [layer][query head]."""
        layers, heads = config.num_layers, config.num_heads
        assert isinstance(self.patterns, tuple)
        if isinstance(self.patterns[0], str):
            return ((self.patterns,) * heads,) * layers
        if len(self.patterns) != layers or any(len(row) != heads for row in self.patterns):
            raise SettingError(
                f"patterns: found a table of {len(self.patterns)} layers with "
                f"{len(self.patterns[0])} heads, expected {layers} layers with {heads} query heads "
                "(this model); search again (python -m tools.calibrate.minference)"
            )
        return self.patterns

    def runtime(self, setup: Setup) -> Runtime:
        return MInferenceRuntime(self, setup)


class MInferenceRuntime(Runtime):
    """Only counters outlive a chunk: pairs_read and pairs_causal, (query, token) pairs summed over
    the heads of sparse calls.

    meter: a list takes {"layer", "start", "recall" [H]} per chunk: the dense attention mass that
    each head's pattern keeps.
    """

    method: MInference

    def __init__(self, method: MInference, setup: Setup):
        super().__init__(method, setup)
        self.table = method.table(setup.config)
        self.pairs_read = self.pairs_causal = 0
        self.meter: list[dict[str, Any]] | None = None
        # (layer, stop, output of the last query) of the chunk under way
        self._newest: tuple[int, int, torch.Tensor] | None = None

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Dense where every head's pattern covers everything. The last layer comes twice, with all
        queries and with the newest alone, which uses the lines of all.
        """
        stop, patterns = start + q.shape[1], self.table[layer]
        dense = all(self._covers(pattern, stop) for pattern in patterns)
        known = self._newest if q.shape[1] == 1 and not dense else None
        if known is not None and known[:2] == (layer, stop):
            return known[2]
        k, v = bank.kv(layer)
        if dense:
            return prefill_dense(q, k, v, start, self.scale, backend=self.setup.backend)
        out, lse = self.attend_patterns(patterns, q, k, v, start)
        if self.meter is not None:
            given = self.scale, PLAIN, self.setup.backend
            every = prefill_dense_lse(q, k, v, start, *given)[1]
            recall = torch.exp(lse - every).mean((0, 1))
            self.meter.append({"layer": layer, "start": start, "recall": recall})
        self._newest = layer, stop, out[:, -1:]
        return out

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Drop what is left of an interrupted chunk."""
        self._newest = None

    def commit(self, count: int) -> None:
        self._newest = None

    def _covers(self, pattern: Pattern, stop: int) -> bool:
        reach = sizes(pattern, stop, self.method.share)
        return reach[0] * BLOCK >= stop if pattern[0] == "block_sparse" else max(reach) >= stop

    def attend_patterns(
        self,
        patterns: tuple[Pattern, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each query head by its own pattern: (out [B, C, H, D], lse [B, C, H] float32)."""
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        stop = start + q.shape[1]
        group = q.shape[2] // k.shape[1]
        edges = [start, *range((start // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
        for b in range(q.shape[0]):
            shown = self._shown(patterns, q[b], k[b], start)
            for first, last in zip(edges, edges[1:]):
                part = slice(first - start, last - start)
                given = self.scale, PLAIN, self.setup.backend
                own = attend_chunk(q[b : b + 1, part], k[b : b + 1], v[b : b + 1], first, *given)
                past = torch.zeros_like(own[0]), torch.full_like(own[1], float("-inf"))
                for head, lines in enumerate(shown):
                    rows = lines.past(first, last)
                    self.pairs_read += len(rows) * (last - first)
                    if len(rows):
                        own_k, own_v = (
                            t[b, head // group].index_select(0, rows)[None, None] for t in (k, v)
                        )
                        one = slice(head, head + 1)
                        past[0][:, :, one], past[1][:, :, one] = attend_rows(
                            q[b : b + 1, part, one], own_k, own_v, self.scale, False, *given[1:]
                        )
                out[b : b + 1, part], lse[b : b + 1, part] = merge([own, past], q.dtype)
                self.pairs_read += causal_pairs(0, last - first) * len(shown)
        self.pairs_causal += causal_pairs(start, stop) * q.shape[0] * q.shape[2]
        return out, lse

    def _shown(
        self, patterns: tuple[Pattern, ...], q: torch.Tensor, k: torch.Tensor, start: int
    ) -> list[Lines | Pooled]:
        """What each query head of one sequence reads in this chunk. q [C, H, D]; k [Hkv, T, D]."""
        stop, group, sums = start + len(q), q.shape[1] // len(k), None
        shown: list[Lines | Pooled] = []
        for head, pattern in enumerate(patterns):
            reach = sizes(pattern, stop, self.method.share)
            if pattern[0] == "a_shape":
                shown.append(a_shape(stop, reach[0], reach[1], q.device))
            elif pattern[0] == "block_sparse":
                shown.append(Pooled(q[:, head], k[head // group], start, *reach))
            else:
                sums = sums or line_sums(q[-LAST:], k, stop, self.scale)
                shown.append(vertical_slash(sums[0][head], sums[1][head], *reach))
        return shown

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """Counts a head's lines as tokens of every query: diagonals that lie apart read up to 64
        times as many, which depends on the text (pairs_read counts it afterwards). Leaves out the
        ranking, 64 queries of a chunk.
        """
        pairs = 0.0
        for row in self.table:
            for pattern in row:
                unit = BLOCK if pattern[0] == "block_sparse" else 1
                reach = sum(sizes(pattern, stop, self.method.share)) * unit + BLOCK // 2
                middle = min(stop, max(start, reach))
                pairs += (causal_pairs(start, middle) + (stop - middle) * reach) / len(row)
        return flops.parts(start, stop)[0], flops.per_pair * pairs


def causal_pairs(start: int, stop: int) -> int:
    """(query, token) pairs of queries start .. stop-1 with all tokens up to themselves."""
    return (stop * (stop + 1) - start * (start + 1)) // 2
