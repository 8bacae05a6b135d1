"""XAttention: a block of queries reads the blocks of keys whose antidiagonals hold its attention;
answers read everything.

Source: XAttention (Xu et al., ICML 2025, arXiv 2503.16428), section 2 and Algorithm 1, and
mit-han-lab/x-attention (Xattention.py, utils.py). Queries and keys are taken `stride` at a time; a
group of queries and a group of keys have the sum of the products on their antidiagonal, over the
stride. A softmax over a query group's key groups, summed over the groups of a block of queries and
of a block of keys, estimates what the one gives the other. A query head reads its own block, the
first one, and the others of the largest sums until they hold `threshold` of all. Published: blocks
of 128, strides of 8 and 16, a threshold of 0.9, or one per head from a search (not here). Query
heads that share a K/V head choose apart, as there. Decided here: blocks begin at absolute multiples
of `block`, and one that a chunk or a call cuts chooses for itself, its missing queries being zeros,
as the code pads; the model's last layer, of which a prompt needs its newest token alone, reads
everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from engine.bank.base import Bank
from engine.bank.row_origins import Span
from engine.base.checks import fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops
from kernels.prefill.block_sparse import BLOCK, attend_blocks
from kernels.prefill.by_head import prefill_by_head
from kernels.prefill.dense import prefill_dense
from kernels.rows.forms import key_floats

AT_ONCE = 4096  # keys that are scored at a time, about


@dataclass(frozen=True)
class XAttention(Method):
    """threshold: the part of a block's estimated attention that is read, above 0 and at most 1,
    which is everything. stride: tokens of an antidiagonal. block: tokens of a block, a multiple of
    the stride.
    """

    threshold: float = 0.9
    stride: int = 16
    block: int = 128

    def __post_init__(self) -> None:
        fraction("threshold", self.threshold)
        integer("stride", self.stride, 1)
        integer("block", self.block, 1)
        if self.block % self.stride:
            raise SettingError(
                f"block: found {self.block}, expected a multiple of the stride of {self.stride}"
            )

    @property
    def cannot_draft(self) -> str:
        return "its steps select no tokens to read, and its prompts are read in a way of their own"

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """The blocks of queries start .. stop-1: (first, last, whether it chooses). The first block
        and a block's own are always read.
        """
        first = start
        while first < stop:
            local = first // self.block * self.block
            last = min(stop, local + self.block)
            yield first, last, self.threshold < 1 and local >= 2 * self.block
            first = last

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Every layer may live in host memory; a prompt reads it whole to choose."""
        return Needs(
            offload=plan.each_layer,
            whole_layer=True,
            own_prompts=True,
            cuda_graph=True,
            sliding=True,
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
        return stop if any(chooses for *_, chooses in self.blocks(begin, stop)) else begin

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """Logits of a chunk's groups and their softmax, keys as they are scored, and the rows of
        one K/V head's list.
        """
        groups, of_keys = chunk // self.stride + 2, capacity // self.stride + 1
        logits = 8 * config.num_heads * groups * of_keys
        scored = 8 * config.num_kv_heads * min(AT_ONCE + self.block, capacity) * config.head_dim
        return logits + scored + capacity * (2 * config.head_dim * itemsize + 8)

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """A block that a chunk or the prompt cuts chooses for itself."""
        spans: list[Span] = []
        for low, high, chooses in self.blocks(first, stop):
            whole = low % self.block == 0 and high - low == self.block
            spans.append((high, self._described if whole or not chooses else None))
        return spans

    @property
    def _described(self) -> str:
        """All that a whole block's rows depend on beside the rows before it."""
        names = "threshold", "stride", "block"
        return f"{self.name} prompt: {', '.join(f'{n}={getattr(self, n)}' for n in names)}"

    def runtime(self, setup: Setup) -> Runtime:
        return XAttentionRuntime(self, setup)


class XAttentionRuntime(Runtime):
    """Only counters outlive a chunk. past_read, past: blocks of keys before their own that query
    heads have read for blocks that choose, and those that there were, over blocks and layers.
    """

    method: XAttention

    def __init__(self, method: XAttention, setup: Setup):
        super().__init__(method, setup)
        self.past_read = self.past = 0

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Each block by its own choice; dense where nothing can be left out."""
        blocks = list(self.method.blocks(start, start + q.shape[1]))
        if self.plan.is_last(layer) or not blocks[-1][2]:
            return super().attend_prompt(layer, q, bank, start)
        k, v = bank.kv(layer)
        choosing = [block for block in blocks if block[2]]
        middle = choosing[0][0] - start
        given = self.scale, self.setup.backend, self.softmax[layer]
        parts = [prefill_dense(q[:, :middle], k, v, start, *given)] if middle else []
        keep = torch.stack([self.choose(*one, start) for one in zip(q, k)])
        whole = [last - first == BLOCK == self.method.block for first, last, _ in choosing]
        for together, run in groupby(range(len(choosing)), key=lambda n: whole[n]):
            numbers = list(run)
            first, last = choosing[numbers[0]][0], choosing[numbers[-1]][1]
            one = q[:, first - start : last - start]
            mine = keep[:, :, numbers[0] : numbers[-1] + 1]
            if together:
                mine = mine[..., : last // BLOCK]
                out, _ = attend_blocks(one, k, v, mine, first, self.scale, self.setup.backend)
                parts.append(out)
            else:
                parts += self._apart(layer, one, k, v, mine.cpu(), first)
        self.past_read += int(keep.sum())
        older = sum(first // self.method.block for first, *_ in choosing)
        self.past += keep.shape[0] * keep.shape[1] * older
        return torch.cat(parts, 1)

    def choose(self, q: torch.Tensor, k: torch.Tensor, start: int) -> torch.Tensor:
        """The blocks of keys that each block of queries that chooses reads before its own: of q [C,
        H, D] at positions from `start` on, and k [Hkv, T, D], bool [H, blocks, most blocks].
        """
        method, stop = self.method, start + len(q)
        sums = antidiagonal_sums(q, k, start, method.stride, method.block, self.scale)
        low, per = start // method.stride, method.block // method.stride
        choosing = [block for block in method.blocks(start, stop) if block[2]]
        found = torch.zeros(
            q.shape[1], len(choosing), sums.shape[2], dtype=torch.bool, device=q.device
        )
        for n, (first, _, _) in enumerate(choosing):
            own = first // method.block
            rows = slice(max(0, own * per - low), (own + 1) * per - low)
            found[:, n, :own] = taken(sums[:, rows, : own + 1].sum(1), method.threshold)
        return found

    def _apart(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: torch.Tensor,
        start: int,
    ) -> list[torch.Tensor]:
        """Blocks of queries [B, C, H, D] from position `start` on, one after the other, each head
        over what it keeps [B, H, blocks, most blocks], on the host, and its own block.
        """
        size, group, outs = self.method.block, q.shape[2] // k.shape[1], []
        for n, (first, last, _) in enumerate(self.method.blocks(start, start + q.shape[1])):
            mine = q[:, first - start : last - start]
            out, local = torch.empty_like(mine), first // size * size
            for b in range(len(q)):
                for head in range(q.shape[2]):
                    numbers = keep[b, head, n].nonzero()
                    rows = (numbers * size + torch.arange(size)).flatten().int().to(q.device)
                    one, own = slice(b, b + 1), slice(head, head + 1)
                    kv = slice(head // group, head // group + 1)
                    out[one, :, own] = prefill_by_head(
                        mine[one, :, own],
                        k[one, kv],
                        v[one, kv],
                        rows[None, None, None],
                        [(first, last, local, len(rows))],
                        first,
                        self.scale,
                        self.setup.backend,
                        self.softmax[layer],
                    )
            outs.append(out)
        return outs

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """What blocks read if they read as large a part as those so far, and the estimate, half an
        attention over the strides.
        """
        part = self.past_read / self.past if self.past else 1.0
        linear, pairs = flops.per_token * (stop - start), 0.0
        for first, last, chooses in self.method.blocks(start, stop):
            count, local = last - first, first // self.method.block * self.method.block
            past = local * (part + 0.5 / self.method.stride) if chooses else local
            pairs += count * (past + first - local + (count + 1) / 2)
        return linear, flops.layers * flops.per_pair * pairs


def antidiagonal_sums(
    q: torch.Tensor, k: torch.Tensor, start: int, stride: int, block: int, scale: float
) -> torch.Tensor:
    """What groups of `stride` queries give blocks of keys, estimated: q [C, H, D] at positions
    start .. stop-1, k [Hkv, T, D] as a bank holds it, T >= stop -> float32 [H, groups, blocks up to
    stop], each group's sum 1. The first group is that of `start`; queries and keys outside start ..
    stop-1 and 0 .. stop-1 are zeros.
    """
    stop, low = start + len(q), start // stride
    high = -(-stop // stride)  # groups
    padded = F.pad(q.float(), (0, 0, 0, 0, start - low * stride, high * stride - stop))
    rows = padded.unflatten(0, (high - low, stride)).flip(1)  # the antidiagonal: newest first
    rows = rows.permute(2, 0, 1, 3).flatten(2)  # [H, groups, stride * D]
    rows = rows.unflatten(0, (len(k), -1))
    logits = torch.empty(*rows.shape[:3], high, device=q.device)
    step = max(1, AT_ONCE // stride) * stride
    for first in range(0, high * stride, step):
        last = min(high * stride, first + step)
        keys = key_floats(k[:, first : min(last, stop)])
        keys = F.pad(keys, (0, 0, 0, last - first - keys.shape[1]))
        keys = keys.unflatten(1, (-1, stride)).flatten(2)  # [Hkv, groups, stride * D]
        logits[..., first // stride : last // stride] = rows @ keys.mT.unsqueeze(1)
    ahead = torch.arange(high, device=q.device) > torch.arange(low, high, device=q.device)[:, None]
    weights = (logits * (scale / stride)).masked_fill_(ahead, float("-inf")).softmax(-1)
    per = block // stride
    weights = F.pad(weights.flatten(0, 1), (0, -high % per))
    return weights.unflatten(-1, (-1, per)).sum(-1)


def taken(sums: torch.Tensor, threshold: float) -> torch.Tensor:
    """The older blocks that a block of queries reads: of sums [H, n + 1], its own block last, bool
    [H, n]. Its own and the first count before the others, which come by their sums until
    `threshold` of all is reached; of equal ones the older.
    """
    sums = sums.double()
    wanted = threshold * sums.sum(1, keepdim=True)
    others = sums[:, 1:-1].sort(dim=1, descending=True, stable=True)
    before = sums[:, :1] + sums[:, -1:] + others.values.cumsum(1) - others.values
    found = torch.ones(len(sums), sums.shape[1] - 1, dtype=torch.bool, device=sums.device)
    found[:, 1:].scatter_(1, others.indices, before < wanted)
    return found
