"""Check the decode kernels: in plain torch (tests/kernels_cpu), interpreted (tests/kernels) and
compiled on a GPU (tests/cuda).

The oracle is float64 and shares no code with the kernels. The rule: a kernel's error is at most
twice that of plain torch at the same dtype. K and V that may not be read (beyond the length, not
chosen) hold NaN, so a stray read shows in the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention.dense import decode_dense
from kernels.attention.scratch import Scratch
from kernels.attention.sparse import decode_sparse
from kernels.select.topk import select_topk, select_topk_ref
from kernels.select.window_scores import window_scores

ORDERS = 4  # of summation, in which plain torch's float32 is tried
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def make_bank(
    batch: int,
    kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: str,
    device: str,
    generator: torch.Generator,
) -> tuple[torch.Tensor, ...]:
    """Make K and V [B, Hkv, T, D] of normal values, views of a head- or token-major bank."""
    if layout == "heads":
        rows = torch.randn(2, batch, kv_heads, capacity, head_dim, generator=generator)
    else:
        rows = torch.randn(batch, capacity, 2, kv_heads, head_dim, generator=generator).permute(
            2, 0, 3, 1, 4
        )
    return rows.to(dtype).to(device).unbind(0)


def ints(values: Sequence[Any], device: str) -> torch.Tensor:
    """Make an int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: list[int],
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q [Q, H, D] to k, v [Hkv, n, D] in `dtype`, softmax in at least float32.

    Returns (out, logits [Q, H, n]).
    """
    group = q.shape[1] // k.shape[0]
    k, v = (t.to(dtype).repeat_interleave(group, 0) for t in (k, v))
    logits = torch.matmul(q.to(dtype).transpose(0, 1), k.transpose(1, 2)) * scale
    limit = torch.tensor(visible, device=q.device).view(1, -1, 1)
    logits = logits.masked_fill(torch.arange(k.shape[1], device=q.device) >= limit, -math.inf)
    weights = torch.softmax(logits, -1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    return torch.matmul(weights, v).transpose(0, 1), logits.transpose(0, 1)


def assert_close(
    found: torch.Tensor,
    exact: torch.Tensor,
    plain_result: torch.Tensor,
    dtype: torch.dtype,
    what: str,
) -> None:
    """Assert the rule: the error of `found` is at most twice plain torch's, plus one rounding of
    the result (float32: four).

    In float32 both errors come from the order of summation and differ by chance: 3.2x was seen, and
    0.5x more often. `worst` makes plain torch's a matter of less chance.
    """
    exact = exact.double()
    error = (found.double() - exact).abs().max().item()
    rounding = EPSILON[dtype] * exact.abs().max().item() * (4 if dtype == torch.float32 else 1)
    allowed = 2 * (plain_result.double() - exact).abs().max().item() + rounding
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def worst(exact: torch.Tensor, plain_results: list[torch.Tensor]) -> torch.Tensor:
    """Of plain torch's results, the one furthest from `exact`: the same sums in other orders. A
    CPU's libraries choose the order by the processor, so that a bound drawn from one of them held
    on an EPYC and failed by 0.1% on a Xeon with AMX.
    """
    return max(plain_results, key=lambda found: float((found.double() - exact).abs().max()))


def assert_scores(
    found: torch.Tensor, exact: torch.Tensor, plain_result: torch.Tensor, what: str
) -> None:
    """Assert the rule for scores: twice plain torch's float32 error, plus 4e-6 of each score for
    exp(logit - lse) with a rounded lse.

    Backends may select differently only between scores that are closer than 1e-5, relative.
    """
    error = ((found.double() - exact).abs() - 4e-6 * exact.abs()).max().item()
    allowed = 2 * (plain_result.double() - exact).abs().max().item()
    assert error <= allowed, f"{what}: error {error:.3e} past 4e-6 relative, allowed {allowed:.3e}"


def check_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    chosen: tuple[torch.Tensor, torch.Tensor],
    visible: list[int],
    scale: float,
    what: str,
) -> None:
    """Compare out [Q, H, D] with attention over chosen = (k, v) [Hkv, n, D]; a query that sees
    nothing must get zeros.
    """
    live = [j for j, limit in enumerate(visible) if limit > 0]
    assert torch.isfinite(out).all(), f"{what}: not finite"
    assert not out[: len(visible) - len(live)].any(), (
        f"{what}: a query that sees nothing gave something"
    )
    if live:
        seen = [visible[j] for j in live]
        k, v = chosen
        exact, _ = plain(q[live], k, v, seen, scale, torch.float64)
        # a logit is a sum over the head's dimensions, from any of them on
        rough = [
            plain(q[live].roll(shift, -1), k.roll(shift, -1), v, seen, scale, q.dtype)[0]
            for shift in (range(ORDERS) if q.dtype == torch.float32 else (0,))
        ]
        assert_close(out[live], exact, worst(exact, rough), q.dtype, what)


def check_dense(
    device: str,
    backend: str,
    lengths: list[int],
    kv_heads: int = 2,
    group: int = 4,
    queries: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layout: str = "heads",
    kind: str | None = None,
    extra: int = 37,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check decode_dense; K and V past each length are NaN. Returns (out, scores)."""
    generator = torch.Generator().manual_seed(seed)
    batch, capacity, scale = len(lengths), max(lengths) + extra, head_dim**-0.5
    k, v = make_bank(batch, kv_heads, capacity, head_dim, dtype, layout, device, generator)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = math.nan
    q = (
        torch.randn(batch, queries, kv_heads * group, head_dim, generator=generator)
        .to(dtype)
        .to(device)
    )
    scores = torch.full((batch, capacity), 7.0, device=device) if kind else None
    out = decode_dense(
        q, k, v, ints(lengths, device), scale, scores, kind or "softmax", backend=backend
    )
    for b, n in enumerate(lengths):
        visible = [n - (queries - 1 - j) for j in range(queries)]
        rows = (k[b, :, :n], v[b, :, :n])
        check_attention(out[b], q[b], rows, visible, scale, f"out of sequence {b}")
        if kind and n:
            assert (scores[b, n:] == 7.0).all(), "scores beyond the length were written"
            exact, rough = (
                score_oracle(plain(q[b], *rows, visible, scale, t)[1][-1:], [1.0], kind)
                for t in (torch.float64, torch.float32)
            )
            assert_scores(scores[b, :n], exact, rough, f"scores of sequence {b}")
    return out, scores


def score_oracle(logits: torch.Tensor, alpha: list[float], kind: str) -> torch.Tensor:
    """Apply OmniKV Eq. 3 and 4 to logits [W, H, n]: sum over queries of alpha times the maximum
    over heads; unseen rows add nothing.
    """
    total = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    for one, weight in zip(logits, alpha):
        best = (torch.softmax(one, -1) if kind == "softmax" else one).amax(0)
        total += weight * torch.where(one[0] == -math.inf, 0.0, best)
    return total


def check_window(
    device: str,
    backend: str,
    lengths: list[int],
    window: int = 16,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kind: str = "softmax",
    layout: str = "heads",
) -> None:
    """Check window_scores; queries before the start of a short sequence are skipped."""
    generator = torch.Generator().manual_seed(3)
    batch, capacity, scale = len(lengths), max(lengths) + 21, head_dim**-0.5
    k, _ = make_bank(batch, kv_heads, capacity, head_dim, dtype, layout, device, generator)
    q = (
        torch.randn(batch, window, kv_heads * group, head_dim, generator=generator)
        .to(dtype)
        .to(device)
    )
    alpha = torch.rand(window, generator=generator).to(device)
    scores = torch.full((batch, capacity), 7.0, device=device)
    for b, n in enumerate(lengths):
        k[b, :, n:] = math.nan
    window_scores(q, k, ints(lengths, device), scale, alpha, kind, scores, backend=backend)
    for b, n in enumerate(lengths):
        visible = [n - (window - 1 - j) for j in range(window)]
        live = [j for j in range(window) if visible[j] > 0]
        rows = k[b, :, :n]
        exact, rough = (
            score_oracle(
                plain(q[b, live], rows, rows, [visible[j] for j in live], scale, t)[1],
                alpha[live].tolist(),
                kind,
            )
            for t in (torch.float64, torch.float32)
        )
        assert (scores[b, n:] == 7.0).all(), "scores beyond the length were written"
        assert_scores(scores[b, :n], exact, rough, f"window scores of sequence {b}")


def check_sparse(
    device: str,
    backend: str,
    counts: list[int] | list[list[int]],
    tails: list[int],
    kv_heads: int = 2,
    group: int = 4,
    queries: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layout: str = "tokens",
    per_head: bool = False,
    budget: int | None = None,
    gap: int = 50,
    seed: int = 0,
    times: bool = False,
) -> torch.Tensor:
    """Check decode_sparse; K and V that are neither chosen nor in the tail are NaN. Returns out.

    counts, tails: chosen rows and tail rows of each sequence, of a list of counts one for each K/V
    head; gap: rows before the tail that are not chosen; times: whether the entries of a list count
    1, 2, 3, 1, ... times, by logs.
    """
    apart = not isinstance(counts[0], int)
    by_head = [count if apart else [count] * kv_heads for count in counts]
    counts = [max(some) for some in by_head]
    per_head |= apart
    generator = torch.Generator().manual_seed(seed)
    batch, scale = len(counts), head_dim**-0.5
    budget = max(max(counts), 1) if budget is None else budget
    starts = [count + gap for count in counts]
    lengths = [start + tail for start, tail in zip(starts, tails)]
    k, v = make_bank(batch, kv_heads, max(lengths) + 13, head_dim, dtype, layout, device, generator)
    q = (
        torch.randn(batch, queries, kv_heads * group, head_dim, generator=generator)
        .to(dtype)
        .to(device)
    )
    heads = kv_heads if per_head else 1
    index = torch.full((batch, heads, budget), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for h in range(heads):
            count = by_head[b][h]
            rows = torch.randperm(starts[b], generator=generator)[:count].sort().values
            index[b, h, :count] = rows
    index = index.to(device)
    often = (torch.arange(budget, device=device) % 3 if times else index.new_zeros(budget)) + 1
    logs = often.float().log().repeat(batch, 1) if times else None
    chosen = []
    for b in range(batch):
        tail = torch.arange(starts[b], lengths[b], device=device)
        for h, count in enumerate(by_head[b]):
            take = torch.cat([index[b, h % heads, :count].long(), tail])
            keep = torch.zeros(k.shape[2], dtype=torch.bool, device=device)
            keep[take] = True
            k[b, h, ~keep] = v[b, h, ~keep] = math.nan
            take = torch.cat([take[:count].repeat_interleave(often[:count]), tail])
            chosen.append((k[b, h, None, take], v[b, h, None, take]))
    out = decode_sparse(
        q,
        k,
        v,
        index,
        ints(by_head if apart else counts, device),
        ints(starts, device),
        ints(lengths, device),
        scale,
        backend=backend,
        logs=logs,
    )
    for b in range(batch):
        for h, count in enumerate(by_head[b]):
            count = int(often[:count].sum())
            visible = [count + tails[b] - (queries - 1 - j) for j in range(queries)]
            mine = slice(h * group, (h + 1) * group)
            what = f"out of sequence {b}, head {h}"
            own = out[b, :, mine], q[b, :, mine], chosen[b * kv_heads + h]
            check_attention(*own, visible, scale, what)
    return out


HOSTILE_ROWS = (
    "normal",
    "equal",
    "two",
    "zeros",
    "-inf tail",
    "nan",
    "denormal",
    "signed zero",
    "ascending",
    "close",
)


def hostile_row(name: str, n: int, generator: torch.Generator) -> torch.Tensor:
    """Make one float32 row of n scores, of a kind that breaks careless selects."""
    row = torch.randn(n, generator=generator)
    if name == "equal":
        row = torch.full((n,), 0.25)
    elif name == "two":
        row = torch.randint(0, 2, (n,), generator=generator).float()
    elif name == "zeros":
        row[torch.rand(n, generator=generator) < 0.9] = 0.0
    elif name == "-inf tail":
        row[n // 3 :] = -math.inf
    elif name == "nan":
        row[torch.rand(n, generator=generator) < 0.4] = math.nan
        row[::7] = math.inf
    elif name == "denormal":
        row = (
            torch.randint(-5, 6, (n,), generator=generator, dtype=torch.int32)
            .abs()
            .view(torch.float32)
            * 1.0
        )
    elif name == "signed zero":
        row = torch.where(row > 0, 0.0, -0.0)
    elif name == "ascending":
        row = torch.arange(n, dtype=torch.float32)
    # equal in the first digits, apart in the last bits
    elif name == "close":
        row = (torch.randint(0, 9, (n,), generator=generator, dtype=torch.int32) + 0x3F800000).view(
            torch.float32
        )
    return row


def check_topk(
    device: str,
    backend: str,
    rows: list[torch.Tensor],
    lo: list[int],
    hi: list[int],
    k: list[int],
    room: int,
    span: int | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Check select_topk on `rows` (1-D tensors) against the stable sort; scores outside [lo, hi)
    are infinite. Returns out.
    """
    scores = torch.stack(rows)
    for b in range(len(rows)):
        scores[b, : lo[b]] = scores[b, max(hi[b], 0) :] = math.inf
    out = torch.full((len(rows), room), 99, dtype=torch.int32)
    counts = torch.full((len(rows),), 99, dtype=torch.int32)
    expected, expected_counts = out.clone(), counts.clone()
    select_topk_ref(
        scores,
        *(torch.tensor(x, dtype=torch.int32) for x in (lo, hi, k)),
        expected,
        expected_counts,
    )
    scores, out, counts = (t.to(device) for t in (scores, out, counts))
    arguments = (scores, *(ints(x, device) for x in (lo, hi, k)), out, counts, scratch)
    if span is None:
        select_topk(*arguments, backend=backend)
    else:
        from kernels.select.topk import select_topk_triton

        select_topk_triton(*arguments, span=span)
    assert torch.equal(counts.cpu(), expected_counts), (counts, expected_counts)
    assert torch.equal(out.cpu(), expected)
    return out
