"""Heads name their best tokens in turns, each token once, until there are enough: one list of all
heads (LessIsMore, Yang et al. 2025, arXiv 2508.07101, section 4). One call of C++ on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.library import Binding, Case, check, loaded
from kernels.select.topk import select_topk

BINDING = Binding("tokens that heads name in turns")


def name_in_turns(
    logits: torch.Tensor,
    first: int,
    stop: int,
    count: int,
    scores: torch.Tensor,
    out: torch.Tensor,
    backend: str = "auto",
) -> int:
    """Choose the tokens below `first` and `count` of first .. stop-1, or all: the heads' best ones,
    then their second ones, and so on, in the order of the heads. Returns how many were chosen.

    logits float32 [H, >= stop], last dim contiguous: of equal ones the lower token is the better;
    0 <= first <= stop; scores float32 [>= stop]: room that torch's operators use; out int32 [K],
    contiguous: takes the tokens, ascending, and then -1; K is at least what is chosen. Mutates
    scores and out. Raises ValueError for an unknown backend.
    """
    count = min(count, stop - first)
    if choose(backend, logits, BINDING.usable) == "native":
        _natively(logits, first, stop, count, out)
    else:
        _by_torch(logits, first, stop, count, scores, out, backend)
    return first + count


def _natively(logits: torch.Tensor, first: int, stop: int, count: int, out: torch.Tensor) -> None:
    assert logits.stride(1) == out.stride(0) == 1 and first + count <= len(out)
    out[first + count :] = -1
    code = loaded().omnikv_take_turns(
        ctypes.c_void_p(logits.data_ptr()), ctypes.c_long(logits.stride(0)), len(logits),
        first, stop, count, ctypes.c_void_p(out.data_ptr()),
    )  # fmt: skip
    check(code, "tokens that heads name")


def _by_torch(
    logits: torch.Tensor,
    first: int,
    stop: int,
    count: int,
    scores: torch.Tensor,
    out: torch.Tensor,
    backend: str,
) -> None:
    scores[first:stop] = float("-inf")
    scores[:first] = float("inf")
    heads = len(logits)
    best = out.new_empty(heads, count)
    lo, hi, most = (best.new_full((heads,), end) for end in (first, stop, count))
    select_topk(logits, lo, hi, most, best, torch.empty_like(lo), backend=backend)
    tokens = best.long()
    order = logits.gather(1, tokens).sort(dim=1, descending=True, stable=True).indices
    # [count, heads] in a row: a token's number in this order is its place
    named = tokens.gather(1, order).T.flatten()
    places = torch.arange(0, -len(named), -1, dtype=torch.float32, device=logits.device)
    scores.scatter_reduce_(0, named, places, "amax")
    lo, hi, most = (out.new_full((1,), end) for end in (0, stop, first + count))
    select_topk(scores[None], lo, hi, most, out[None], torch.empty_like(lo), backend=backend)


@BINDING.self_test
def _turns() -> Iterator[Case]:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).mul_(3).round_()
    found, expected = torch.zeros(2, 70, dtype=torch.int32)
    for first, stop, count in ((4, 290, 60), (0, 300, 1), (4, 40, 36)):
        _natively(logits, first, stop, count, found)
        _by_torch(logits, first, stop, count, torch.empty(300), expected, "reference")
        yield f"{count} tokens that heads name", found, expected, torch.int32
