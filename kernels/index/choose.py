"""What queries choose by an index of K, in place of K: logits of the tokens by some channels of K
or by codes, one score of a K/V head's queries, and the largest. One call of C++ on a CPU, else
torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.index.by_torch import channels_by_torch, codes_by_torch
from kernels.index.indexes import REDUCE, Channels, Codes, Ends, Index
from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

CODES = {torch.uint8: 1, torch.int32: 4}  # bytes


class Choice(ctypes.Structure):
    """`Choice` of choose.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "channels", "index", "centroids")),
        *(
            (name, ctypes.c_long)
            for name in ("index_head", "index_row", "centroid_head", "centroid_part")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "scores", "weights", "stop", "room", "out", "counts")
        ),
        *((name, ctypes.c_long) for name in ("logits_row", "scores_row")),
        *((name, ctypes.c_int) for name in ("heads", "group", "dim", "terms", "sums")),
        *((name, ctypes.c_int) for name in ("first", "tokens", "newest", "most")),
        *((name, ctypes.c_int) for name in ("q_kind", "index_kind", "centroid_kind")),
        *((name, ctypes.c_int) for name in ("reduce", "threads")),
        ("scale", ctypes.c_float),
    ]


def choose_by_channels(
    index: Channels,
    q: torch.Tensor,
    lengths: Sequence[int],
    ends: Ends,
    newest: int = 0,
    backend: str = "auto",
) -> None:
    """Choose by channels in which queries are largest (SparQ, Ribar et al. 2024, Algorithm 1, steps
    1 and 2) or by fixed ones (Double Sparsity, Yang et al. 2024, section 3).

    q [B, H, D] floats; lengths: tokens of each sequence; newest: tokens that `weights` count beside
    the choice. Mutates what an index leaves, and ends.counts. Raises ValueError for an unknown
    backend.
    """
    fixed = index.reduce == "none" and index.channels is not None and index.weights is None
    assert index.logits is not None or fixed
    if choose(backend, q, lambda: _fits(index, q, index.rows.dtype in FLOATS)) == "native":
        _channels_natively(index, q, lengths, ends, newest)
    else:
        channels_by_torch(index, q, lengths, ends, newest, backend)


def choose_by_codes(
    index: Codes,
    q: torch.Tensor,
    stops: Sequence[int],
    ends: Ends,
    known: int | None = None,
    backend: str = "auto",
) -> None:
    """Choose by codes of a product quantiser (PQCache, Zhang et al. 2025), whose weights rank, or
    by clusters (ClusterKV, Liu et al. 2025).

    q [B, H, D] floats; stops: of each sequence the tokens first .. stop-1 are ranked; known: codes
    are below it, None: below C. Mutates what an index leaves, and ends.counts. Raises ValueError
    for an unknown backend.
    """
    assert index.reduce != "none" and (index.logits is not None or index.codes.shape[2] == 1)
    kinds = index.codes.dtype in CODES and index.centroids.dtype in FLOATS
    count = index.centroids.shape[3] if known is None else known
    if choose(backend, q, lambda: _fits(index, q, kinds)) == "native":
        _codes_natively(index, q, stops, ends, count)
    else:
        codes_by_torch(index, q, stops, ends, count, backend)


BINDING = Binding("the choice by an index", omnikv_sizeof_choice=Choice)


def _fits(index: Index, q: torch.Tensor, known: bool) -> bool:
    """Whether the C++ kernel runs here and takes these."""
    whole = index.chosen.is_contiguous() and index.scores.stride(1) == 1
    return known and q.dtype in FLOATS and whole and BINDING.usable()


def _at(t: torch.Tensor | None, b: int, rows: int = 1) -> int | None:
    """Where a tensor's rows of sequence b lie, `rows` of them to a sequence."""
    return None if t is None else t.data_ptr() + b * rows * t.stride(0) * t.element_size()


def _call(index: Index, q: torch.Tensor, held: torch.Tensor, b: int) -> Choice:
    """What both kernels are told of sequence b in every step. held: K by channel, or codes."""
    (batch, queries, dim), size = q.shape, held.element_size()
    assert held.stride(3) == 1
    return Choice(
        index=_at(held, b),
        index_head=held.stride(1) * size,
        index_row=held.stride(2) * size,
        logits=_at(index.logits, b),
        logits_row=0 if index.logits is None else index.logits.stride(1),
        scores=_at(index.scores, b, len(index.scores) // batch),
        scores_row=index.scores.stride(0),
        out=_at(index.chosen, b, len(index.scores) // batch),
        most=index.chosen.shape[1],
        heads=held.shape[1],
        group=queries // held.shape[1],
        dim=dim,
        terms=held.shape[2],
        reduce=REDUCE[index.reduce],
        scale=index.scale,
    )


def _told(
    call: Choice,
    index: Index,
    q: torch.Tensor,
    b: int,
    tokens: int,
    held: torch.Tensor,
    ends: Ends,
) -> Choice:
    """A sequence's call with what is this step's."""
    assert tokens <= min(held.shape[3], index.scores.shape[1])
    first = b * (len(ends.stop) // len(q)) * 4  # bytes
    call.q, call.q_kind, call.tokens = _at(q, b), FLOATS[q.dtype], tokens
    call.stop, call.room = ends.stop.data_ptr() + first, ends.room.data_ptr() + first
    call.counts, call.threads = ends.counts.data_ptr() + first, torch.get_num_threads()
    return call


def told_channels(index: Channels, q: torch.Tensor, b: int) -> Choice:
    """What C++ is told of sequence b in every step. q [B, H, D]."""
    if b == len(index.calls):
        call = _call(index, q, index.rows, b)
        call.index_kind, call.weights = FLOATS[index.rows.dtype], _at(index.weights, b)
        if index.channels is None:
            call.terms = index.r
        else:
            call.channels = index.channels.data_ptr()
        index.calls.append(call)
    return index.calls[b]


def told_codes(index: Codes, q: torch.Tensor, b: int) -> Choice:
    """What C++ is told of sequence b in every step. q [B, H, D]."""
    if b == len(index.calls):
        centroids, first = index.centroids, min(index.first, index.scores.shape[1])
        assert centroids.stride(3) == centroids.shape[4] and centroids.stride(4) == 1
        call, size = _call(index, q, index.codes, b), centroids.element_size()
        call.first, call.centroids = first, _at(centroids, b)
        call.centroid_head, call.centroid_part = (size * s for s in centroids.stride()[1:3])
        call.index_kind, call.centroid_kind = CODES[index.codes.dtype], FLOATS[centroids.dtype]
        index.calls.append(call)
    return index.calls[b]


def _channels_natively(
    index: Channels, q: torch.Tensor, lengths: Sequence[int], ends: Ends, newest: int
) -> None:
    q = q.contiguous()
    for b, n in enumerate(lengths):
        call = _told(told_channels(index, q, b), index, q, b, n, index.rows, ends)
        call.newest = newest
        check(loaded().omnikv_choose_by_channels(ctypes.byref(call)), "a choice by channels")


def _codes_natively(
    index: Codes, q: torch.Tensor, stops: Sequence[int], ends: Ends, known: int
) -> None:
    q = q.contiguous()
    for b, n in enumerate(stops):
        call = _told(told_codes(index, q, b), index, q, b, n, index.codes, ends)
        call.sums = known
        check(loaded().omnikv_choose_by_codes(ctypes.byref(call)), "a choice by codes")


def _tried(what: str, run: Callable[..., None], choices: int) -> Iterator[Case]:
    """Compare what `run` leaves of 150 tokens and 6 query heads, natively and by torch."""
    found = []
    for native in (True, False):
        scores, logits = torch.zeros(choices, 150), torch.zeros(1, 6, 150)
        chosen = torch.zeros(choices, 32, dtype=torch.int32)
        ends = Ends(*(torch.full((choices,), n, dtype=torch.int32) for n in (130, 30, 0)))
        run(scores, chosen, ends, logits, native)
        found.append((scores.nan_to_num(posinf=9), logits, chosen, ends.counts))
    for name, *both in zip(("scores", "logits", "choice", "counts"), *found):
        yield f"{what}: its {name}", *both, both[0].dtype


@BINDING.self_test
def _choices() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    keys, q = (torch.randn(1, *size, generator=generator) for size in ((2, 32, 150), (6, 32)))
    for dtype in FLOATS:
        run = partial(_by_largest, q, keys.to(dtype))
        yield from _tried(f"a choice by the largest channels of {dtype}", run, 2)
        run = partial(_by_labels, q, keys.to(dtype)[:, :, :9])
        yield from _tried(f"a choice by channels of {dtype}", run, 6)
    for kind, parts in ((torch.uint8, 4), (torch.int32, 1)):
        codes = torch.randint(40, (1, 2, parts, 150), generator=generator).to(kind)
        centroids = torch.randn(1, 2, parts, 40, 32 // parts, generator=generator)
        run = partial(_by_codes, q, codes, centroids)
        yield from _tried(f"a choice by codes of {kind}", run, 2)


def _by_largest(
    q: torch.Tensor,
    rows: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    ends: Ends,
    logits: torch.Tensor,
    native: bool,
) -> None:
    weights = torch.zeros(1, 6)
    index = Channels(scores, chosen, "sum", 0.2, logits, rows=rows, r=9, weights=weights)
    if native:
        _channels_natively(index, q, [150], ends, 20)
    else:
        channels_by_torch(index, q, [150], ends, 20, "reference")
    logits[0, :, 0] = weights


def _by_labels(
    q: torch.Tensor,
    rows: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    ends: Ends,
    logits: torch.Tensor,
    native: bool,
) -> None:
    index = Channels(scores, chosen, "none", rows=rows, channels=torch.arange(18).view(2, 9) + 5)
    if native:
        _channels_natively(index, q, [150], ends, 0)
    else:
        channels_by_torch(index, q, [150], ends, 0, "reference")


def _by_codes(
    q: torch.Tensor,
    codes: torch.Tensor,
    centroids: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    ends: Ends,
    logits: torch.Tensor,
    native: bool,
) -> None:
    held, reduce = (logits, "sum") if codes.shape[2] > 1 else (None, "max")
    index = Codes(scores, chosen, reduce, 0.2, held, codes=codes, centroids=centroids, first=4)
    if native:
        _codes_natively(index, q, [150], ends, 40)
    else:
        codes_by_torch(index, q, [150], ends, 40, "reference")
    logits.zero_()
