"""Attention to rows that lie on several ranks, each of its own tokens (ContextShare of
engine/model/config/share.py): what a rank's own rows bring, and how the ranks' parts are merged.

A part is (out, log-sum-exp) over a rank's rows. Every rank gets all parts and merges them in the
order of ranks, so that all ranks have the same bits. A part weighs exp(log-sum-exp) / their sum.

Selections are merged exactly. A filter layer's score of a token is known to the rank that holds it,
and to no other. A rank lists the k first of its tokens in the order of (score descending, position
ascending). Fewer than k tokens stand before a winner among all tokens, so fewer than k do among its
rank's: every winner is listed. The k first of all lists are therefore the winners, and equal scores
go to the lowest position, as candidates are ranked in the order of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from engine.bank.base import Bank, Opened, SparseRows
from engine.model.config.latent import OPENED_ROWS
from engine.model.config.share import EXCHANGED, ContextShare
from kernels.attention.cpu import attend_sequence, logit_blocks
from kernels.attention.native import attend, attends, head_most
from kernels.attention.scratch import Scratch
from kernels.launch.dispatch import choose
from kernels.launch.softmax import PLAIN, Softmax
from kernels.prefill.dense import attend_past, prefill_dense_lse
from kernels.prefill.merge import Part, merge
from kernels.rows.forms import as_bytes
from kernels.select.topk import select_topk

# gives a tensor [...] of every rank, in the order of ranks: [ranks, ...]
Gathered = Callable[[torch.Tensor], torch.Tensor]


def bare(softmax: Softmax) -> Softmax:
    """The same without sinks, which count once for all ranks (`merged`)."""
    return softmax if softmax.sinks is None else replace(softmax, sinks=None)


def merged(part: Part, gathered: Gathered, dtype: torch.dtype, softmax: Softmax = PLAIN) -> Part:
    """Attention over the rows of all ranks and the sinks of `softmax`, of each rank's part without
    them (out [.., H, D], lse [.., H]): (out in `dtype`, lse float32), the same bits on every rank.
    """
    out, lse = part
    parts = gathered(torch.cat([out.float(), lse.unsqueeze(-1)], -1))
    outs, logs = parts[..., :-1], parts[..., -1:]
    # weights that add up to 1, which exp(lse - rounded sum) would not
    whole = (outs * logs.softmax(0)).sum(0), logs.logsumexp(0).squeeze(-1)
    out, lse = softmax.sunk(*whole)
    return out.to(dtype), lse


def no_rows(q: torch.Tensor) -> Part:
    """The part of a rank of which queries [.., H, D] see no row."""
    return q.new_zeros(q.shape), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)


def natively(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str) -> bool:
    """Whether the C++ kernel attends; else torch's operators do."""
    return choose(backend, q, lambda: attends(k, v, q.shape[-1])) == "native"


def dense_part(
    q: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    n: int,
    scale: float,
    softmax: Softmax,
    scratch: Scratch,
    backend: str,
    scored: bool,
) -> tuple[Part, torch.Tensor | None]:
    """Attention of one query q [1, 1, H, D] to the first n of a rank's rows, K and V [1, Hkv, T,
    D], without sinks: ((out, lse), the scaled and capped logits float32 [H, n] if `scored`).
    Mutates scratch.
    """
    (k, v), heads, softmax = rows, q.shape[2], bare(softmax)
    if not n:
        return no_rows(q), q.new_empty(heads, 0, dtype=torch.float32) if scored else None
    k, v = k[0, :, :n], v[0, :, :n]
    if natively(q, k, v, backend):
        held = None
        if scored:
            held = scratch.logits if scratch.logits.numel() >= heads * n else torch.empty(heads * n)
        some = q[0], k, v, scale
        out, lse = attend(*some, logits=held, softmax=softmax, parts=scratch.part)
        return (out[None], lse[None]), None if held is None else held[: heads * n].view(heads, n)
    out, lse = attend_sequence(q[0], k, v, scale, scratch.blocks, softmax)
    logits = None
    if scored:
        logits = torch.empty(heads, n)
        for start, stop, block in logit_blocks(q[0], k, scale, softmax=softmax):
            logits[:, start:stop] = block.reshape(heads, -1)
    return (out[None], lse[None]), logits


def score(
    logits: torch.Tensor, lse: torch.Tensor | None, scores: torch.Tensor, native: bool
) -> None:
    """Set scores [n] to the maxima over heads of exp(logits - lse), or of logits [H, n] without
    lse. lse float32 [H] is over the rows of all ranks.
    """
    if not logits.shape[1]:
        return
    if native:
        head_most(logits, None if lse is None else lse.contiguous(), scores)
        return
    raw = logits if lse is None else (logits - lse.unsqueeze(1)).exp()
    torch.amax(raw, 0, out=scores)


def sparse_part(
    q: torch.Tensor,
    rows: SparseRows,
    scale: float,
    softmax: Softmax,
    scratch: Scratch,
    backend: str,
) -> Part:
    """Attention of one query q [1, 1, H, D] to a rank's part of a selection and its rows of the
    tail, without sinks: (out, lse). Mutates scratch.
    """
    k, v, softmax = rows.k[0], rows.v[0], bare(softmax)
    kept, tail, stop = int(rows.counts), int(rows.tail_start), int(rows.stop)
    index = rows.index[0, 0, :kept]
    if kept + stop - tail == 0:
        return no_rows(q)
    if natively(q, k, v, backend):
        some = q[0], k, v, scale, index[None] if kept else None, kept, tail
        out, lse = attend(*some, softmax=softmax, parts=scratch.part, stop=stop)
        return out[None], lse[None]
    every = torch.cat([index, torch.arange(tail, stop, dtype=index.dtype)])
    k, v = (as_bytes(side).index_select(1, every).view(side.dtype) for side in (k, v))
    out, lse = attend_sequence(q[0], k, v, scale, scratch.blocks, softmax)
    return out[None], lse[None]


def prompt_attention(
    q: torch.Tensor,
    own: Bank,
    layer: int,
    first: int,
    share: ContextShare,
    gathered: Gathered,
    scale: float,
    softmax: Softmax,
    backend: str,
    ahead: bool = True,
    opened: Opened | None = None,
) -> torch.Tensor:
    """Causal attention of a chunk or step q [1, C, H, D] at positions from `first` on, whose rows
    the ranks hold already; own: the bank of this one's. Returns [1, C, H, D] in q.dtype. ahead,
    opened: as in attend_stream (engine/bank/host/streamed_attention.py).

    Queries at positions that a rank holds see its rows up to their own; between them lie queries
    that see as many as the first of them. A rank so computes its part of the chunk's square too.
    EXCHANGED queries at a time bound what is exchanged. An offloaded layer's rows come over once.
    """
    given, found = (share, scale, bare(softmax), backend), []
    streams = opened is not None or own.on_host(layer)
    whole = _streamed_part(q, own, layer, first, *given, ahead, opened) if streams else None
    for begin in range(0, q.shape[1], EXCHANGED):
        some = slice(begin, begin + EXCHANGED)
        if whole is None:
            part = _prompt_part(q[:, some], own.kv(layer), first + begin, *given)
        else:
            part = whole[0][:, some], whole[1][:, some]
        found.append(merged(part, gathered, q.dtype, softmax)[0])
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _streamed_part(
    q: torch.Tensor,
    own: Bank,
    layer: int,
    first: int,
    share: ContextShare,
    scale: float,
    softmax: Softmax,
    backend: str,
    ahead: bool,
    opened: Opened | None,
) -> Part:
    """What a rank's rows bring to queries q [1, C, H, D] at positions from `first` on, block by
    block; the newest rows from where they are.
    """
    begin, stop = share.count(first), share.count(first + q.shape[1])
    size, so_far = None if opened is None else OPENED_ROWS, None
    for _, k, v in own.blocks(layer, 0, begin, size, ahead):
        k, v = (k, v) if opened is None else opened(k)
        so_far = attend_past(q, k, v, scale, so_far, softmax, backend)
    if begin < stop:
        k, v = own.newest_rows(layer, begin, stop)
        k, v = (k, v) if opened is None else opened(k)
        newest = _prompt_part(q, (k, v), first, share, scale, softmax, backend, begin)
        so_far = newest if so_far is None else merge([so_far, newest], torch.float32)
    return so_far or no_rows(q)


def _prompt_part(
    q: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    first: int,
    share: ContextShare,
    scale: float,
    softmax: Softmax,
    backend: str,
    begin: int = 0,
) -> Part:
    """What a rank's rows from `begin` on, K and V [1, Hkv, T, D], bring to queries q [1, C, H, D]
    at positions from `first` on.
    """
    outs, logs = [], []
    for start, stop, held in share.spans(first, first + q.shape[1]):
        some, seen = q[:, start - first : stop - first], share.count(start) - begin
        if held:
            part = prefill_dense_lse(some, *rows, seen, scale, softmax, backend)
        else:
            k, v = (side[:, :, :seen] for side in rows)
            own = attend_past(some, k, v, scale, None, softmax, backend) if seen else None
            part = own or no_rows(some)
        outs.append(part[0].float())
        logs.append(part[1])
    return torch.cat(outs, 1), torch.cat(logs, 1)


def own_logits(
    q: torch.Tensor, blocks: Iterable[torch.Tensor], scale: float, softmax: Softmax
) -> torch.Tensor:
    """The scaled and capped logits of one query q [1, H, D] on a rank's rows, float32 [H, n];
    blocks: their K [1, Hkv, n, D], in order.
    """
    found = [torch.empty(q.shape[1], 0)]
    for k in blocks:
        for _, _, block in logit_blocks(q, k[0], scale, softmax=softmax):
            found.append(block.reshape(q.shape[1], -1).clone())
    return torch.cat(found, 1)


def score_by_window(
    q: torch.Tensor,
    blocks: Callable[[], Iterable[torch.Tensor]],
    seen: torch.Tensor,
    alpha: torch.Tensor,
    gathered: Gathered,
    scale: float,
    softmax: Softmax,
    kind: str,
    scores: torch.Tensor,
) -> None:
    """Set scores [n] of a rank's rows as kernels.select.window_scores.window_scores does those of
    all: by the newest queries q [W, H, D], each rotated to its position. blocks: gives K as in
    `own_logits`, and is asked twice; seen int64 [W]: how many of the rank's rows each query sees.
    """
    lse = None
    if kind == "softmax":
        parts = [torch.full(q.shape[:2], float("-inf"))]
        parts += [part.logsumexp(-1) for _, part in _seen_logits(q, blocks(), seen, scale, softmax)]
        lse = gathered(torch.stack(parts).logsumexp(0)).logsumexp(0)
        lse = lse if softmax.sinks is None else torch.logaddexp(lse, softmax.sinks)
    for first, part in _seen_logits(q, blocks(), seen, scale, softmax):
        most = (part if lse is None else (part - lse.unsqueeze(-1)).exp()).amax(1)
        # a row that a query cannot see adds nothing to the sum
        most = most.masked_fill(torch.isinf(most), 0.0) if lse is None else most
        scores[first : first + most.shape[1]] = (alpha.view(-1, 1) * most).sum(0)


def _seen_logits(
    q: torch.Tensor,
    blocks: Iterable[torch.Tensor],
    seen: torch.Tensor,
    scale: float,
    softmax: Softmax,
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, logits [W, H, n], -inf of rows that a query does not see) of each block."""
    at = 0
    for k in blocks:
        for start, stop, block in logit_blocks(q, k[0], scale, softmax=softmax):
            logits = block.transpose(0, 1).reshape(*q.shape[:2], stop - start)
            rows = torch.arange(at + start, at + stop)
            yield at + start, logits.masked_fill(rows >= seen.view(-1, 1, 1), float("-inf"))
        at += k.shape[2]


def kept_mass(
    q: torch.Tensor,
    blocks: Iterable[torch.Tensor],
    kept: torch.Tensor,
    gathered: Gathered,
    scale: float,
    softmax: Softmax,
) -> torch.Tensor:
    """The share of one query's attention that falls on some rows, of that to all ranks' rows:
    float32 [H]. q [1, H, D]; blocks: K [1, Hkv, n, D] of a rank's rows, in their order; kept: int64
    [m], those of its rows that count.
    """
    logits = own_logits(q, blocks, scale, softmax)
    both = torch.stack([logits.logsumexp(1), logits[:, kept].logsumexp(1)])
    every, some = gathered(both).logsumexp(0)
    return (some - every).exp()


def candidates(scores: torch.Tensor, rows: torch.Tensor, share: ContextShare) -> torch.Tensor:
    """A rank's list as one message, int32 [2, K]: the positions of its chosen rows int32 [K], -1
    where there is none, and the bits of their scores [T] float32.
    """
    there = rows >= 0
    safe = torch.where(there, rows, 0)
    positions = torch.where(there, share.positions(safe), -1)
    return torch.stack((positions, scores[safe.long()].view(torch.int32)))


def winners(
    lists: torch.Tensor, k: torch.Tensor, index: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Write the k first of all ranks' lists [ranks, 2, K] to index int32 [1, K], ascending and then
    -1, and how many they are to counts int32 [1]; k int32 [1]. Returns their scores float32.
    """
    positions, scores = lists[:, 0].flatten(), lists[:, 1].flatten()
    there = positions >= 0
    positions, order = positions[there].sort()
    ranked = scores[there][order].view(torch.float32)
    lo, hi = torch.zeros_like(counts), torch.full_like(counts, len(ranked))
    chosen = torch.empty_like(index)
    select_topk(ranked[None], lo, hi, k, chosen, counts)
    places = chosen[0, : int(counts)].long()
    index.fill_(-1)
    index[0, : len(places)] = positions[places]
    return ranked[places]
