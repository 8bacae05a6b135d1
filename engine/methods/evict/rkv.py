"""R-KV: of an answer that repeats itself keep what its newest queries look at, less what resembles
other tokens.

Source: Cai et al., R-KV (2025), by its abstract, its project's page and its code. Score of a token
before the window: lambda * importance - (1 - lambda) * redundancy. Importance: softmax of the
largest logit of a group, over the tokens before the window; mean over the window's queries; then
the maximum over 7 neighbours. Redundancy: softmax over all tokens of the mean cosine of a key with
all others, where every token leaves out the latest that is more similar to it than `similar`.
Defaults: the code's window of 8, lambda 0.1 and a cut every 128 tokens; its budgets are 128 and up,
1,024 is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.bank.base import Step
from engine.base.checks import fraction
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.periodic import Periodic, PeriodicRuntime
from engine.methods.evict.shared.store import Part, Sequence
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from kernels.launch.softmax import Softmax
from kernels.rows.forms import key_floats
from kernels.select.column_sums import column_sums, tile_floats


@dataclass(frozen=True)
class RKV(SnapKV, Periodic):
    """importance: lambda, the weight of attention in [0, 1]; the rest is that of redundancy.
    similar: cosine above which two keys say the same. every: at least the window. gqa_reduce: "max"
    is R-KV's own; "mean" and "sum" are SnapKV's importance.
    """

    full_prompts = True

    window: int = 8
    gqa_reduce: str = "max"
    every: int = 128
    importance: float = 0.1
    similar: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("importance", self.importance, zero=True)
        fraction("similar", self.similar, zero=True)
        require_window(self.every, self.window)

    def default_budget(self) -> dict[str, int]:
        return {"tokens": 1024}

    def runtime(self, setup: Setup) -> Runtime:
        return RKVRuntime(self, setup)


def require_window(every: int, window: int) -> None:
    """Raise SettingError where a cut in an answer would look for queries of the prompt before."""
    if every < window:
        raise SettingError(
            f"every: found {every}, expected at least the window of {window} tokens, whose queries "
            "choose"
        )


class RKVRuntime(SnapRuntime, PeriodicRuntime):
    """One session's stores, cut at every prompt's end and every so many tokens of an answer."""

    method: RKV

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """Infinite in the window."""
        window, weight = min(self.method.window, sequence.length), self.method.importance
        if self.method.gqa_reduce == "max":
            assert step is not None, "R-KV cuts by its newest queries"
            q = self.newest_queries(sequence, layer, part.heads, window, step)
            given = self.scale, self.softmax[layer].cap
            weights = candidate_weights(q, part.k, *given, together=True)[:, 0]
            scores = functional.pad(self.pooled(weights), (0, window), value=float("inf"))
        else:
            scores = super().rank(sequence, layer, part, step)
        if weight == 1:
            return scores
        return weight * scores - (1 - weight) * redundancy(part.k, self.method.similar)


def candidate_weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, cap: float = 0.0, together: bool = False
) -> torch.Tensor:
    """Mean softmax weights float32 [h, G, C] that the newest queries q [W, G * h, D] give to the
    C = T - W tokens before them, of k [h, T, D]; those alone are in the softmax.

    cap: on logits, 0: none. together: a group's query heads give one weight, that of their largest
    logit.
    """
    first = k.shape[1] - len(q)

    def change(logits: torch.Tensor, queries: slice, rows: slice) -> torch.Tensor:
        """Logits of one tile [h, G, queries, rows] without the window."""
        at = torch.arange(rows.start, rows.stop, device=logits.device)
        if together:
            logits = logits.amax(1, keepdim=True).expand_as(logits)
        return logits.masked_fill(at >= first, float("-inf"))

    if first == 0:
        return q.new_zeros(len(k), q.shape[1] // len(k), 0, dtype=torch.float32)
    sums = column_sums(q, k, first, scale, change=change, softmax=Softmax(cap))
    return sums[:, :, :first] / len(q)


def redundancy(k: torch.Tensor, similar: float) -> torch.Tensor:
    """How much each of k [h, T, D] resembles the others: float32 [h, T], of sum 1.

    Costs about what attention of T queries does; no [T, T] exists, only tiles of some of its rows.
    """
    count = k.shape[1]
    floats = key_floats(k)
    # in the place of the copy: each is twice the size of 16-bit rows
    own = None if floats is k else floats
    unit = functional.normalize(floats, dim=-1, eps=1e-8, out=own)
    sums = torch.zeros(len(k), count, device=k.device)
    each = torch.arange(count, dtype=torch.int32, device=k.device)
    none = each.new_tensor(-1)
    size = max(1, tile_floats(k.device) // (len(k) * count))
    for start in range(0, count, size):
        rows = slice(start, min(count, start + size))
        cosines = torch.matmul(unit[:, rows], unit.transpose(1, 2))
        cosines.diagonal(start, 1, 2).zero_()
        # -1: none is as similar
        latest = each.where(cosines > similar, none).amax(-1)
        gone = (each == latest.unsqueeze(-1)) & (latest >= 0).unsqueeze(-1)
        sums += cosines.masked_fill_(gone, 0.0).sum(1)
    return (sums / count).softmax(-1)
