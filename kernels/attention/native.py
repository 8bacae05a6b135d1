"""Attention of a decode step by the C++ kernels: rows of K and V are read once, where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.attention.reference import attend_alone, head_max
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS, ROWS
from kernels.native.library import Binding, Case, check, loaded
from kernels.rows.forms import FORMS
from kernels.rows.native import stored_queries

LANES = 16  # a head's dimensions are whole vectors
# Rows of a head that a thread takes at a time, so that sums do not depend on the number of threads.
# One thread takes 1.02 of the time that 4,096 take it, 512 take 1.04 (an EPYC, docs/LOG.md).
SPLIT = 1024


class Call(ctypes.Structure):
    """`Call` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        ("index", ctypes.c_void_p),
        ("index_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "parts", "logits")),
        ("ahead", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "logs")),
        *(
            (name, ctypes.c_int)
            for name in (
                "heads",
                "queries",
                "group",
                "dim",
                "kept",
                "start",
                "visited",
                "split",
                "threads",
                "shared",
            )  # fmt: skip
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        ("unit", ctypes.c_int),
    ]


_FLOATS = Binding("attention", omnikv_sizeof_attention_call=Call)
_PACKED = Binding("attention to packed rows", omnikv_sizeof_attention_call=Call)


def attends(k: torch.Tensor, v: torch.Tensor, dim: int) -> bool:
    """Whether the C++ kernel runs here and attends to rows k, v [.., n, >= dim] of one dtype, on a
    CPU, under heads of `dim` elements. The first call compiles it and runs its self-test.
    """
    binding = _FLOATS if k.dtype in FLOATS else _PACKED
    return k.dtype == v.dtype and reads(k.dtype, dim) and binding.usable()


def reads(dtype: torch.dtype, dim: int) -> bool:
    """Whether the C++ kernel, where there is one, knows rows of a dtype (floats of 16 and 32 bits,
    and every packed form) under heads of `dim` elements: a multiple of LANES.
    """
    return dtype in ROWS and not dim % LANES


def part_floats(kv_heads: int, rows: int, dim: int, visited: int) -> int:
    """Count the float32 elements of `parts` in `attend`. rows: queries * group; visited: rows of K
    that the last query reads.
    """
    return kv_heads * -(-visited // SPLIT) * rows * (dim + 2)


def room(
    parts: torch.Tensor | None, kv_heads: int, rows: int, dim: int, visited: int
) -> torch.Tensor:
    """`parts` where it has the room that `part_floats` says, else a new one."""
    needed = part_floats(kv_heads, rows, dim, visited)
    return torch.empty(needed) if parts is None or parts.numel() < needed else parts


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    index: torch.Tensor | None = None,
    kept: int = 0,
    start: int = 0,
    logits: torch.Tensor | None = None,
    softmax: Softmax = PLAIN,
    parts: torch.Tensor | None = None,
    narrow: bool = False,
    stop: int | None = None,
    unit: int = 1,
    each: torch.Tensor | None = None,
    logs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with Q <= 8 new queries to `kept` rows of an index and then to the rows from `start`.

    q [Q, H, D] float32, bfloat16 or float16; k, v [Hkv, n, D] of any strides, last dim contiguous,
    floats or packed, as `reads` says; index int32 [1, Hkv or H, >= kept], ascending, or None with
    kept = 0; one of H heads gives each query head rows of its own. Query j sees Q-1-j rows fewer
    than the last. scale: of the logits, 1/sqrt(D). logits: float32 of at least H * visited
    elements, or None: takes the scaled and capped logits of the last query, [H, visited]. parts:
    float32 of at least `part_floats` elements, or None, which allocates. stop: rows that there are.
    unit: rows in turn that an entry of the index stands for, from that many times it on; `kept`
    counts rows. each: int64, contiguous, one of each head of the index: how many of its first rows
    a head reads, `kept` being the most; None: all do. logs: float32, contiguous, of at least as
    many elements as rows are read, added to their logits in the order of reading; None: nothing is.
    narrow: out is rounded to q's dtype. Returns (out [Q, H, D], lse [Q, H]), float32, both with the
    sinks; a query that sees nothing gets 0 and -inf. Mutates logits and parts. Raises ValueError
    for a dtype that this build lacks, MemoryError where its queries find no room.
    """
    queries, heads, dim = q.shape
    kv_heads, size, rows = len(k), k.element_size(), k.shape[1] if stop is None else stop
    # an index for each query head makes each a head, of which some in turn share K and V
    units = heads if index is not None and len(index) == heads else kv_heads
    group = heads // units
    visited = kept + rows - start
    # else something happens to q before or to the result after, in float32
    alike = narrow and softmax.sinks is None and q.is_contiguous()
    if alike:
        folded, out = q, torch.empty_like(q)
    else:
        folded, out = _folded(q, k, units), torch.empty(units, queries * group, dim)
    lse = torch.empty(units, queries * group)
    parts = room(parts, units, queries * group, dim, visited)
    lengths = None if each is None else each + (rows - start)
    call = Call(
        folded.data_ptr(), k.data_ptr(), v.data_ptr(),
        k.stride(0) * size, k.stride(1) * size, v.stride(0) * size, v.stride(1) * size,
        _pointer(index), 0 if index is None or len(index) == 1 else index.stride(0),
        out.data_ptr(), lse.data_ptr(), parts.data_ptr(), _pointer(logits), visited, None,
        _pointer(lengths), _pointer(logs, start), units, queries, group, dim, kept, start, visited,
        SPLIT, torch.get_num_threads(), units // kv_heads, scale, softmax.cap, unit,
    )  # fmt: skip
    if alike:
        pointers = ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(out.data_ptr())
        given = ROWS[k.dtype], *pointers, ROWS[q.dtype]
        check(loaded().omnikv_attend_heads(ctypes.byref(call), *given), f"attention to {k.dtype}")
        return out, _of_queries(lse[..., None], queries)[..., 0]
    check(loaded().omnikv_attend(ctypes.byref(call), ROWS[k.dtype]), f"attention to {k.dtype}")
    lse = _of_queries(lse[..., None], queries)[..., 0]
    out, lse = softmax.sunk(_of_queries(out, queries), lse)
    return out.to(q.dtype) if narrow else out, lse


def _pointer(t: torch.Tensor | None, first: int = 0) -> int | None:
    """Where a tensor lies, or would if it began `first` elements before; None: there is none."""
    return None if t is None else t.data_ptr() - first * t.element_size()


def _of_queries(found: torch.Tensor, queries: int) -> torch.Tensor:
    """[Hkv, Q * group, D] as [Q, H, D]."""
    if queries > 1:
        found = found.unflatten(1, (queries, -1)).transpose(0, 1)
    return found.reshape(queries, -1, found.shape[-1])


def _folded(q: torch.Tensor, k: torch.Tensor, units: int) -> torch.Tensor:
    """Queries [Q, H, D] as the kernel takes them: float32 [units, Q * group, D]."""
    queries, heads, dim = q.shape
    wide = stored_queries(q.float(), k)
    if queries > 1:
        wide = wide.view(queries, units, heads // units, dim).transpose(0, 1)
    return wide.contiguous()


def attend_own_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    scale: float,
    parts: torch.Tensor | None = None,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_ragged` (kernels/attention/ragged.py), arguments as there; parts: as in `attend`.
    Returns out [1, 1, H, D] in q.dtype. Mutates parts. Raises what `attend` does.
    """
    heads, dim, units = q.shape[2], q.shape[3], len(starts)
    group, sizes = heads // units, (k.element_size(), v.element_size())
    folded = q.contiguous()
    out, lse = torch.empty_like(folded), torch.empty(units, group)
    parts = room(parts, units, group, dim, most)
    call = Call(
        folded.data_ptr(), k.data_ptr(), v.data_ptr(),
        0, k.stride(0) * sizes[0], 0, v.stride(0) * sizes[1], None, 0,
        out.data_ptr(), lse.data_ptr(), parts.data_ptr(), None, 0,
        starts.data_ptr(), lengths.data_ptr(), None if logs is None else logs.data_ptr(),
        units, 1, group, dim, 0, 0, most, SPLIT, torch.get_num_threads(), 1, scale, 0.0,
    )  # fmt: skip
    pointers = ctypes.c_void_p(folded.data_ptr()), ctypes.c_void_p(out.data_ptr())
    given = ROWS[k.dtype], *pointers, ROWS[folded.dtype]
    check(loaded().omnikv_attend_heads(ctypes.byref(call), *given), f"attention to {k.dtype}")
    return out


def attend_everything(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softmax: Softmax = PLAIN,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_dense` (kernels/attention/dense.py) without scores, arguments as there; parts: as in
    `attend`. Returns out [B, Q, H, D] in q.dtype. Raises what `attend` does.
    """
    found = [
        attend(q[b], k[b], v[b], scale, softmax=softmax, parts=parts, narrow=True, stop=n)[0]
        for b, n in enumerate(lengths.tolist())
    ]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def attend_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softmax: Softmax = PLAIN,
    parts: torch.Tensor | None = None,
    unit: int = 1,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_sparse` (kernels/attention/sparse.py), arguments as there: chosen rows are read where
    they lie. parts, unit: as in `attend`; counts are of entries. Returns out [B, Q, H, D] in
    q.dtype. Raises what `attend` does.
    """
    by_head = counts.dim() == 2
    most = counts.amax(1) if by_head else counts
    found, sizes = [], zip(most.tolist(), tail_start.tolist(), lengths.tolist())
    for b, (kept, start, n) in enumerate(sizes):
        some = q[b], k[b], v[b], scale, index[b] if kept else None, kept * unit, start
        each = counts[b].long() * unit if by_head and kept else None
        own = None if logs is None or not kept else _with_tail(logs[b, :kept], n - start)
        out, _ = attend(*some, None, softmax, parts, True, n, unit, each, own)
        found.append(out)
    return found[0][None] if len(found) == 1 else torch.stack(found)


def where(k: torch.Tensor, v: torch.Tensor) -> tuple[object, ...]:
    """Where rows k, v [B, Hkv, T, D] lie, and how: equal where a call that was told of the ones may
    read the others.
    """
    return k.data_ptr(), v.data_ptr(), k.stride(), v.stride(), k.shape, k.dtype


def _with_tail(logs: torch.Tensor, tail: int) -> torch.Tensor:
    """Logs [kept] of chosen rows and 0 of each of the tail's."""
    return torch.cat([logs, logs.new_zeros(tail)])


def attend_scored_natively(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    scores: torch.Tensor,
    kind: str,
    held: torch.Tensor | None = None,
    softmax: Softmax = PLAIN,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_scored` of kernels/attention/cpu.py, of Q <= 8 queries: q [Q, H, D]; k, v
    [Hkv, n, D], n >= 1; scores [n] float32 takes the head maxima of the last query (`kind`
    "softmax" or "raw"). held: float32 of at least H * n elements for its logits, or None
    (allocates); parts: as in `attend`. Returns out [Q, H, D] in q.dtype. Mutates scores, held and
    parts. Raises what `attend` does.
    """
    heads, rows = q.shape[1], k.shape[1]
    if held is None or held.numel() < heads * rows:
        held = torch.empty(heads * rows)
    found, lse = attend(q, k, v, scale, logits=held, softmax=softmax, parts=parts, narrow=True)
    logits = held[: heads * rows].view(heads, rows)
    head_most(logits, lse[-1].contiguous() if kind == "softmax" else None, scores)
    return found


def logits_natively(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    logits: torch.Tensor,
    softmax: Softmax = PLAIN,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Leave the scaled and capped logits of one query, and read no value.

    q [1, H, D]; k [Hkv, n, D], n >= 1; logits: float32 of at least H * n elements, whose first are
    [H, n] afterwards. parts: as in `attend`. Returns their log-sum-exp float32 [H], with the sinks.
    Mutates logits and parts. Raises what `attend` does.
    """
    heads, rows, dim = q.shape[1], k.shape[1], q.shape[2]
    units, size, folded = len(k), k.element_size(), _folded(q, k, len(k))
    lse, parts = torch.empty(heads), room(parts, units, heads // units, dim, rows)
    call = Call(
        folded.data_ptr(), k.data_ptr(), k.data_ptr(),
        k.stride(0) * size, k.stride(1) * size, 0, 0, None, 0,
        None, lse.data_ptr(), parts.data_ptr(), logits.data_ptr(), rows, None, None, None,
        units, 1, heads // units, dim, 0, 0, rows, SPLIT, torch.get_num_threads(), 1,
        scale, softmax.cap,
    )  # fmt: skip
    check(loaded().omnikv_attend(ctypes.byref(call), ROWS[k.dtype]), f"attention to {k.dtype}")
    return softmax.joined(lse.view(units, -1, 1, 1)).flatten()


def score_natively(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor,
    kind: str,
    held: torch.Tensor,
    parts: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """Leave the scores that `decode_dense` (kernels/attention/dense.py) leaves of one query,
    without its attention: no value is read.

    q [B, 1, H, D]; k [B, Hkv, T, D]; lengths [B] of at least 1; scores [B, T] float32, of `kind`
    "softmax" or "raw"; held: float32 of at least H * the longest; parts: as in `attend`. Mutates
    scores, held and parts. Raises what `attend` does.
    """
    heads = q.shape[2]
    for b, n in enumerate(lengths.tolist()):
        lse = logits_natively(q[b], k[b, :, :n], scale, held, softmax, parts)
        logits = held[: heads * n].view(heads, n)
        head_most(logits, lse if kind == "softmax" else None, scores[b, :n])


def head_most(logits: torch.Tensor, lse: torch.Tensor | None, scores: torch.Tensor) -> None:
    """Set scores [n] or [lists, n] float32 to the maximum over heads, or over each list's heads in
    turn, of exp(logits - lse), or of logits without lse.

    logits [H, n] and lse [H] float32; all contiguous but scores between lists.
    """
    library = loaded()
    (heads, rows), lists = logits.shape, 1 if scores.dim() == 1 else len(scores)
    library.omnikv_head_most(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_void_p(None if lse is None else lse.data_ptr()),
        lists,
        heads // lists,
        ctypes.c_long(rows),
        rows,
        torch.get_num_threads(),
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_long(scores.stride(0)),
    )


def _some_rows(queries: int) -> list[torch.Tensor]:
    """Queries, K and V of a self-test: more rows than a block has, and a rest."""
    generator = torch.Generator().manual_seed(1)
    sizes = (queries, 6, 64), (2, 300, 64), (2, 300, 64)
    return [torch.randn(*size, generator=generator) for size in sizes]


@_FLOATS.self_test
def _attention() -> Iterator[Case]:
    for dtype in FLOATS:
        q, k, v = (t.to(dtype) for t in _some_rows(2))
        held = torch.empty(6 * 300)
        found, lse = attend(q, k, v, 0.125, logits=held)
        wide_q, wide_k, wide_v = q.float(), k.float(), v.float()
        expected, logits = attend_alone(wide_q, wide_k, wide_v, [299, 300], 0.125, True)
        yield f"attention in {dtype}", found, expected, dtype
        assert logits is not None
        scores = torch.empty(300)
        head_most(held.view(6, 300), lse[1], scores)
        yield f"scores in {dtype}", scores, head_max(logits, "softmax")[0], dtype
        by_head, expected = torch.empty(2, 300), (logits[0] - logits[0].logsumexp(-1, True)).exp()
        head_most(held.view(6, 300), lse[1], by_head)
        yield f"scores by list in {dtype}", by_head, expected.view(2, 3, 300).amax(1), dtype
        again = torch.empty(6 * 300)
        alone = logits_natively(q[1:], k, 0.125, again)
        yield f"logits alone in {dtype}", again, held, torch.float32
        yield f"their log-sum-exp in {dtype}", alone, lse[1], torch.float32
        index = torch.arange(0, 100, 3, dtype=torch.int32)
        chosen = torch.cat([index, torch.arange(150, 300)])
        found, _ = attend(q, k, v, 0.125, index[None], len(index), 150)
        visible = [len(chosen) - 1, len(chosen)]
        some = wide_k[:, chosen], wide_v[:, chosen]
        expected, _ = attend_alone(wide_q, *some, visible, 0.125)
        yield f"attention to chosen rows in {dtype}", found, expected, dtype
        pages = torch.tensor([[0, 2, 3], [1, 4, 8]], dtype=torch.int32)
        found, _ = attend(q[1:], k, v, 0.125, pages, 48, 299, unit=16)
        for head, page in enumerate(pages.long()):
            rows = (page.unsqueeze(1) * 16 + torch.arange(16)).flatten()
            rows = torch.cat([rows, torch.tensor([299])])
            some, mine = (
                (wide_k[head, None, rows], wide_v[head, None, rows]),
                slice(3 * head, 3 * head + 3),
            )
            expected, _ = attend_alone(wide_q[1:, mine], *some, [49], 0.125)
            yield f"attention to pages in {dtype}", found[:, mine], expected, dtype
        each = torch.stack([index[i : i + 9] for i in range(6)])
        found, _ = attend(q[1:], k, v, 0.125, each, 9, 300)
        for head, rows in enumerate(each.long()):
            some = wide_k[head // 3, None, rows], wide_v[head // 3, None, rows]
            expected, _ = attend_alone(wide_q[1:, head : head + 1], *some, [9], 0.125)
            yield f"a head's own rows in {dtype}", found[:, head : head + 1], expected, dtype
        yield _different_counts(q, k, v)
        yield _weighted_choice(q, k, v)
        tables = torch.tensor([[7, 300], [290, 33]])
        own = attend_own_rows(
            q[None, 1:], k.flatten(0, 1), v.flatten(0, 1), tables[0], tables[1], 290, 0.125
        )
        for head, (first, n) in enumerate(tables.T.tolist()):
            run = slice(first, first + n)
            rows_k, rows_v = (t.flatten(0, 1)[None, run] for t in (wide_k, wide_v))
            mine = slice(3 * head, 3 * head + 3)
            expected, _ = attend_alone(wide_q[1:, mine], rows_k, rows_v, [n], 0.125)
            yield f"heads that hold different counts in {dtype}", own[0, :, mine], expected, dtype
        yield from _weighted_rows(q[None, 1:], k, v)


def _different_counts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Case:
    """Two heads that choose 5 and 33 rows, and a tail."""
    lists = torch.arange(0, 132, 2, dtype=torch.int32).view(1, 2, 33)
    counts, start, stop = (torch.tensor(n) for n in ([[5, 33]], [150], [300]))
    found = attend_chosen(q[None], k[None], v[None], lists, counts, start, stop, 0.125)[0]
    expected = []
    for head, (count, rows) in enumerate(zip((5, 33), lists[0].long())):
        rows = torch.cat([rows[:count], torch.arange(150, 300)])
        own_k, own_v = (t[head, None, rows].float() for t in (k, v))
        own, seen = q[:, 3 * head : 3 * head + 3].float(), [len(rows) - 1, len(rows)]
        expected.append(attend_alone(own, own_k, own_v, seen, 0.125)[0])
    name = f"heads that choose different counts in {q.dtype}"
    return name, found, torch.cat(expected, 1), q.dtype


def _weighted_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Case:
    """Chosen rows that count 1, 2 and 3 times, past a block's end, and a tail."""
    times = torch.arange(265) % 3 + 1
    counts, start, stop = (torch.tensor([n]) for n in (265, 290, 300))
    lists = torch.arange(10, 275, dtype=torch.int32)[None, None]
    given = lists, counts, start, stop, 0.125
    found = attend_chosen(q[None], k[None], v[None], *given, logs=times.float().log()[None])[0]
    rows = torch.cat([lists[0, 0].repeat_interleave(times), torch.arange(290, 300)]).long()
    seen = [len(rows) - 1, len(rows)]
    expected, _ = attend_alone(q.float(), k[:, rows].float(), v[:, rows].float(), seen, 0.125)
    return f"chosen rows that count several times in {k.dtype}", found, expected, q.dtype


def _weighted_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Case]:
    """One head whose rows count 1, 2 and 3 times, past a block's end."""
    times = torch.arange(270) % 3 + 1
    tables = torch.tensor([9]), torch.tensor([270])
    logs = torch.cat([torch.full((9,), float("nan")), times.float().log()])
    found = attend_own_rows(q[:, :, :3], k[0], v[0], *tables, 270, 0.125, logs=logs)
    many_k, many_v = (t[:1, 9:279].float().repeat_interleave(times, 1) for t in (k, v))
    seen = [int(times.sum())]
    expected, _ = attend_alone(q[0, :, :3].float(), many_k, many_v, seen, 0.125)
    yield f"rows that count several times in {k.dtype}", found[0], expected, k.dtype


@_PACKED.self_test
def _packed_attention() -> Iterator[Case]:
    q, k, v = _some_rows(2)
    for name, form in FORMS.items():
        rows = form.keys.pack(k), form.values.pack(v)
        # no multiple of 16: what a list of rows is filled up with
        for count in (300, 27):
            some = rows[0][:, :count], rows[1][:, :count]
            expected, _ = attend_alone(q, *some, [count - 1, count], 0.125)
            yield f"attention to {name} rows", attend(q, *some, 0.125)[0], expected, q.dtype
