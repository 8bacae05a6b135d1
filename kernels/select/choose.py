"""What queries choose by an index of K, in place of K: logits of the tokens by some channels of K
or by codes, one score of a K/V head's queries, and the largest. One call of C++ on a CPU, else
torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.select.topk import select_topk

AT_ONCE = 4096  # tokens whose channels or codes torch's operators take at a time
CODES = {torch.uint8: 1, torch.int32: 4}  # bytes
REDUCE = {"max": 0, "mean": 1, "sum": 2, "none": 3}
TINY = 1e-30  # what sums of |q| are at least


class Lists(NamedTuple):
    """Choices of B sequences, one after the other: of each K/V head one, or of each query head.

    scores float32 [n, T]: what ranks the tokens; stop, room int32 [n]: the tokens below `stop`
    compete for `room` places; index int32 [n, K] and counts int32 [n]: as `select_topk` leaves
    them. All but scores are contiguous, whose last dim is.
    """

    scores: torch.Tensor
    stop: torch.Tensor
    room: torch.Tensor
    # hides tuple.index
    index: torch.Tensor  # type: ignore[assignment]
    counts: torch.Tensor

    def take(self, backend: str) -> None:
        """Choose by the scores, which are made."""
        first, rest = torch.zeros_like(self.stop), self[1:]
        select_topk(self.scores, first, *rest, backend=backend)


class ByChannels(NamedTuple):
    """A choice by logits of some channels of K.

    q [B, H, D] floats; by_channel [B, Hkv, rows, T] floats, last dim contiguous; lengths: tokens of
    each sequence; reduce: of REDUCE. channels int64 [Hkv, rows], contiguous: which channel each row
    of by_channel is of; None: it has all D, and those r count whose |q|, summed over a K/V head's
    queries, is largest, the lower of equal ones, and logits are divided by the root of the part of
    |q| that these have. scale: of logits. logits float32 [B, H, at least the longest] takes every
    query's logits; it may be None only under "none" and fixed channels. weights float32 [B, H],
    contiguous, or None: takes what softmax gives the choice of a K/V head and the `newest` tokens.
    """

    q: torch.Tensor
    by_channel: torch.Tensor
    lengths: Sequence[int]
    lists: Lists
    reduce: str
    channels: torch.Tensor | None = None
    r: int = 0
    scale: float = 1.0
    logits: torch.Tensor | None = None
    newest: int = 0
    weights: torch.Tensor | None = None


class ByCodes(NamedTuple):
    """A choice by logits of codes: a token's is `scale` times the sum over parts of q times the
    centroid of its code.

    q [B, H, D] floats; centroids [B, Hkv, parts, C, D / parts] floats, whose last two dims are
    contiguous; codes [B, Hkv, parts, T] uint8 or int32, below C, last dim contiguous. Tokens first
    .. stops[b]-1 of a sequence are ranked, and those before come before all others. logits float32
    [B, H, T]: their softmax over the ranked tokens is what a group's heads are reduced by, and
    what is left there is of no use; None: logits are reduced, of one part. reduce: of REDUCE but
    "none".
    """

    q: torch.Tensor
    centroids: torch.Tensor
    codes: torch.Tensor
    stops: Sequence[int]
    lists: Lists
    reduce: str
    first: int = 0
    scale: float = 1.0
    logits: torch.Tensor | None = None


def choose_by_channels(given: ByChannels, backend: str = "auto") -> None:
    """Choose by channels in which queries are largest (SparQ, Ribar et al. 2024, Algorithm 1, steps
    1 and 2) or by fixed ones (Double Sparsity, Yang et al. 2024, section 3). Mutates the lists,
    logits and weights. Raises ValueError for an unknown backend.
    """
    fixed = given.reduce == "none" and given.channels is not None and given.weights is None
    assert given.logits is not None or fixed
    known = given.by_channel.dtype in FLOATS
    if choose(backend, given.q, lambda: _fits(given.q, known, given.lists)) == "native":
        _channels_natively(given)
    else:
        _channels_by_torch(given, backend)


def choose_by_codes(given: ByCodes, backend: str = "auto") -> None:
    """Choose by codes of a product quantiser (PQCache, Zhang et al. 2025), whose weights rank, or
    by clusters (ClusterKV, Liu et al. 2025). Mutates the lists and logits. Raises ValueError for an
    unknown backend.
    """
    assert given.reduce != "none" and (given.logits is not None or given.codes.shape[2] == 1)
    known = given.codes.dtype in CODES and given.centroids.dtype in FLOATS
    if choose(backend, given.q, lambda: _fits(given.q, known, given.lists)) == "native":
        _codes_natively(given)
    else:
        _codes_by_torch(given, backend)


# ---------------------------------------------------------------- by torch's operators


def grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries [H, D] by K/V head: float32 [Hkv, G, D]."""
    return q.float().view(kv_heads, -1, q.shape[-1])


def reduced(scores: torch.Tensor, how: str) -> torch.Tensor:
    """Scores [Hkv, G, n] of query heads as the choices rank them: [choices, n]. how: of REDUCE."""
    if how == "none":
        return scores.flatten(0, 1)
    if how == "max":
        return scores.amax(1)
    return scores.mean(1) if how == "mean" else scores.sum(1)


def _of_heads(of: torch.Tensor, b: int, heads: int) -> torch.Tensor:
    """Sequence b's rows [H, T] by K/V head."""
    return of[b].view(heads, -1, of.shape[2])


def _channels_by_torch(given: ByChannels, backend: str) -> None:
    lists, heads, queries = given.lists, given.by_channel.shape[1], given.q.shape[1]
    held = lists.scores.view(len(given.q), queries, -1) if given.logits is None else given.logits
    for b, n in enumerate(given.lengths):
        asked, found = grouped(given.q[b], heads), _of_heads(held, b, heads)[:, :, :n]
        if given.channels is None:
            few, rows = _largest(asked, given.r)
        else:
            few = _at_channels(asked, given.channels)
            rows = torch.arange(few.shape[2], device=few.device).expand(heads, -1)
        _channel_logits(few * given.scale, rows, given.by_channel[b], found)
        if held is given.logits:
            own = lists.scores.view(len(given.q), -1, lists.scores.shape[1])[b, :, :n]
            own.copy_(reduced(found, given.reduce))
    lists.take(backend)
    for b, n in enumerate(given.lengths if given.weights is not None else ()):
        shares = _of_heads(held, b, heads)[:, :, :n].softmax(-1)
        own = slice(b * heads, (b + 1) * heads)
        at = lists.index[own, :n].long().unsqueeze(1).expand(-1, shares.shape[1], -1)
        counted = torch.arange(at.shape[2], device=at.device) < lists.counts[own, None, None]
        read = (shares.gather(2, at.clamp(min=0)) * counted).sum(-1)
        read += shares[:, :, max(0, n - given.newest) :].sum(-1)
        given.weights[b] = read.flatten()  # type: ignore[index]


def _largest(asked: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [Hkv, G, D] at the r channels where they are largest, by the root of their part of
    |q|, and these channels [Hkv, r], ascending.
    """
    sizes = asked.abs()
    order = sizes.sum(1).sort(dim=-1, descending=True, stable=True).indices
    channels = order[:, :r].sort(-1).values
    few = _at_channels(asked, channels)
    cover = few.abs().sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True).clamp(min=TINY)
    return few * cover.clamp(min=TINY).rsqrt(), channels


def _at_channels(asked: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Queries [Hkv, G, D] at channels [Hkv, r]: [Hkv, G, r]."""
    return asked.gather(2, channels.unsqueeze(1).expand(-1, asked.shape[1], -1))


def _channel_logits(
    few: torch.Tensor, channels: torch.Tensor, by_channel: torch.Tensor, out: torch.Tensor
) -> None:
    """out[h, g, t] = the sum over i of few[h, g, i] * by_channel[h, channels[h, i], t].

    few float32 [Hkv, G, r]; channels int64 [Hkv, r]; by_channel [Hkv, rows, >= n]; out float32
    [Hkv, G, n].
    """
    heads, dim, _ = by_channel.shape
    rows = channels + dim * torch.arange(heads, device=few.device).unsqueeze(1)
    keys, n = by_channel.flatten(0, 1), out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = keys[rows.flatten(), part].to(few.dtype).unflatten(0, rows.shape)
        out[:, :, part] = few @ some


def _codes_by_torch(given: ByCodes, backend: str) -> None:
    lists, reduce, (heads, parts) = given.lists, given.reduce, given.codes.shape[1:3]
    scores = lists.scores.view(len(given.q), heads, -1)
    scores[:, :, : given.first] = float("inf")
    for b, n in enumerate(given.stops):
        between = slice(given.first, max(given.first, n))
        asked = grouped(given.q[b], heads).unflatten(2, (parts, -1)).transpose(1, 2)
        # [Hkv, parts, G, C]
        table = asked @ given.centroids[b].to(asked.dtype).mT * given.scale
        own, some = scores[b, :, between], given.codes[b, :, :, between]
        if given.logits is None:
            table = reduced(table[:, 0], reduce)[:, None, None]
            _code_logits(table, some, own.unsqueeze(1))
        else:
            found = _of_heads(given.logits, b, heads)[:, :, between]
            _code_logits(table, some, found)
            own.copy_(reduced(found.softmax(-1), reduce))
    lists.take(backend)


def _code_logits(table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """out[h, g, t] = the sum over p of table[h, p, g, codes[h, p, t]].

    table float32 [Hkv, parts, G, C]; codes [Hkv, parts, >= n]; out float32 [Hkv, G, n].
    """
    n = out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = codes[:, :, part].long().unsqueeze(2).expand(-1, -1, table.shape[2], -1)
        out[:, :, part] = table.gather(3, some).sum(1)


# ---------------------------------------------------------------- by one call of C++


class _Choice(ctypes.Structure):
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


BINDING = Binding("the choice by an index", omnikv_sizeof_choice=_Choice)


def _fits(q: torch.Tensor, known: bool, lists: Lists) -> bool:
    """Whether the C++ kernel runs here and takes these."""
    whole = lists.index.is_contiguous() and lists.scores.stride(1) == 1
    return known and q.dtype in FLOATS and whole and BINDING.usable()


def _at(t: torch.Tensor | None, b: int, rows: int = 1) -> int | None:
    """Where a tensor's rows of sequence b lie, `rows` of them to a sequence."""
    return None if t is None else t.data_ptr() + b * rows * t.stride(0) * t.element_size()


def _call(given: ByChannels | ByCodes, index: torch.Tensor, b: int, tokens: int) -> _Choice:
    """What both kernels are told of sequence b."""
    q, lists, logits, size = given.q, given.lists, given.logits, index.element_size()
    choices, room = len(lists.scores) // len(q), lists.index.shape[1]
    assert tokens <= min(index.shape[3], lists.scores.shape[1]) and index.stride(3) == 1
    return _Choice(
        q=_at(q, b),
        index=_at(index, b),
        index_head=index.stride(1) * size,
        index_row=index.stride(2) * size,
        logits=None if logits is None else _at(logits, b),
        logits_row=0 if logits is None else logits.stride(1),
        scores=_at(lists.scores, b, choices),
        scores_row=lists.scores.stride(0),
        stop=_at(lists.stop, b, choices),
        room=_at(lists.room, b, choices),
        out=_at(lists.index, b, choices),
        counts=_at(lists.counts, b, choices),
        heads=index.shape[1],
        group=q.shape[1] // index.shape[1],
        dim=q.shape[2],
        terms=index.shape[2],
        tokens=tokens,
        most=room,
        q_kind=FLOATS[q.dtype],
        reduce=REDUCE[given.reduce],
        threads=torch.get_num_threads(),
        scale=given.scale,
    )


def _channels_natively(given: ByChannels) -> None:
    given = given._replace(q=given.q.contiguous())
    index, kind = given.by_channel, FLOATS[given.by_channel.dtype]
    for b, n in enumerate(given.lengths):
        call = _call(given, index, b, n)
        call.index_kind, call.newest, call.weights = kind, given.newest, _at(given.weights, b)
        if given.channels is None:
            call.terms = given.r
        else:
            call.channels = given.channels.data_ptr()
        check(loaded().omnikv_choose_by_channels(ctypes.byref(call)), f"channels of {index.dtype}")


def _codes_natively(given: ByCodes) -> None:
    given = given._replace(q=given.q.contiguous())
    codes, centroids, size = given.codes, given.centroids, given.centroids.element_size()
    for b, n in enumerate(given.stops):
        call = _call(given, codes, b, n)
        call.first = min(given.first, given.lists.scores.shape[1])
        call.centroids, call.sums = _at(centroids, b), centroids.shape[3]
        call.centroid_head, call.centroid_part = (size * s for s in centroids.stride()[1:3])
        call.index_kind, call.centroid_kind = CODES[codes.dtype], FLOATS[centroids.dtype]
        check(loaded().omnikv_choose_by_codes(ctypes.byref(call)), f"codes of {codes.dtype}")


def _tried(
    what: str, run: Callable[[Lists, torch.Tensor, bool], None], choices: int
) -> Iterator[Case]:
    """Compare what `run` leaves of 150 tokens and 6 query heads, natively and by torch."""
    found = []
    for native in (True, False):
        scores, logits = torch.zeros(choices, 150), torch.zeros(1, 6, 150)
        ends = (torch.full((choices,), n, dtype=torch.int32) for n in (130, 30))
        index, counts = torch.zeros(choices, 32, dtype=torch.int32), torch.zeros(choices).int()
        run(Lists(scores, *ends, index, counts), logits, native)
        found.append((scores.nan_to_num(posinf=9), logits, index, counts))
    for name, *both in zip(("scores", "logits", "index", "counts"), *found):
        yield f"{what}: {name}", *both, both[0].dtype


@BINDING.self_test
def _choices() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    keys, q = (torch.randn(1, *size, generator=generator) for size in ((2, 32, 150), (6, 32)))
    for dtype in FLOATS:
        yield from _tried(
            f"a choice by channels of {dtype}", partial(_by_largest, q, keys.to(dtype)), 2
        )
        yield from _tried(
            f"a choice by labels of {dtype}", partial(_by_labels, q, keys.to(dtype)), 6
        )
    for kind, parts in ((torch.uint8, 4), (torch.int32, 1)):
        codes = torch.randint(40, (1, 2, parts, 150), generator=generator).to(kind)
        centroids = torch.randn(1, 2, parts, 40, 32 // parts, generator=generator)
        run = partial(_by_codes, q, centroids, codes)
        yield from _tried(f"a choice by codes of {kind}", run, 2)


def _by_largest(
    q: torch.Tensor, keys: torch.Tensor, lists: Lists, logits: torch.Tensor, native: bool
) -> None:
    weights = torch.zeros(1, 6)
    given = ByChannels(q, keys, [150], lists, "sum", None, 9, 0.2, logits, 20, weights)
    _channels_natively(given) if native else _channels_by_torch(given, "reference")
    logits[0, :, 0] = weights


def _by_labels(
    q: torch.Tensor, keys: torch.Tensor, lists: Lists, logits: torch.Tensor, native: bool
) -> None:
    labels = torch.arange(18).view(2, 9) + 5
    given = ByChannels(q, keys[:, :, :9], [150], lists, "none", labels)
    _channels_natively(given) if native else _channels_by_torch(given, "reference")


def _by_codes(
    q: torch.Tensor,
    centroids: torch.Tensor,
    codes: torch.Tensor,
    lists: Lists,
    logits: torch.Tensor,
    native: bool,
) -> None:
    held, reduce = (logits, "sum") if codes.shape[2] > 1 else (None, "max")
    given = ByCodes(q, centroids, codes, [150], lists, reduce, 4, 0.2, held)
    _codes_natively(given) if native else _codes_by_torch(given, "reference")
    logits.zero_()
