"""The three sparse patterns of MInference: which past tokens a block of queries reads, per query
head.

Source: MInference 1.0 (Jiang et al., NeurIPS 2024), section 3 and microsoft/MInference
(minference_forward.py). A pattern is a tuple: ("a_shape", sink, window), ("vertical_slash",
columns, diagonals) or ("block_sparse", blocks). Queries go in blocks of 64 at absolute multiples; a
block reads whatever its pattern shows to any of its queries (the published kernels do the same),
and itself causally.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.base.checks import integer
from engine.base.errors import SettingError
from kernels.rows.forms import key_floats

Pattern = tuple[Any, ...]  # (kind, sizes ...)

BLOCK = 64
LAST = 64  # newest queries of a chunk, from which columns and diagonals are ranked
# published, for heads that no table names
DEFAULT: Pattern = ("vertical_slash", 1000, 6096)
# published minima
LEAST = {"vertical_slash": (30, 50), "a_shape": (30, 50), "block_sparse": (1,)}
FIRST_COLUMNS, NEAR_DIAGONALS = 30, 100  # always among the chosen, as published


def checked(pattern: Any) -> Pattern:
    """The pattern as a tuple. Raises SettingError where it is none."""
    pattern = tuple(pattern) if isinstance(pattern, (tuple, list)) else (pattern,)
    kind = pattern[0] if pattern and isinstance(pattern[0], str) else ""
    if kind not in LEAST or len(pattern) != 1 + len(LEAST[kind]):
        raise SettingError(
            f"patterns: found {pattern!r}, expected ('vertical_slash', columns, diagonals), "
            "('a_shape', sink, window) or ('block_sparse', blocks)"
        )
    for size in pattern[1:]:
        integer(f"patterns: {kind}", size, 1)
    return pattern


def sizes(pattern: Pattern, stop: int, share: float | None = None) -> tuple[int, ...]:
    """The pattern's sizes where `stop` tokens are seen: at least the published minima, at most all.
    share: scales them to add up to that share of the tokens.
    """
    kind, *given = pattern
    unit = BLOCK if kind == "block_sparse" else 1
    scale = 1.0 if share is None else share * stop / (sum(given) * unit)
    most = -(-stop // unit)
    return tuple(
        min(most, max(least, int(size * scale))) for size, least in zip(given, LEAST[kind])
    )


def line_sums(
    q: torch.Tensor, k: torch.Tensor, stop: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest queries summed along columns and along diagonals: two float32 [H,
    stop].

    q [R, H, D]: the queries at positions stop-R .. stop-1; k [Hkv, >= stop, D]. Diagonal d holds
    the pairs (i, i - d). One K/V head's weights exist at a time; memory: `line_sums_bytes`.
    """
    count, heads, dim = q.shape
    group = heads // len(k)
    columns, diagonals = torch.zeros(2, heads, stop, device=q.device)
    later = torch.arange(stop, device=q.device) > torch.arange(
        stop - count, stop, device=q.device
    ).unsqueeze(1)
    for head in range(len(k)):
        own = slice(head * group, (head + 1) * group)
        logits = q[:, own].float().transpose(0, 1) @ key_floats(k[head, :stop]).t()
        weights = torch.softmax(logits.mul_(scale).masked_fill_(later, float("-inf")), -1)
        del logits
        columns[own] = weights.sum(1)
        for i in range(count):
            seen = stop - count + i + 1
            diagonals[own, :seen] += weights[:, i, :seen].flip(-1)
        del weights
    return columns, diagonals


def line_sums_bytes(heads: int, kv_heads: int, dim: int, itemsize: int, stop: int) -> int:
    """Return the most bytes that `line_sums` holds at a time for a prompt of `stop` tokens."""
    logits = 4 * heads // kv_heads * LAST
    wide = 4 * dim if itemsize < 4 else 0
    # both sums of all heads, what a query does not see, and a head's K, logits and weights
    return stop * (8 * heads + LAST + logits + max(wide, logits))


class Lines:
    """What one head reads: tokens `rows` (bool [stop]) in every block, and the diagonals (int64,
    ascending), which move with the block.
    """

    def __init__(self, rows: torch.Tensor, diagonals: torch.Tensor | None = None):
        self.rows, self.diagonals = rows, diagonals

    def past(self, first: int, last: int) -> torch.Tensor:
        """Positions below `first` that the block of queries first .. last-1 reads, ascending
        int64.
        """
        seen = self.rows[:first].clone()
        if self.diagonals is not None:
            edges = torch.zeros(first + 1, dtype=torch.int64, device=seen.device)
            low, high = ((at - self.diagonals).clamp(0, first) for at in (first, last))
            one = torch.ones_like(low)
            seen |= edges.index_add_(0, low, one).index_add_(0, high, -one).cumsum(0)[:first] > 0
        return seen.nonzero().squeeze(1)


def vertical_slash(
    columns: torch.Tensor, diagonals: torch.Tensor, vertical: int, slash: int
) -> Lines:
    """The `vertical` columns and `slash` diagonals of largest sum (each float32 [stop]), always
    with the first columns and nearest diagonals.
    """
    chosen = []
    for sums, forced, count in (
        (columns, FIRST_COLUMNS, vertical),
        (diagonals, NEAR_DIAGONALS, slash),
    ):
        sums = sums.clone()
        near = min(forced, len(sums))
        sums[:near] = (
            float("inf") if count >= near else torch.arange(near, 0, -1, device=sums.device) * 1e30
        )
        chosen.append(torch.topk(sums, count).indices)
    rows = torch.zeros(len(columns), dtype=torch.bool, device=columns.device)
    rows[chosen[0]] = True
    return Lines(rows, chosen[1])


def a_shape(stop: int, sink: int, window: int, device: torch.device) -> Lines:
    """The first `sink` tokens and the newest `window` of every query."""
    rows = torch.arange(stop, device=device) < sink
    return Lines(rows, torch.arange(min(window, stop), device=device))


class Pooled:
    """Block-sparse: a block of queries reads itself and the blocks-1 others with the mean key
    nearest to its mean query.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, start: int, blocks: int):
        """q [C, D] at positions from `start` on, k [T, D] of one head."""
        self.q, self.start, self.blocks = q, start, blocks
        self.means = (
            key_floats(k[: (start + len(q)) // BLOCK * BLOCK]).unflatten(0, (-1, BLOCK)).mean(1)
        )

    def past(self, first: int, last: int) -> torch.Tensor:
        """As Lines.past."""
        mean = self.q[first - self.start : last - self.start].float().mean(0)
        before = first // BLOCK
        nearest = torch.topk(self.means[:before] @ mean, min(self.blocks - 1, before)).indices
        chosen = nearest.sort().values
        rows = (chosen.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=chosen.device)).flatten()
        # a block that a chunk's edge has cut
        inside = torch.arange(before * BLOCK, first, device=rows.device)
        return torch.cat((rows, inside))
