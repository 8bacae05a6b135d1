"""PoD together with SnapKV: a prompt's end keeps what SnapKV keeps, once for all layers of a block,
and over what is kept the block's layers share the attention logits of distant tokens.

Source: "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity"
(PoD), its row PoD+SnapKV: SnapKV with a budget of 4096 on top of PoD; Li et al., SnapKV (NeurIPS
2024), for what is kept. Rows can share logits only where they are the same tokens, so a block's
lowest layer chooses, per K/V head, and the layers above it keep its tokens with their own K and V.
The paper's saving has this form: 91.9% is 1 - 0.125 * 0.65, PoD's 35% of the eighth of 32,768 rows
that SnapKV leaves. Proximal tokens are, by their positions in the text, the first `first` and those
that are less than `recent` before the query; of them too only what is kept is seen. Prompts are
read as PoD reads them; a later one attends to what is kept and to its own tokens. Not trained, as
`pod_untrained`. With blocks of one layer it is SnapKV; with a budget that covers the text, PoD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.runtime import Chooser
from engine.methods.evict.shared.store import Part, Sequence, best
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from engine.methods.select.pod import attend_span, checked_blocks, lowest_layers
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.prefill.merge import merge


@dataclass(frozen=True)
class PodSnapKV(SnapKV):
    """blocks, first, recent: as in PodUntrained. tokens: 4096 by default, of which a block's layers
    keep the same.
    """

    blocks: tuple | None = None
    first: int = 16
    recent: int = 4080

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks is not None:
            object.__setattr__(self, "blocks", checked_blocks(self.blocks))
        integer("first", self.first, 0)
        integer("recent", self.recent, 1)

    @property
    def name(self) -> str:
        return "pod_snapkv"

    @property
    def own_prefill(self) -> bool:
        return self.blocks is not None

    def default_budget(self) -> dict[str, int]:
        return {"tokens": 4096}

    def plan(self, config: ModelConfig) -> LayerPlan:
        lowest_layers(self.blocks, config)
        return super().plan(config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        # several layers' rows at once: the bank stays on the device, as PoD's
        return replace(
            needs, own_prompts=self.blocks is not None, sliding=False, capped=False, offload=()
        )

    def runtime(self, setup: Setup) -> Runtime:
        return PodSnapRuntime(self, setup)


class PodSnapRuntime(SnapRuntime):
    """One session's stores. Queries of the lower layers travel up within a chunk or step. A layer's
    store has the same tokens, in the same rows, as that of the lowest layer of a head's block.
    """

    method: PodSnapKV

    def __init__(self, method: PodSnapKV, setup: Setup):
        super().__init__(method, setup)
        self.lowest = lowest_layers(method.blocks, setup.config)
        # layers whose logits others use
        self.used = {low for layer, lows in enumerate(self.lowest) for low in lows if low < layer}
        # (sequence, layer) -> queries of the chunk or step under way
        self.asked: dict[tuple[int, int], torch.Tensor] = {}
        self.chosen: dict[int, torch.Tensor] = {}  # layer -> index [Hkv, n], while a cut is made

    # ---------------------------------------------------------------- a cut

    def fold(self, b: int, step: Step | None, choose: Chooser | None) -> None:
        super().fold(b, step, choose)
        self.chosen = {}

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """A block's lowest layer chooses, the others keep the same rows."""
        (part,), found = parts, []
        for heads, low in self._runs(layer):
            if low < layer:
                found.append(self.chosen[low][heads])
                continue
            own = Part(heads, part.k[heads], part.v[heads], part.positions[heads], None)
            ranks = self.rank(sequence, layer, own, step)
            found.append(best(ranks, own.positions, sequence.budgets[layer]))
        self.chosen[layer] = torch.cat(found)
        return [(part, self.chosen[layer])]

    def _runs(self, layer: int) -> list[tuple[slice, int]]:
        """[(K/V heads, lowest layer of their block)]: neighbours of the same one together."""
        runs = [(low, len(list(heads))) for low, heads in groupby(self.lowest[layer])]
        stops = [sum(count for _, count in runs[: i + 1]) for i in range(len(runs))]
        return [(slice(stop - n, stop), low) for (low, n), stop in zip(runs, stops)]

    # ---------------------------------------------------------------- attention

    def commit(self, count: int) -> None:
        super().commit(count)
        self.asked = {}

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        stop = start + q.shape[1]
        if not self._shares(0, layer, q, stop):
            return super().attend_prompt(layer, q, bank, start)
        self.bank, sequence = bank, self.sequences[0]
        ((heads, k, v, held),) = self.live(layer, bank, stop)
        if not held:
            k, v = own_rows(bank, layer, k, v)
        positions = torch.arange(sequence.since, stop, dtype=torch.int32, device=q.device)
        positions = positions.expand(len(k), -1)
        if held:
            assert sequence.layers is not None
            kept = sequence.layers[layer][0].positions[:, :held]
            positions = torch.cat([kept, positions], 1)

        def keys(low: int) -> torch.Tensor:
            new = bank.rows(low, sequence.since, stop)[0][0]
            if sequence.layers is None:
                return new
            return torch.cat([sequence.layers[low][0].kv()[0], new], 1)

        return self._shared(0, layer, q, (k, v, positions), keys, start)

    def _attend(self, b: int, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        sequence = self.sequences[b]
        at, layers = sequence.length, sequence.layers
        if not self._shares(b, layer, q, at + 1):
            return super()._attend(b, layer, q, step)
        if layers is None:
            k, v = own_rows(step.bank, layer, *(t[b] for t in step.bank.rows(layer, 0, at + 1)))
            positions = torch.arange(at + 1, dtype=torch.int32, device=q.device)
            rows = k, v, positions.expand(len(k), -1)

            def keys(low: int) -> torch.Tensor:
                return step.bank.rows(low, 0, at + 1)[0][b]

            return self._shared(b, layer, q, rows, keys, at)
        (store,), (k, v) = layers[layer], step.bank.rows(layer, at, at + 1)
        store.put(k[b, :, 0], v[b, :, 0], at)
        held = store.held + 1
        rows = store.k[:, :held], store.v[:, :held], store.positions[:, :held]
        # the rows of lower layers have their new token already
        return self._shared(b, layer, q, rows, lambda low: layers[low][0].k[:, :held], at)

    def _shares(self, b: int, layer: int, q: torch.Tensor, stop: int) -> bool:
        """Whether a head of a layer uses logits of another at `stop` tokens; keeps its queries for
        the layers that will use them.
        """
        if layer in self.used:
            self.asked[b, layer] = q
        return min(self.lowest[layer]) < layer and stop > self.method.first + self.method.recent

    def _shared(
        self,
        b: int,
        layer: int,
        q: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        keys: Any,
        start: int,
    ) -> torch.Tensor:
        """Attention of q [1, C, H, D] at positions from `start` on to rows: K and V [Hkv, T, D],
        positions [Hkv, T] ascending; keys(low): K [Hkv, T, D] of the same rows in a lower layer.
        """
        (k, v, positions), out = rows, []
        spans = kept_spans(positions, start, q.shape[1], self.method.first, self.method.recent)
        for heads, low in self._runs(layer):
            sink, recent, distant = ((a[heads], z[heads]) for a, z in spans)
            mine, held = self.queries(q, heads)[0], (k[heads], v[heads])
            asked, far = mine, k[heads]
            if low < layer:
                lower = self.asked[b, low][:, -q.shape[1] :]
                asked, far = self.queries(lower, heads)[0], keys(low)[heads]
            parts = [attend_span(mine, *held, *span, self.scale) for span in (sink, recent)]
            parts.append(attend_span(asked, far, v[heads], *distant, self.scale))
            out.append(merge(parts, torch.float32)[0])
        return torch.cat(out, 1).to(q.dtype).unsqueeze(0)


def own_rows(
    bank: Bank, layer: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, to stay while rows of a lower one are read: copies where they came from
    host memory, through the buffers that those come through too (a method before left them there).
    """
    return (k.clone(), v.clone()) if bank.on_host(layer) else (k, v)


def kept_spans(
    positions: torch.Tensor, start: int, count: int, first: int, recent: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(low, high) int64 [Hkv, 1, C] of the rows of each head that queries at positions start ..
    start+count-1 see as their first tokens, as their newest ones, and as distant ones between them.
    positions int32 [Hkv, T], ascending: of the rows.
    """
    held = positions.contiguous()
    at = torch.arange(start, start + count, dtype=torch.int32, device=held.device)
    seen, edge = (
        torch.searchsorted(held, bound.expand(len(held), -1).contiguous())
        for bound in (at + 1, at + 1 - recent)
    )
    sinks = (held < first).sum(1, keepdim=True).expand(-1, count)
    edge, none = torch.maximum(edge, sinks), torch.zeros_like(seen)
    spans = (none, torch.minimum(sinks, seen)), (edge, seen), (sinks, edge)
    return [(low.unsqueeze(1), high.unsqueeze(1)) for low, high in spans]
