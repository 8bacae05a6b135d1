"""Inter-layer similarity: how much of layer j's attention falls on the tokens that layer i would
choose, at decode positions.

Source: the OmniKV paper's inter-layer similarity C(l, l'). One layer's weights of one position
exist at a time; of every layer only its chosen indices and their sums stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from engine.bank.base import Attends, Bank, Step
from engine.forward.decode import Decoder
from engine.methods.base import Runtime
from engine.plan.layers import tail_start
from engine.session.session import Session
from kernels.select.topk import select_topk

# a head that puts more than this on one token reads that token: without it, the head's output is
# another one
POINTED = 0.5
# weight of a diffuse head's unseen mass beside a lost read: diffuse mass is spread over tokens that
# stand for each other
DIFFUSE = 0.1

Meter = TypeVar("Meter", bound="Attends")


class SimilarityMeter:
    """Full attention that records, layer by layer of one step, the choice that each layer below
    would have made.

    mass [L, L] float64: mass[i, j] (i < j) sums over steps the share of layer j's attention to rows
    older than the tail that falls on the top-k of layer i among them. Attention is the paper's: the
    maximum over heads, made to sum to one, so that the heads that point at something count and
    diffuse ones do not drown them. heads [L, L, H]: the same share per query head, each by its own
    softmax. pointed [L] counts the heads that put more than POINTED on one such row, lost [L, L]
    those of layer j with a row that layer i did not choose.
    """

    def __init__(self, inner: Runtime, k: int, tail: int):
        config = inner.setup.config
        self.inner, self.k, self.tail, self.steps = inner, k, tail, 0
        self.layers = config.num_layers
        self.mass = torch.zeros(self.layers, self.layers, dtype=torch.float64)
        self.heads = torch.zeros(self.layers, self.layers, config.num_heads, dtype=torch.float64)
        self.lost = torch.zeros(self.layers, self.layers, dtype=torch.float64)
        self.pointed = torch.zeros(self.layers, dtype=torch.float64)
        self._chosen: list[torch.Tensor] = []

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first notes this layer's sums and its own choice."""
        n = int(step.visible[0])
        start = tail_start(n, self.tail)
        weights = softmax_rows(q[0, -1], step.bank, layer, n, self.inner.scale)
        old = weights[:, :start]
        highest = old.amax(0)
        peak, place = old.max(1) if start else (old.new_zeros(0), torch.zeros(0, dtype=torch.long))
        read = place[peak > POINTED]
        self.pointed[layer] += len(read)
        for below, rows in enumerate(self._chosen[:layer]):
            self.heads[below, layer] += (
                (old.index_select(1, rows).sum(-1) / old.sum(-1)).double().cpu()
            )
            self.mass[below, layer] += float(highest[rows].sum() / highest.sum())
            self.lost[below, layer] += int((~torch.isin(read, rows)).sum())
        self._chosen = self._chosen[:layer] + [top_rows(highest, start, self.k)]
        if layer == self.layers - 1:
            self.steps += 1
        return self.inner.attend(layer, q, step)

    def mean(self) -> torch.Tensor:
        """Mean mass over the steps seen: float64 [L, L], zero where j <= i."""
        return self.mass / max(1, self.steps)


def kept(mass: torch.Tensor, lost: torch.Tensor, pointed: torch.Tensor, heads: int) -> torch.Tensor:
    """Reads that layer j keeps when it sees layer i's choice only: float64 [L, L], 1 where nothing
    is lost.

    mass, lost [L, L] and pointed [L]: means per step; heads: query heads of a layer. The mean over
    heads of 1 for a pointed head whose token was chosen, 0 where it was not, and 1 - DIFFUSE * (1 -
    mass) for the others. Mean mass alone chose filter layers {0, 5} for the shipped model, which
    then answers 21% where {2} answers 74% at the same bytes (docs/CALIBRATION.md): many diffuse
    heads outweigh the few that carry the answer.
    """
    share = (pointed / heads).clamp(max=1.0)
    return torch.triu(1 - lost / heads - DIFFUSE * (1 - share) * (1 - mass), 1)


def logits_rows(q: torch.Tensor, bank: Bank, layer: int, n: int, scale: float) -> torch.Tensor:
    """Scaled products of one query with rows 0 .. n-1 of a layer. q [H, D] -> float32 [H, n]; K is
    read in blocks.
    """
    logits = []
    for _, k, _ in bank.blocks(layer, 0, n):
        heads = k[0].float()
        logits.append(
            torch.matmul(q.float().view(heads.shape[0], -1, q.shape[-1]), heads.transpose(1, 2))
            * scale
        )
    return torch.cat(logits, dim=-1).flatten(0, 1)


def softmax_rows(q: torch.Tensor, bank: Bank, layer: int, n: int, scale: float) -> torch.Tensor:
    """Softmax of one query over rows 0 .. n-1 of a layer. q [H, D] -> float32 [H, n]."""
    return torch.softmax(logits_rows(q, bank, layer, n, scale), dim=-1)


def top_rows(scores: torch.Tensor, stop: int, k: int) -> torch.Tensor:
    """Positions of the k largest of scores[:stop], ascending, int64, ties as the selector breaks
    them.
    """
    device = scores.device
    low, high, most = (
        torch.full((1,), size, dtype=torch.int32, device=device) for size in (0, stop, k)
    )
    index = torch.empty(1, max(1, min(k, scores.numel())), dtype=torch.int32, device=device)
    counts = torch.empty(1, dtype=torch.int32, device=device)
    select_topk(scores[None].contiguous(), low, high, most, index, counts)
    return index[0, : int(counts[0])].long()


def measure(
    session: Session, ids: Sequence[int], positions: int, k: int, tail: int
) -> SimilarityMeter:
    """`measure_with` a SimilarityMeter for the top k of the rows older than the tail."""
    return measure_with(session, ids, positions, SimilarityMeter(session.dense_runtime, k, tail))


def measure_with(session: Session, ids: Sequence[int], positions: int, meter: Meter) -> Meter:
    """Read `ids` into an empty session but for the last `positions`, then decode those with
    `meter.attend` as the attention; returns the meter.
    """
    head = len(ids) - positions
    session.prefill(ids[:head])
    decoder = Decoder(session.loaded.model, session.loaded.rotary, meter, session.query_ring)
    device = session.loaded.model.device
    with torch.inference_mode():
        for position in range(head, len(ids)):
            token = torch.tensor([[ids[position]]], device=device)
            decoder.step(
                token, torch.tensor([position], dtype=torch.int32, device=device), session.bank
            )
    return meter


def head_groups(heads: torch.Tensor, group_count: int) -> list[tuple[int, ...]]:
    """PoD's head-wise layer groups (its Algorithm 1): per query head, consecutive layers whose
    attention is most alike.

    heads: float64 [L, L, H] mean mass; group_count: how many groups a head's layers fall into.
    Returns per head a tuple of the first layers of its groups. Consecutive layers are merged
    greedily, the pair with the largest mass first, until the count is reached.
    """
    layers, _, count = heads.shape
    found = []
    for h in range(count):
        likeness = [(float(heads[i, i + 1, h]), -i) for i in range(layers - 1)]
        merged = {-i for _, i in sorted(likeness, reverse=True)[: max(0, layers - group_count)]}
        found.append(tuple(i for i in range(layers) if i == 0 or i - 1 not in merged))
    return found
