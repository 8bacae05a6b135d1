"""QuoKA: a chunk of a prompt reads the keys that its least ordinary queries point at; answers read
everything.

Source: QuoKA (Jones et al., arXiv 2602.08722), sections 3 and 4; of its text the abstract and
descriptions by others were at hand, no code. In each layer, for each chunk of 128 queries, every
query head keeps the 16 queries that are least like its mean query, by cosine; the kept queries of a
group are normalised and averaged, rank by rank; a key's score is its largest cosine with one of
these, and each K/V head reads the keys of the highest scores and its own chunk. Decided here:
chunks ("blocks") begin at absolute multiples of `block`, whatever the engine's own chunks are, and
one that such a chunk or a call cuts chooses for itself; the model's last layer, of which a prompt
needs its newest token alone, reads everything. What a prompt leaves out stays in the bank, and a
step reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.bank.base import Bank
from engine.bank.row_origins import Span
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.prompts.blocks import blocks_of, spans_of
from engine.methods.select.base import Budgeted, Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.on_device import on_device
from kernels.prefill.by_head import Block, prefill_by_head
from kernels.prefill.dense import prefill_dense
from kernels.rows.forms import key_floats
from kernels.select.topk import select_topk

AT_ONCE = 4096  # keys scored at a time: in float32 2 MB a head at head_dim 128
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class QuoKA(Budgeted):
    """Budget: tokens | share, at most one (default 1024 tokens); rows of the past that a K/V head
    reads for a block, share of those before it. queries: that choose for a block, of each query
    head. block: queries that read the same rows, and the newest rows that are always read.
    """

    queries: int = 16
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("queries", self.queries, 1)
        integer("block", self.block, 1)

    @property
    def cannot_draft(self) -> str:
        return "its steps select no tokens to read, and its prompts are read in a way of their own"

    def budget(self, length: int) -> int:
        """Rows of a past of `length` tokens that a block reads."""
        if self.tokens is None and self.share is None:
            return DEFAULT_TOKENS
        return super().budget(length)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks of queries start .. stop-1."""
        return blocks_of(start, stop, self.block, self.budget)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """scores: of every key of one block, one per K/V head."""
        return {"scores": Buffer((config.num_kv_heads, capacity), torch.float32)}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Every layer may live in host memory; a prompt reads it whole to choose."""
        buffers = self.buffers(plan, config, capacity).values()
        return Needs(
            device_bytes=sum(buffer.nbytes(itemsize) for buffer in buffers),
            offload=plan.each_layer,
            whole_layer=True,
            own_prompts=True,
            cuda_graph=True,
            sliding=True,
            capped=True,
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
        """All so far; where a block chooses, the chunk included: the layer is read whole."""
        return stop if any(kept for *_, kept in self.blocks(begin, stop)) else begin

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """The lists of a chunk's blocks, the rows of one block, and keys as they are scored."""
        kept, heads = min(self.budget(capacity), capacity), config.num_kv_heads
        lists = 4 * (-(-chunk // self.block) + 1) * heads * kept
        scored = 4 * heads * min(AT_ONCE, capacity) * (config.head_dim + self.queries)
        return lists + scored + 2 * heads * kept * config.head_dim * itemsize

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """A block that a chunk or the prompt cuts chooses for itself."""
        return spans_of(self.blocks(first, stop), self.block, self._described)

    @property
    def _described(self) -> str:
        """All that a whole block's rows depend on beside the rows before it."""
        names = "tokens", "share", "queries", "block"
        said = [f"{name}={getattr(self, name)}" for name in names]
        return f"{self.name} prompt: {', '.join(said)}"

    def runtime(self, setup: Setup) -> Runtime:
        return QuoKARuntime(self, setup)


class QuoKARuntime(Runtime):
    """Only a counter outlives a chunk. past_read: past rows that K/V heads read for blocks that
    choose, the band included, summed over blocks and layers (for tests and tables).
    """

    method: QuoKA

    def __init__(self, method: QuoKA, setup: Setup):
        super().__init__(method, setup)
        (buffer,) = method.buffers(setup.plan, setup.config, setup.capacity).values()
        self.scores = torch.empty(buffer.shape, dtype=buffer.dtype, device=setup.device)
        self.past_read = 0

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Each block by its own choice; dense where the budget covers the past."""
        blocks = list(self.method.blocks(start, start + q.shape[1]))
        if self.plan.is_last(layer) or not any(kept for *_, kept in blocks):
            return super().attend_prompt(layer, q, bank, start)
        k, v = bank.kv(layer)
        given = self.scale, self.setup.backend, self.softmax[layer]
        dense = next(n for n, block in enumerate(blocks) if block[3])
        middle = blocks[dense][0] - start
        index = self.choose(q, k, blocks[dense:], start)
        self.past_read += sum(kept + first - local for first, _, local, kept in blocks[dense:])
        out = prefill_by_head(q[:, middle:], k, v, index, blocks[dense:], start + middle, *given)
        if not middle:
            return out
        return torch.cat([prefill_dense(q[:, :middle], k, v, start, *given), out], 1)

    def choose(
        self, q: torch.Tensor, k: torch.Tensor, blocks: list[Block], start: int
    ) -> torch.Tensor:
        """Rows that the blocks of q [B, C, H, D], from position `start` on, choose of k [B, Hkv, T,
        D]: int32 [B, blocks, Hkv, largest budget], ascending, then -1.
        """
        heads, device, most = k.shape[1], q.device, max(kept for *_, kept in blocks)
        index = torch.empty(len(q), len(blocks), heads, most, dtype=torch.int32, device=device)
        lo, counts = (torch.zeros(heads, dtype=torch.int32, device=device) for _ in range(2))
        for b, (one, rows) in enumerate(zip(q, k)):
            for n, (first, last, local, kept) in enumerate(blocks):
                pointers = representatives(
                    one[first - start : last - start], heads, self.method.queries
                )
                for begin in range(0, local, AT_ONCE):
                    part = slice(begin, min(local, begin + AT_ONCE))
                    self.scores[:, part] = cosines(pointers, rows[:, part])
                hi, k_ = (on_device([x] * heads, torch.int32, device) for x in (local, kept))
                given = index[b, n], counts
                select_topk(self.scores, lo, hi, k_, *given, backend=self.setup.backend)
        return index

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """What the blocks read, and half an attention of the queries that choose for a K/V head."""
        linear, pairs, config = flops.per_token * (stop - start), 0.0, self.setup.config
        for first, last, local, kept in self.method.blocks(start, stop):
            count = last - first
            pairs += count * (kept + first - local + (count + 1) / 2)
            if kept:
                chosen = min(count, self.method.queries)
                pairs += 0.5 * chosen * local * config.num_kv_heads / config.num_heads
        return linear, flops.layers * flops.per_pair * pairs


def representatives(q: torch.Tensor, kv_heads: int, most: int) -> torch.Tensor:
    """The queries that choose for a block: of q [C, H, D], per query head the `most` whose cosine
    with the head's mean query is smallest, least first, of equal ones the earlier; normalised, and
    averaged over a group, rank by rank. float32 [Hkv, min(C, most), D].
    """
    q = q.float().transpose(0, 1)  # [H, C, D]
    likeness = F.cosine_similarity(q, q.mean(1, keepdim=True), dim=-1)
    order = likeness.sort(dim=1, stable=True).indices[:, :most]
    heads = torch.arange(len(q), device=q.device).unsqueeze(1)
    kept = F.normalize(q[heads, order], dim=-1)
    return kept.unflatten(0, (kv_heads, -1)).mean(1)


def cosines(pointers: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Each key's largest product with a pointer, over the key's length: pointers float32 [Hkv, N,
    D], k [Hkv, n, D] -> float32 [Hkv, n].
    """
    rows = key_floats(k)
    found = (pointers @ rows.mT).amax(1)
    return found / rows.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
