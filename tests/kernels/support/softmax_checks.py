"""Check a cap on logits and attention sinks in every launcher that has them: in plain torch
(tests/kernels_cpu) and interpreted (tests/kernels).

The oracle is float64 and shares no code with the kernels; the rules are those of
tests/kernels/support/kernel_checks.py. Queries are sharp, so that a cap that is forgotten shows.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.dense import decode_dense
from kernels.attention.sparse import decode_sparse
from kernels.launch.softmax import Softmax
from kernels.prefill.dense import attend_rows, prefill_dense, prefill_dense_lse
from kernels.prefill.sparse import prefill_sparse
from kernels.prefill.tiled import attend_tiles
from kernels.prefill.window import prefill_window
from kernels.select.column_scores import column_scores
from kernels.select.window_scores import window_scores
from tests.kernels.support.kernel_checks import assert_close, assert_scores, ints, make_bank

KV_HEADS, GROUP, DIM = 2, 3, 32
CAP = 3.0
SCALE = DIM**-0.5


def softmax_of(cap: bool, sinks: bool) -> Softmax:
    """A cap that acts, and sinks from nothing to more than the rows."""
    held = torch.linspace(-4.0, 16.0, KV_HEADS * GROUP) if sinks else None
    return Softmax(CAP if cap else 0.0, held)


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    softmax: Softmax,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of q [Q, H, D] to k, v [Hkv, n, D] where seen [Q, n], in `dtype`: (out [Q, H, D],
    logits [H, Q, n], log-sum-exp [H, Q], the sinks counted).
    """
    k, v = (t.to(dtype).repeat_interleave(GROUP, 0) for t in (k, v))
    wide = torch.promote_types(dtype, torch.float32)
    logits = (q.to(dtype).transpose(0, 1) @ k.transpose(1, 2)).to(wide) * SCALE
    if softmax.cap:
        logits = torch.tanh(logits / softmax.cap) * softmax.cap
    logits = logits.masked_fill(~seen, -math.inf)
    every = logits
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(wide).view(-1, 1, 1).expand(*logits.shape[:2], 1)
        every = torch.cat([logits, sinks], -1)
    lse = torch.logsumexp(every, -1)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    return (weights.to(dtype) @ v).transpose(0, 1), logits, lse


class Problem:
    """A bank of n rows and sharp queries [1, C, H, D]."""

    def __init__(self, softmax: Softmax, rows: int, queries: int, dtype: torch.dtype, layout: str):
        generator = torch.Generator().manual_seed(rows + queries)
        self.softmax, self.n, self.dtype = softmax, rows, dtype
        self.k, self.v = make_bank(1, KV_HEADS, rows + 5, DIM, dtype, layout, "cpu", generator)
        self.k[:, :, rows:] = self.v[:, :, rows:] = math.nan
        shape = 1, queries, KV_HEADS * GROUP, DIM
        self.q = (5 * torch.randn(shape, generator=generator)).to(dtype)

    def wanted(self, seen: torch.Tensor, dtype: torch.dtype = torch.float64, first: int = 0):
        """The oracle's answer for the queries from `first` on."""
        rows = self.k[0, :, : self.n], self.v[0, :, : self.n]
        return oracle(self.q[0, first:], *rows, seen, self.softmax, dtype)

    def same(self, out: torch.Tensor, seen: torch.Tensor, what: str) -> None:
        """Compare out [1, C, H, D] with the oracle, which must differ from a plain softmax."""
        exact, *rough = (self.wanted(seen, dtype)[0] for dtype in (torch.float64, self.dtype))
        if not self.softmax.cap:
            rough.append(self.fused(seen))
        worst = max(rough, key=lambda t: (t.double() - exact).abs().max().item())
        if self.dtype == torch.float32:
            # up to three parts are merged, each of them rounded, and then the sinks
            worst = exact + 2 * (worst.double() - exact)
        assert_close(out[0], exact, worst, self.dtype, what)
        rows = self.k[0, :, : self.n], self.v[0, :, : self.n]
        plain = oracle(self.q[0], *rows, seen, Softmax(), torch.float64)[0]
        assert (plain - exact).abs().max() > 0.1, what

    def fused(self, seen: torch.Tensor) -> torch.Tensor:
        """Torch's fused attention, less exact in float32 (its exponential): the sinks are the
        logits of one more row, whose value is zero.
        """
        k, v = (
            torch.cat([t[0, :, : self.n], torch.zeros_like(t[0, :, :1])], 1)
            for t in (self.k, self.v)
        )
        hidden = torch.zeros(len(k) * GROUP, len(seen), self.n + 1)
        hidden[..., :-1].masked_fill_(~seen, -math.inf)
        assert self.softmax.sinks is not None
        hidden[..., -1] = self.softmax.sinks.unsqueeze(1)
        q, mask = self.q.transpose(1, 2), hidden.to(self.dtype)
        found = scaled_dot_product_attention(
            q, k[None], v[None], mask, scale=SCALE, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    def causal(self, window: int = 0) -> torch.Tensor:
        """Which rows the queries see, bool [C, n]: they are the newest ones."""
        row = torch.arange(self.n)
        at = row[self.n - self.q.shape[1] :].unsqueeze(1)
        return (row <= at) & (row > at - window) if window else row <= at


def shares(logits: torch.Tensor, lse: torch.Tensor, kind: str) -> torch.Tensor:
    """Maxima over heads [Q, n] of softmaxed or raw logits [H, Q, n]; unseen rows are 0."""
    found = torch.exp(logits - lse.unsqueeze(-1)) if kind == "softmax" else logits
    best = found.amax(0)
    return torch.where(torch.isinf(best), torch.zeros_like(best), best)


def check_steps(backend: str, softmax: Softmax, dtype: torch.dtype, layout: str) -> None:
    """The launchers of a decode step."""
    for rows, queries in ((700, 1), (90, 3)):
        p = Problem(softmax, rows, queries, dtype, layout)
        seen, length = p.causal(), ints([rows], "cpu")
        for kind in ("softmax", "raw"):
            scores = torch.full((1, rows + 5), 7.0)
            given = p.q, p.k, p.v, length, SCALE, scores, kind
            p.same(decode_dense(*given, backend=backend, softmax=softmax), seen, f"dense {kind}")
            exact, rough = (
                shares(*p.wanted(seen, dtype)[1:], kind)[-1]
                for dtype in (torch.float64, torch.float32)
            )
            assert_scores(scores[0, :rows], exact, rough, f"scores {kind}")
        p.same(
            decode_dense(p.q, p.k, p.v, length, SCALE, backend=backend, softmax=softmax),
            seen,
            "dense",
        )
        index = torch.arange(0, rows - 20, 3, dtype=torch.int32)
        sparse = torch.zeros(rows, dtype=torch.bool)
        sparse[index.long()] = sparse[rows - 20 :] = True
        for heads in (1, KV_HEADS):
            chosen = index.expand(1, heads, -1).contiguous()
            rest = ints([len(index)], "cpu"), ints([rows - 20], "cpu"), length, SCALE
            out = decode_sparse(p.q, p.k, p.v, chosen, *rest, backend=backend, softmax=softmax)
            p.same(out, seen & sparse, f"sparse {heads}")


def check_window_scores(backend: str, softmax: Softmax, dtype: torch.dtype, layout: str) -> None:
    """The scores of a window of queries."""
    p = Problem(softmax, 600, 9, dtype, layout)
    alpha = torch.linspace(0.1, 1.0, 9)
    for kind in ("softmax", "raw"):
        scores = torch.full((1, 605), 7.0)
        given = p.q, p.k, ints([600], "cpu"), SCALE, alpha, kind, scores
        window_scores(*given, backend=backend, softmax=softmax)
        exact, rough = (
            (alpha.to(dtype).unsqueeze(1) * shares(*p.wanted(p.causal(), dtype)[1:], kind)).sum(0)
            for dtype in (torch.float64, torch.float32)
        )
        assert_scores(scores[0, :600], exact, rough, f"window scores {kind}")


def check_prompts(backend: str, softmax: Softmax, dtype: torch.dtype, layout: str) -> None:
    """The launchers of a prompt's chunk."""
    for rows, chunk in ((150, 70), (40, 40), (65, 1)):
        p, start = Problem(softmax, rows, chunk, dtype, layout), rows - chunk
        seen, given = p.causal(), (p.q, p.k, p.v, start, SCALE)
        p.same(prefill_dense(*given, backend=backend, softmax=softmax), seen, "dense prefill")
        out, lse = prefill_dense_lse(*given, softmax, backend)
        p.same(out, seen, "dense prefill with sums")
        wanted = p.wanted(seen)[2].t()
        assert (lse[0].double() - wanted).abs().max() <= 4e-6 * wanted.abs().max() + 1e-6
        for window in (13, 300):
            low = max(0, start - window + 1)
            ring = (t[:, :, low:rows] for t in (p.k, p.v))
            out = prefill_window(p.q, *ring, start - low, window, SCALE, backend, softmax)
            p.same(out, p.causal(window), f"window {window}")
        local, index = start // 2, torch.arange(0, start // 2, 2, dtype=torch.int32)
        blocks = [(start, rows, local, len(index))]
        chosen = torch.cat([index, torch.full((3,), 2**30, dtype=torch.int32)]).view(1, 1, -1)
        rest = chosen, blocks, start, SCALE, backend, softmax
        sparse = torch.arange(rows) >= local
        sparse[index.long()] = True
        p.same(prefill_sparse(p.q, p.k, p.v, *rest), seen & sparse, "sparse prefill")
        if start:
            check_past(backend, p, start)
            check_columns(backend, p, lse, start)


def check_past(backend: str, p: Problem, start: int) -> None:
    """Rows that every query sees, as blocks of an offloaded layer are read: sinks wait."""
    past = tuple(t[:, :, :start] for t in (p.k, p.v))
    alone = Softmax(p.softmax.cap)
    every = torch.ones(p.q.shape[1], start, dtype=torch.bool)
    rows = partial(oracle, p.q[0], past[0][0], past[1][0], every, alone)
    exact, rough = rows(torch.float64), rows(p.dtype)
    tiles = attend_tiles(p.q, *past, SCALE, p.softmax, backend=backend)
    capped = [attend_rows(p.q, *past, SCALE, softmax=p.softmax)] if p.softmax.cap else []
    for found in (tiles, *capped):
        assert_close(found[0][0], exact[0], rough[0], p.dtype, "rows of the past")
        assert (found[1][0].double() - exact[2].t()).abs().max() <= 2e-5


def check_columns(backend: str, p: Problem, lse: torch.Tensor, start: int) -> None:
    """Scores of a block of queries, whose sums count the sinks."""
    sums, stop = torch.full((1, 1, p.n), 7.0), start - 1
    chunk = p.q.shape[1]
    if not stop:
        return
    blocks = [(start, start + chunk, stop)]
    given = p.q, p.k, lse, blocks, start, 1, SCALE, sums
    column_scores(*given, backend=backend, softmax=p.softmax)
    exact, rough = (
        shares(*p.wanted(p.causal(), dtype)[1:], "softmax").sum(0)[:stop]
        for dtype in (torch.float64, torch.float32)
    )
    if p.dtype == torch.float32:
        assert_scores(sums[0, 0, :stop], exact, rough, "column sums")
    else:  # a product of the CPU's bfloat16 rounds its logits
        assert torch.allclose(sums[0, 0, :stop].double(), exact, rtol=0.05, atol=1e-3)
    assert (sums[0, 0, stop:] == 7.0).all()


CASES = [(True, False), (False, True), (True, True)]
