"""Kascade in prompts too: 128 queries choose together in an anchor layer, and the layers behind
read for these queries what the anchor's head that the map names has chosen.

Source: Kascade (Deshmukh et al., arXiv 2512.16391), prefill with tiles, and microsoft/kascade
(KascadeStrategy, rolling_prefill). In an anchor the softmax of a tile's queries is summed over the
tile and over a K/V head's query heads; of the tokens before the tile those with the highest sums
are read, and the tile itself, causally. The first anchor reads everything, the others what they
chose. Decided here: the budget is of the tokens before a tile, and the tile is read beside it (the
code takes the tile off the budget of the whole prompt); tiles begin at absolute multiples of
`tile`, and one that a chunk or a call cuts chooses for itself; the model's last layer, of which a
prompt needs its newest token alone, reads everything. Answers are read as by `kascade`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.bank.base import Bank, Step
from engine.bank.row_origins import Span
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.prompts.blocks import blocks_of, spans_of
from engine.methods.select.across.kascade import Kascade, KascadeRuntime
from engine.methods.select.base import Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, Role
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.on_device import on_device
from kernels.launch.softmax import Softmax
from kernels.prefill.by_head import Block, prefill_by_head
from kernels.rows.forms import key_floats
from kernels.select.topk import select_topk

AT_ONCE = 1024  # keys at a time: their weights under a tile in float32 are 2 MB for 4 query heads


@dataclass(frozen=True)
class KascadeTiles(Kascade):
    """As Kascade; budget: in prompts the rows before a tile that a K/V head reads, share of those.
    tile: queries that choose together, and the newest rows that are always read.
    """

    full_prompts = False

    tile: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("tile", self.tile, 1)

    @property
    def name(self) -> str:
        return "kascade_tiles"

    @property
    def cannot_draft(self) -> str:
        return "its prompts are read in a way of their own"

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The tiles of queries start .. stop-1."""
        return blocks_of(start, stop, self.tile, self.budget)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """As Kascade's, and sums: of every key of one tile, one per K/V head."""
        sparse = bool(plan.sparse_layers)
        sums = Buffer((config.num_kv_heads, capacity if sparse else 0), torch.float32)
        return {**super().buffers(plan, config, capacity, batch), "sums": sums}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """The bank stays on the device: a prompt's layers gather from it, head by head."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(needs, offload=(), step_rows=None, own_prompts=True, latent=False)

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """The lists of a chunk's tiles, a layer's own order of them, the rows of one tile, and keys
        as they are weighed.
        """
        kept, heads = min(self.budget(capacity), capacity), config.num_kv_heads
        lists = 2 * 4 * (-(-chunk // self.tile) + 1) * heads * kept
        group = config.num_heads // heads
        weighed = 8 * heads * group * min(self.tile, chunk) * max(AT_ONCE, self.tile)
        return lists + weighed + 2 * heads * kept * config.head_dim * itemsize

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """A tile that a chunk or the prompt cuts chooses for itself."""
        names = "tokens", "share", "least", "anchors", "head_map", "tile"
        said = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return spans_of(self.blocks(first, stop), self.tile, f"{self.name} prompt: {said}")

    def runtime(self, setup: Setup) -> Runtime:
        return KascadeTilesRuntime(self, setup)


class KascadeTilesRuntime(KascadeRuntime):
    """The lists of the chunk under way outlive an anchor, and no chunk. past_read: past rows that
    K/V heads read for tiles that choose, the tile's own included, summed over tiles and layers (for
    tests and tables).
    """

    method: KascadeTiles
    sums: torch.Tensor

    def __init__(self, method: KascadeTiles, setup: Setup):
        super().__init__(method, setup)
        self.lists: dict[int, torch.Tensor] = {}  # by group: int32 [B, tiles, Hkv, most]
        self.past_read = 0

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Each tile by its anchor's choice; dense where the budget covers the past."""
        group, last = self.plan.group_of[layer], layer == self.setup.config.num_layers - 1
        blocks = list(self.method.blocks(start, start + q.shape[1]))
        if group is None or last or not any(kept for *_, kept in blocks):
            return super().attend_prompt(layer, q, bank, start)
        k, v = bank.kv(layer)
        if self.plan.groups[group].filter_layer == layer:
            self.lists[group] = self.choose(layer, q, k, blocks, start)
        if self.plan.roles[layer] is not Role.SPARSE:
            return super().attend_prompt(layer, q, bank, start)
        index = self.lists[group]
        if layer in self.heads:
            index = index.index_select(2, self.heads[layer])
        self.past_read += sum(kept + first - local for first, _, local, kept in blocks)
        given = self.scale, self.setup.backend, self.softmax[layer]
        return prefill_by_head(q, k, v, index, blocks, start, *given)

    def choose(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, blocks: list[Block], start: int
    ) -> torch.Tensor:
        """Rows that the tiles of q [B, C, H, D], from position `start` on, choose of k [B, Hkv, T,
        D]: int32 [B, tiles, Hkv, largest budget], ascending, then -1.
        """
        heads, device, most = k.shape[1], q.device, max(kept for *_, kept in blocks)
        index = torch.empty(len(q), len(blocks), heads, most, dtype=torch.int32, device=device)
        lo, counts = (torch.zeros(heads, dtype=torch.int32, device=device) for _ in range(2))
        for b, (one, rows) in enumerate(zip(q, k)):
            for n, (first, last, local, kept) in enumerate(blocks):
                if kept:
                    tile = one[first - start : last - start]
                    seen, softmax = rows[:, :last], self.softmax[layer]
                    weigh(self.sums, tile, seen, local, self.scale, softmax)
                hi, k_ = (
                    on_device([x] * heads, torch.int32, device)
                    for x in (local if kept else 0, kept)
                )
                given = index[b, n], counts
                select_topk(self.sums, lo, hi, k_, *given, backend=self.setup.backend)
        return index

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        super().end_prompt(length, step)
        self.lists = {}

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """What the tiles read; a layer that chooses weighs every key twice, half an attention
        each.
        """
        linear, config = flops.per_token * (stop - start), self.setup.config
        tiles, whole = 0.0, 0.0
        for first, last, local, kept in self.method.blocks(start, stop):
            count = last - first
            tiles += count * (kept + first - local + (count + 1) / 2)
            whole += count * (first + (count + 1) / 2)
        choosing = sum(bool(group.layers) for group in self.plan.groups) if tiles < whole else 0
        sparse = sum(layer < config.num_layers - 1 for layer in self.plan.sparse_layers)
        layers = (flops.layers - sparse + choosing) * whole + sparse * tiles
        return linear, flops.per_pair * layers


def weigh(
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    local: int,
    scale: float,
    softmax: Softmax,
) -> None:
    """Sum the softmax of queries q [C, H, D], the newest of k [Hkv, n, D] rows, over queries and
    over a K/V head's query heads, into sums float32 [Hkv, at least local]: of the first `local`
    keys; those behind count in the softmax alone.
    """
    heads, count, n = len(k), len(q), k.shape[1]
    asked = q.float().transpose(0, 1).unflatten(0, (heads, -1))  # [Hkv, G, C, D]

    def logits(first: int, stop: int) -> torch.Tensor:
        return softmax.capped(asked @ key_floats(k[:, None, first:stop]).mT * scale)

    own, places = logits(local, n), torch.arange(local, n, device=q.device)
    newest = torch.arange(n - count, n, device=q.device)
    own.masked_fill_(places > newest.unsqueeze(1), float("-inf"))
    lse = own.logsumexp(-1, keepdim=True)
    parts = [(first, min(local, first + AT_ONCE)) for first in range(0, local, AT_ONCE)]
    for part in parts:
        lse = torch.logaddexp(lse, logits(*part).logsumexp(-1, keepdim=True))
    lse = softmax.joined(lse)
    for first, stop in parts:
        weights = logits(first, stop).sub_(lse).exp_()
        torch.sum(weights, (1, 2), out=sums[:, first:stop])
