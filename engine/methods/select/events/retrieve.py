"""Which events a step reads: those that its query likes best, and their neighbours in the text,
from a queue with its own room. Pure functions; no model, no bank.

Source: EM-LLM (Fountas et al., ICLR 2025), section 3.4: a similarity buffer, and a contiguity
buffer into which the neighbours of retrieved events come as older ones leave.
"""

from __future__ import annotations

import torch

NEVER = 1 << 31  # place in a queue of what does not enter it


def neighbours(rank: torch.Tensor, taken: torch.Tensor, reach: int) -> torch.Tensor:
    """In which order events enter the queue, int64 [M], NEVER where they do not: neighbours of the
    best event first, nearer ones first, those before it first. rank int64 [M] counts for events
    that are `taken`, bool [M]; reach: events to either side.
    """
    order = torch.full_like(rank, NEVER)
    for number in range(2 * reach):
        far, after = number // 2 + 1, number % 2
        if far >= len(rank):
            break
        here, there = (slice(far, None), slice(None, -far))[:: 1 if after else -1]
        entered = torch.where(taken[there], rank[there] * 2 * reach + number, NEVER)
        order[here] = torch.minimum(order[here], entered)
    return order


def retrieved(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    similar: int,
    near: int,
    reach: int,
    queue: torch.Tensor,
    turn: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (which events are read, bool [M]; the queue after the step, int64 [M]).

    scores float32 [M]: how the query likes each event; sizes int32 [M]: tokens, 0 for what may not
    be read; similar, near: tokens for the best events, as long as they fit, and for the queue.
    queue: when each event entered it, 0 where it is not there; turn: steps before this one. What
    entered last stays, as long as it fits; what the query takes itself leaves.
    """
    there = sizes > 0
    ranked = scores.masked_fill(~there, float("-inf")).argsort(descending=True, stable=True)
    rank = torch.empty_like(ranked).scatter_(
        0, ranked, torch.arange(len(ranked), device=ranked.device)
    )
    fits = sizes[ranked].cumsum(0) <= similar
    taken = torch.zeros_like(there).scatter_(0, ranked, fits) & there
    order = neighbours(rank, taken, reach)
    stamp = torch.where(order < NEVER, ((turn + 1) << 32) - order, queue)
    stamp = stamp.masked_fill(taken | ~there, 0)
    line = stamp.argsort(descending=True, stable=True)
    stays = (sizes[line].cumsum(0) <= near) & (stamp[line] > 0)
    waits = torch.zeros_like(there).scatter_(0, line, stays)
    return taken | waits, stamp.masked_fill(~waits, 0)


def listed(starts: torch.Tensor, sizes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Write the tokens of spans into index int32 [K], ascending, -1 behind them; returns how many
    they are, int32 []. starts, sizes int32 [M]: of each span its first token and its tokens, 0 for
    one that is not read.
    """
    ends = sizes.cumsum(0)
    entry = torch.arange(len(index), device=index.device)
    span = torch.searchsorted(ends, entry, right=True).clamp(max=len(ends) - 1)
    token = starts[span] + entry - (ends - sizes)[span]
    index.copy_(torch.where(entry < ends[-1], token, -1))
    return ends[-1].int()
