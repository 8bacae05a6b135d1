"""Exact top-k of one long row of scores per sequence: ascending indices, the lowest index wins
ties, and a GPU never visits the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.attention.scratch import SELECT_PROGRAMS, Scratch, ScratchShape, make_scratch
from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.radix import count_first_digit, ordered
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.native.library import Case
from kernels.select import native

# CPU backend: scores searched at a time for equals of the last place
TIE_BLOCK = 8192


def select_topk_ref(
    scores: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Reference of `select_topk`, same arguments: a stable sort by (-score, index)."""
    for b in range(scores.shape[0]):
        first, last = int(lo[b]), max(int(lo[b]), int(hi[b]))
        kept = min(int(k[b]), last - first, out.shape[1])
        row = scores[b, first:last].float()
        # NaN is lowest; -0 becomes +0
        row = torch.where(torch.isnan(row), float("-inf"), row) + 0.0
        order = torch.sort(row, descending=True, stable=True).indices[:kept]
        out[b].fill_(-1)
        out[b, :kept] = torch.sort(order).values.to(out.dtype) + first
        counts[b] = kept


def select_topk(
    scores: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    scratch: Scratch | None = None,
    backend: str = "auto",
    counted: bool = False,
) -> None:
    """Select the k largest scores in [lo, hi) of every row, as ascending indices.

    scores [B, T] float32; lo, hi, k [B] int32 on the device (a k beyond hi - lo takes all; hi < lo
    is empty); out [B, K] int32, filled with ascending positions and then -1; counts [B] int32, set
    to min(k, hi - lo, K). NaN ranks lowest, -0 equals +0, equal scores go to the lower index.
    scratch: None allocates. counted: `decode_dense(ranked=hi)` left these scores and counted their
    first digits in this scratch, lo being 0; only the Triton backend looks. Mutates out, counts and
    scratch. Raises ValueError for an unknown backend or too small a scratch.
    """
    chosen = choose(backend, scores, lambda: native.selects(scores, out))
    if chosen == "native":
        native.select(scores, lo, hi, k, out, counts)
    elif chosen == "triton":
        select_topk_triton(scores, lo, hi, k, out, counts, scratch, counted=counted)
    elif chosen == "cpu":
        select_topk_cpu(scores, lo, hi, k, out, counts, scratch)
    else:
        select_topk_ref(scores, lo, hi, k, out, counts)


def select_topk_cpu(
    scores: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    scratch: Scratch | None = None,
) -> None:
    """`select_topk` on CPU tensors, same arguments: by the C++ kernel where there is one.

    Else takes one score more than asked for, to see whether the last place is contested. If the
    smallest of the k + 1 is alone, the others are the answer. If not, the lowest indices among its
    equals fill the last places (softmaxed scores underflow to many zeros).
    """
    out.fill_(-1)
    for b in range(scores.shape[0]):
        first = int(lo[b])
        row = scores[b, first : max(first, int(hi[b]))]
        kept = max(0, min(int(k[b]), row.numel(), out.shape[1]))
        counts[b] = kept
        if kept in (0, row.numel()):
            out[b, :kept] = torch.arange(first, first + kept)
            continue
        # a NaN, or infinities of both signs: rare, so a copy will do
        if bool(torch.isnan(row.sum())):
            row = torch.where(torch.isnan(row), float("-inf"), row)
        values, order = torch.topk(row, kept + 1, sorted=False)
        floor = values.min()
        chosen = order[values > floor]
        if chosen.numel() < kept:
            chosen = torch.cat([chosen, _lowest_equal(row, floor, kept - chosen.numel())])
        out[b, :kept] = torch.sort(chosen).values + first


@native.BINDING.self_test
def _selections() -> Iterator[Case]:
    # many of equal rank, NaN among them
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).mul_(4).round_()
    scores[1, ::7] = float("nan")
    limits = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3, 9], [500, 470, 20], [64, 30, 99]))
    lo, hi, k = limits
    results = []
    for run in (native.select, select_topk_ref):
        out, counts = torch.empty(3, 80, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        run(scores, lo, hi, k, out, counts)
        results.append(torch.cat([out, counts[:, None]], 1))
    yield "the top-k", results[0], results[1], torch.int32


def _lowest_equal(row: torch.Tensor, value: torch.Tensor, count: int) -> torch.Tensor:
    """Find the `count` lowest indices at which row equals value, block by block."""
    found, missing = [], count
    for start in range(0, row.numel(), TIE_BLOCK):
        equal = torch.nonzero(row[start : start + TIE_BLOCK] == value).flatten()[:missing] + start
        found.append(equal)
        missing -= equal.numel()
        if not missing:
            break
    return torch.cat(found)


# The Triton backend: a radix select over 32-bit ordered scores, digits of 8, 12 and 12 bits, five
# launches, four where the kernel that writes the scores counts their first digits; no spinning.
# Every launch rereads the scores (4 bytes each, from L2: 0.5 MB at 128K rows): launches are the
# cost, not bytes.


@triton.jit
def candidates(lo, hi, k, b, room, capacity):
    """Bound row b: (first, past the last, how many are wanted)."""
    first = tl.maximum(tl.load(lo + b), 0)
    stop = tl.maximum(tl.minimum(tl.load(hi + b), capacity), first)
    return first, stop, tl.maximum(tl.minimum(tl.minimum(tl.load(k + b), stop - first), room), 0)


@triton.jit
def crossing(hist, wanted, BINS: tl.constexpr):
    """Find (digit, missing): the largest digit with >= wanted scores at or above it, and how many
    scores of that very digit are needed.
    """
    d = tl.arange(0, BINS)
    counts = tl.load(hist + d)
    reached = tl.cumsum(counts, 0, reverse=True)
    digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    return digit, wanted - tl.sum(tl.where(d > digit, counts, 0), 0)


@triton.jit
def count_digit(hist, digit, inside, BINS: tl.constexpr, TILE: tl.constexpr):
    """Add a tile's digits to a histogram in memory, one atomic per score: few scores share the
    digits before.

    If many do (equal scores, zeros), their least and greatest digit are counted first and added at
    once, or a constant row would queue all its atomics on one address. tl.histogram with 4096 bins
    would spill instead.
    """
    if tl.sum(inside.to(tl.int32), 0) > TILE // 8:
        least = tl.min(tl.where(inside, digit, BINS), 0)
        most = tl.max(tl.where(inside, digit, -1), 0)
        tl.atomic_add(
            hist + least, tl.sum((inside & (digit == least)).to(tl.int32), 0), sem="relaxed"
        )
        inside &= digit != least
        tl.atomic_add(
            hist + most, tl.sum((inside & (digit == most)).to(tl.int32), 0), sem="relaxed"
        )
        inside &= digit != most
    tl.atomic_add(hist + digit, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["room", "capacity"])
def digit_kernel(
    scores,
    lo,
    hi,
    k,
    hists,
    state,
    stride_scores,
    room,
    capacity,
    span,
    STRIDE: tl.constexpr,
    LEVEL: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Count one digit over the scores that share the digits before it: grid (programs, B).

    LEVEL 0: bits 31..24; 1: bits 23..12 below the first crossing digit; 2: bits 11..0 below the
    second, and the first histogram is zeroed. A row of `state`: prefix and missing after level 1,
    the same after level 2, the threshold and its ties, two unused, then the (greater, equal) counts
    of every program.
    """
    wait_for_last_kernel(DEPENDENT)
    pid = tl.program_id(0)
    b = tl.program_id(1)
    first, stop, wanted = candidates(lo, hi, k, b, room, capacity)
    hist0 = hists + b * 8448  # a row's histograms: 256, 4096 and 4096 bins
    hist1 = hist0 + 256
    hist2 = hist0 + 4352
    state += b * STRIDE
    begin = pid * span
    # also where nothing is wanted: who wrote the scores may have counted
    if LEVEL == 2 and pid == 0:
        tl.store(hist0 + tl.arange(0, 256), tl.zeros([256], tl.int32))
    if wanted > 0 and (pid == 0 or (begin < stop and begin + span > first)):
        if LEVEL == 1:
            prefix, missing = crossing(hist0, wanted, 256)
            if pid == 0:
                tl.store(state, prefix)
                tl.store(state + 1, missing)
        if LEVEL == 2:
            above = tl.load(state)
            digit, missing = crossing(hist1, tl.load(state + 1), 4096)
            prefix = above * 4096 + digit
            if pid == 0:
                tl.store(state + 2, prefix)
                tl.store(state + 3, missing)
        scores += b.to(tl.int64) * stride_scores
        for at in range(begin, tl.minimum(begin + span, stop), TILE):
            t = at + tl.arange(0, TILE)
            inside = (t >= first) & (t < stop)
            x = ordered(tl.load(scores + t, mask=inside, other=0.0))
            if LEVEL == 0:
                count_first_digit(hist0, x, inside)
            if LEVEL == 1:
                inside &= (x >> 24).to(tl.int32) == prefix
                count_digit(hist1, ((x >> 12) & 4095).to(tl.int32), inside, 4096, TILE)
            if LEVEL == 2:
                inside &= (x >> 12).to(tl.int32) == prefix
                count_digit(hist2, (x & 4095).to(tl.int32), inside, 4096, TILE)


@triton.jit(do_not_specialize=["room", "capacity"])
def count_kernel(
    scores,
    lo,
    hi,
    k,
    hists,
    state,
    stride_scores,
    room,
    capacity,
    span,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the threshold score, and count how many scores of each program's span lie above it and
    on it: grid (programs, B).
    """
    wait_for_last_kernel(DEPENDENT)
    pid = tl.program_id(0)
    b = tl.program_id(1)
    first, stop, wanted = candidates(lo, hi, k, b, room, capacity)
    state += b * STRIDE
    begin = pid * span
    greater = 0
    equal = 0
    if wanted > 0 and (pid == 0 or (begin < stop and begin + span > first)):
        digit, missing = crossing(hists + b * 8448 + 4352, tl.load(state + 3), 4096)
        threshold = tl.load(state + 2).to(tl.uint32) * 4096 + digit.to(tl.uint32)
        if pid == 0:
            tl.store(state + 4, threshold.to(tl.int32, bitcast=True))
            tl.store(state + 5, missing)
            tl.store(hists + b * 8448 + 256 + tl.arange(0, 4096), tl.zeros([4096], tl.int32))
        scores += b.to(tl.int64) * stride_scores
        for at in range(begin, tl.minimum(begin + span, stop), TILE):
            t = at + tl.arange(0, TILE)
            inside = (t >= first) & (t < stop)
            x = ordered(tl.load(scores + t, mask=inside, other=0.0))
            greater += tl.sum((inside & (x > threshold)).to(tl.int32), 0)
            equal += tl.sum((inside & (x == threshold)).to(tl.int32), 0)
    slot = state + 8 + pid * 2
    tl.store(slot, greater)
    tl.store(slot + 1, equal)


@triton.jit(do_not_specialize=["room", "capacity"])
def emit_kernel(
    scores,
    lo,
    hi,
    k,
    hists,
    state,
    out,
    counts,
    stride_scores,
    sout,
    room,
    capacity,
    span,
    STRIDE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the chosen positions in ascending order, -1 behind them, and the count; leave the
    histograms zero.
    """
    wait_for_last_kernel(DEPENDENT)
    pid = tl.program_id(0)
    b = tl.program_id(1)
    programs = tl.num_programs(0)
    first, stop, wanted = candidates(lo, hi, k, b, room, capacity)
    out += b.to(tl.int64) * sout
    state += b * STRIDE
    begin = pid * span
    if pid == 0:
        tl.store(counts + b, wanted)
        tl.store(hists + b * 8448 + 4352 + tl.arange(0, 4096), tl.zeros([4096], tl.int32))
    if wanted > 0 and begin < stop and begin + span > first:
        threshold = tl.load(state + 4).to(tl.uint32, bitcast=True)
        # how many scores on the threshold are taken: the first ones
        ties = tl.load(state + 5)
        p = tl.arange(0, PROGRAMS)
        slot = state + 8 + p * 2
        above = tl.sum(tl.load(slot, mask=p < pid, other=0), 0)
        on = tl.sum(tl.load(slot + 1, mask=p < pid, other=0), 0)
        scores += b.to(tl.int64) * stride_scores
        for at in range(begin, tl.minimum(begin + span, stop), TILE):
            t = at + tl.arange(0, TILE)
            inside = (t >= first) & (t < stop)
            x = ordered(tl.load(scores + t, mask=inside, other=0.0))
            greater = (inside & (x > threshold)).to(tl.int32)
            equal = (inside & (x == threshold)).to(tl.int32)
            # one scan for both counts: a tile has fewer than 65536 scores
            both = greater * 65536 + equal
            before = tl.cumsum(both, 0) - both
            rank = on + (before & 65535)
            place = above + (before >> 16) + tl.minimum(rank, ties)
            tl.store(out + place, t, mask=(greater > 0) | ((equal > 0) & (rank < ties)))
            above += tl.sum(greater, 0)
            on += tl.sum(equal, 0)
    for at in range(wanted + pid * TILE, room, programs * TILE):
        t = at + tl.arange(0, TILE)
        tl.store(out + t, tl.full([TILE], -1, tl.int32), mask=t < room)


def select_span(capacity: int) -> int:
    """Scores of one program: at least 1024, and few enough programs for one vector to hold their
    counts.
    """
    return max(1024, power_of_two(-(-capacity // SELECT_PROGRAMS)))


def select_topk_triton(
    scores: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    scratch: Scratch | None = None,
    span: int | None = None,
    counted: bool = False,
) -> None:
    """`select_topk` by the Triton kernels of this file, same arguments.

    Radix select by digits of 8, 12 and 12 bits; 5 launches and 20 bytes read per score, 4 and 16
    where `counted`. span: scores per program, a power of two (for tests: the result does not depend
    on it).
    """
    batch, capacity = scores.shape
    span = span or select_span(capacity)
    programs = max(1, -(-capacity // span))
    if programs > SELECT_PROGRAMS:
        raise ValueError(
            f"span: found {span}, expected at most {SELECT_PROGRAMS} programs for {capacity} scores"
        )
    if scratch is None:
        if counted:
            raise ValueError(
                "scratch: found none, expected the one that the scores were counted in"
            )
        largest = ScratchShape(batch, 1, 1, 1, 16, 1, scored=True)
        scratch = make_scratch(largest, scores.device, "triton")
    scratch.require(hist=batch * 8448, ranks=batch * (8 + 2 * SELECT_PROGRAMS))
    rows = (scores, lo, hi, k, scratch.hist, scratch.ranks)
    sizes = (out.shape[1], capacity, span)
    shape = dict(
        STRIDE=8 + 2 * SELECT_PROGRAMS, TILE=min(1024, span), num_warps=8, **dependent(scores)
    )
    for level in range(int(counted), 3):
        digit_kernel[(programs, batch)](*rows, scores.stride(0), *sizes, LEVEL=level, **shape)
    count_kernel[(programs, batch)](*rows, scores.stride(0), *sizes, **shape)
    emit_kernel[(programs, batch)](
        *rows,
        out,
        counts,
        scores.stride(0),
        out.stride(0),
        *sizes,
        PROGRAMS=power_of_two(programs),
        **shape,
    )
