"""PoD without its training: blocks of similar layers share, per K/V head, the attention logits of
distant tokens.

Source: "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity"
(PoD), Eq. 3-4 and Algorithm 1. Proximal tokens (the first `first` and the newest `recent` of every
query; 16 and 4080 published) are attended by the layer's own queries and K. For the distant tokens
between them, the logits of the block's lowest layer serve, with the layer's own V; the two parts
are merged by the exact gate g = sum exp(proximal) / sum exp(all). Distant K of the layers above a
block's lowest are never read. Published models are trained so; this one is measured without, hence
the name. `python -m tools.calibrate.pod_groups` finds the layers of a block. Prompts are read the
same way, chunk by chunk, and the result does not depend on the chunks. With `forget` those K are
not held either (engine/bank/near/near_bank.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import boolean, fraction, integer, is_integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import NearKeys, Needs
from engine.plan.placement import ring_size
from kernels.prefill.merge import merge
from kernels.rows.forms import floats, key_floats

# tiles of logits in attend_span: of 8 heads 16 MB
QUERIES, ROWS = 256, 2048

Part = tuple[torch.Tensor, torch.Tensor]  # (out [.., D], log-sum-exp [..]), float32
HeadKeys = Callable[[int, int, int, int], list[tuple[int, torch.Tensor]]]  # Bank.head_keys


@dataclass(frozen=True)
class PodUntrained(Method):
    """blocks: for every K/V head the first layers of its blocks, ascending from 0, as ((0, 2, 7),
    (0, 3), ...), or one such tuple for all heads; None: every layer alone, which is full attention.
    first, recent: proximal tokens. skip: tau of the paper; where the gate would be at least this,
    the distant part is not read (it is known from the block's lowest layer); 1.0 never skips. Over
    a group nothing is reduced: query heads share with the same query head of the lower layer, and a
    K/V head's blocks hold for its whole group. forget: hold no distant K that no layer reads; going
    back further than a ring of the newest does, and another method, read the tokens again.
    """

    blocks: tuple | None = None
    first: int = 16
    recent: int = 4080
    skip: float = 1.0
    forget: bool = True

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", checked_blocks(self.blocks))
        integer("first", self.first, 0)
        integer("recent", self.recent, 1)
        fraction("skip", self.skip)
        boolean("forget", self.forget)

    @property
    def cannot_draft(self) -> str:
        freed = self.forget and self.blocks is not None
        return "it frees keys that full attention reads (forget=False keeps them)" if freed else ""

    @property
    def name(self) -> str:
        return "pod_untrained"

    def lowest(self, config: ModelConfig) -> list[tuple[int, ...]]:
        """Per layer, the layer whose distant logits each K/V head uses (the layer itself: not
        shared).
        """
        return lowest_layers(self.blocks, config)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """SPARSE where any head shares its logits: that layer does not read all of K."""
        sharing = (i for i, lows in enumerate(self.lowest(config)) if min(lows) < i)
        return single_layer_groups(config.num_layers, sharing)

    def key_rows(self, config: ModelConfig, n: int) -> list[list[int]]:
        """Tokens with a K that is needed at n tokens, one count per layer and K/V head: all in a
        block's lowest layer, else the proximal ones.
        """
        return [
            [n if low == layer else min(n, self.first + self.recent) for low in lows]
            for layer, lows in enumerate(self.lowest(config))
        ]

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return Needs(own_prompts=self.blocks is not None, near=self.near_keys(config, capacity))

    def near_keys(self, config: ModelConfig, capacity: int) -> NearKeys | None:
        """The K/V heads of each layer whose distant K no layer reads; None where that frees nothing
        in a session of `capacity` tokens.
        """
        if not self.forget or self.first + ring_size(self.recent, 0, capacity) >= capacity:
            return None
        heads: list[set[int]] = [set(range(config.num_kv_heads)) for _ in range(config.num_layers)]
        for layer, lows in enumerate(self.lowest(config)):
            # rows that several layers read are whole where one of them reads them so
            heads[config.rows_of(layer)] -= {h for h, low in enumerate(lows) if low == layer}
            if config.rows_of(layer) != layer:
                heads[layer] = set()
        near = tuple(tuple(sorted(found)) for found in heads)
        return NearKeys(self.first, self.recent, near) if any(near) else None

    def runtime(self, setup: Setup) -> Runtime:
        return PodRuntime(self, setup)


class PodRuntime(Runtime):
    """Queries of the lower layers travel up within a chunk or step; nothing outlives it. gates,
    skipped: (query, head) pairs of sharing layers that tau judged, and those skipped. No CUDA
    graph: the host knows where spans end and which heads skip.
    """

    method: PodUntrained

    def __init__(self, method: PodUntrained, setup: Setup):
        super().__init__(method, setup)
        self.lowest = method.lowest(setup.config)
        # layers that others share
        self.used = {low for layer, lows in enumerate(self.lowest) for low in lows if low < layer}
        # layer -> (queries, lse of their distant parts) of the chunk or step under way
        self.shared: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.gates = self.skipped = 0

    def commit(self, count: int) -> None:
        self.shared = {}

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + q.shape[1], device=q.device).expand(q.shape[0], -1)
        return self._attend(
            layer,
            q,
            bank,
            positions,
            start + q.shape[1],
            lambda: super(PodRuntime, self).attend_prompt(layer, q, bank, start),
        )

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        step.bank.landed(layer, step)
        return self._attend(
            layer,
            q,
            step.bank,
            step.positions,
            int(step.visible.max()),
            lambda: self.attend_dense(layer, q, step),
        )

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        bank: Bank,
        positions: torch.Tensor,
        stop: int,
        dense: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """dense() where nothing is distant or shared by this layer, else head by head, each from
        its block's lowest layer.
        """
        lows, judged = self.lowest[layer], self.method.skip < 1.0 and layer in self.used
        if stop <= self.method.first + self.method.recent:
            return dense()
        if min(lows) == layer and not judged:
            self.shared[layer] = q, None
            return dense()
        out, far = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        keys, values = self._rows(bank, layer)
        group = q.shape[2] // len(lows)
        for b in range(len(q)):
            *near_spans, distant = proximal_spans(
                positions[b], self.method.first, self.method.recent
            )
            for head, low in enumerate(lows):
                heads, v = slice(head * group, (head + 1) * group), values[b, head : head + 1]
                asked, known = q[b, :, heads], None
                near, near_lse = merge(
                    [
                        part
                        for span in near_spans
                        for part in self._span(asked, keys, v, (b, layer, head), span)
                    ],
                    torch.float32,
                )
                if low < layer:
                    lower, lse = self.shared[low]
                    asked = lower[b, -q.shape[1] :, heads]
                    known = None if lse is None else lse[b, -q.shape[1] :, heads]
                skip = self._skip(near_lse, known)
                if skip is None or not skip.all():
                    given = (bank.head_keys, low) if low < layer else (keys, layer)
                    (part,) = self._span(asked, given[0], v, (b, given[1], head), distant)
                    far[b, :, heads] = part[1]
                    mixed = merge([(near, near_lse), part], torch.float32)[0]
                    near = mixed if skip is None else torch.where(skip.unsqueeze(-1), near, mixed)
                out[b, :, heads] = near
        if layer in self.used:
            self.shared[layer] = q, far if judged else None
        return out

    def _rows(self, bank: Bank, layer: int) -> tuple[HeadKeys, torch.Tensor]:
        """A layer's K, by (layer, head, first position, one past the last), and V."""
        if not bank.on_host(layer):
            return bank.head_keys, bank.values(layer)
        # such views hold until a lower layer's K is asked for
        k, v = (rows.clone() for rows in bank.kv(layer))
        return lambda _, head, first, stop: [(first, k[:, head : head + 1, first:stop])], v

    def _span(
        self,
        q: torch.Tensor,
        keys: HeadKeys,
        v: torch.Tensor,
        whose: tuple[int, int, int],
        span: tuple[torch.Tensor, torch.Tensor],
    ) -> list[Part]:
        """`attend_span` of q [C, G, D] in the parts in which K of `whose` (sequence, layer, K/V
        head) lies; v [1, T, D].
        """
        (b, layer, head), (low, high) = whose, span
        found = []
        for at, k in keys(layer, head, int(low.min()), int(high.max())):
            count = k.shape[2]
            seen = (low - at).clamp(0, count), (high - at).clamp(0, count)
            found.append(attend_span(q, k[b], v[:, at : at + count], *seen, self.scale))
        return found

    def _skip(self, near: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor | None:
        """Which (query, head) pairs skip their distant part: bool [C, G]; None where tau has
        nothing to judge.
        """
        if known is None:
            return None
        skip = torch.sigmoid(near - known) >= self.method.skip
        self.gates += int((known > float("-inf")).sum())
        self.skipped += int((skip & (known > float("-inf"))).sum())
        return skip

    def rows_read(self, n: int) -> list[int]:
        """Mean over K and V and over the heads: every V is read, and of K what `key_rows`
        counts.
        """
        return [
            -(-(sum(keys) + len(keys) * n) // (2 * len(keys)))
            for keys in self.method.key_rows(self.setup.config, n)
        ]


def proximal_spans(
    positions: torch.Tensor, first: int, recent: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(low, high) int64 [C] of every query's first tokens, newest tokens, and of the distant ones
    between them.
    """
    edge = (positions + 1 - recent).clamp(min=first)
    none = torch.zeros_like(positions)
    return (none, (positions + 1).clamp(max=first)), (edge, positions + 1), (none + first, edge)


def lowest_layers(blocks: tuple | None, config: ModelConfig) -> list[tuple[int, ...]]:
    """Per layer of a model, the lowest layer of the block that each K/V head is in, by blocks as
    `checked_blocks` returns them (None: every layer alone). Raises SettingError for those of
    another model.
    """
    layers, heads = config.num_layers, config.num_kv_heads
    if blocks is None:
        return [(layer,) * heads for layer in range(layers)]
    by_head = blocks if isinstance(blocks[0], tuple) else (blocks,) * heads
    if len(by_head) != heads or max(map(max, by_head)) >= layers:
        raise SettingError(
            f"blocks: found {len(by_head)} heads and layers up to {max(map(max, by_head))}, "
            f"expected {heads} K/V heads and layers below {layers} (this model); group it "
            "again: python -m tools.calibrate.pod_groups"
        )
    return [
        tuple(max(low for low in firsts if low <= layer) for firsts in by_head)
        for layer in range(layers)
    ]


def checked_blocks(value: Any) -> tuple:
    """The blocks as a tuple, or a tuple of tuples; raises SettingError."""
    found: tuple = (
        tuple(tuple(x) if isinstance(x, list) else x for x in value)
        if isinstance(value, (tuple, list))
        else ()
    )
    nested = bool(found) and all(isinstance(firsts, tuple) for firsts in found)
    for firsts in found if nested else (found,):
        whole_numbers = all(map(is_integer, firsts))
        if (
            not firsts
            or not whole_numbers
            or firsts[0] != 0
            or any(a >= b for a, b in zip(firsts, firsts[1:]))
        ):
            raise SettingError(
                f"blocks: found {str(value)[:60]}, expected for every K/V head the first layers of "
                "its blocks, ascending from 0, such as ((0, 2, 5), (0, 4))"
            )
    return found


def attend_span(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
) -> Part:
    """Attention of query i to tokens low[i] .. high[i]-1 (none where high <= low): (out [C, H, D],
    lse [C, H]), float32.

    q [C, H, D]; k, v [Hkv, T, D] views; low, high int64 [C], or [Hkv, 1, C] where heads differ. A
    query that sees nothing gives zeros and -inf. Only K and V that some query of a tile sees are
    read.
    """
    out, lse = (
        torch.zeros(q.shape, device=q.device),
        torch.full(q.shape[:2], float("-inf"), device=q.device),
    )
    bounds = [
        (at, int(low[..., at : at + QUERIES].min()), int(high[..., at : at + QUERIES].max()))
        for at in range(0, len(q), QUERIES)
    ]
    for at, first, last in bounds:
        part = slice(at, at + QUERIES)
        for row in range(first, last, ROWS):
            rows = slice(row, min(last, row + ROWS))
            seen = low[..., part] - row, high[..., part] - row
            tile = _tile(q[part], k[:, rows], v[:, rows], *seen, scale)
            out[part], lse[part] = merge([(out[part], lse[part]), tile], torch.float32)
    return out, lse


def _tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
) -> Part:
    """Attention of one tile: bounds count from the tile's first row."""
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    # [Hkv, G, C, D]
    folded = q.float().view(queries, kv_heads, -1, dim).permute(1, 2, 0, 3)
    logits = torch.matmul(folded, key_floats(k).transpose(1, 2).unsqueeze(1)) * scale
    at = torch.arange(rows, device=q.device)
    logits.masked_fill_((at < low.unsqueeze(-1)) | (at >= high.unsqueeze(-1)), float("-inf"))
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = torch.matmul(weights, floats(v).unsqueeze(1))
    return out.permute(2, 0, 1, 3).reshape(queries, heads, dim), lse.permute(2, 0, 1).reshape(
        queries, heads
    )
