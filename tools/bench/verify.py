"""Is the timed path right? Before anything is timed it is compared with the reference launchers,
token by token, over the same bank and the same choice.

A rounding moves tokens at the edge of a choice, and with them the logits. So the reference computes
with what the timed path chose, and what it would have chosen itself is compared beside that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from engine.bank.base import own_rows
from engine.methods.base import Runtime
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.select.base import Selecting, Selection
from tools.common.planted_selection import ReplayRuntime

# share of a choice that two paths must have in common; measured in 16 bits on random rows: 0.9 to 1
SAME = 0.75
# tokens that may always differ: of a choice of one, a tie moves all
FEW = 1


class Mismatch(Exception):
    """The timed path and the reference disagree: the times mean nothing."""


def verify(contestant: Any, steps: int | None = None) -> dict[str, float]:
    """Compare the timed path with the eager reference launchers on the same bank.

    Both paths are fed the same tokens and read the same choice, the timed path's. Tokens must be
    equal, except where the reference's own gap between the two is below twice the largest
    difference of the logits; that difference must stay within what rounding does (measured: 0.1 to
    0.2 of their spread in 16 bits, 1e-5 in float32; allowed: 0.4 and 0.01). Of every choice SAME
    must be what the reference would have chosen. Returns {"largest_logit_difference",
    "selections_agree": the smallest such share, where anything is chosen}. Raises Mismatch.
    """
    session, n = contestant.session, contestant.n
    # the reference is slow: seconds a step at 128K on a CPU
    steps = steps or (4 if n <= 16384 else 2 if n <= 65536 else 1)
    fed, fast, chosen = [session.ids[-1]], [], []
    try:
        contestant.back()
        for _ in range(steps):
            fast.append(session.decode(fed[-1]).clone())
            fed.append(int(fast[-1].argmax()))
            chosen.append(what_was_chosen(session.runtime))
        contestant.back()
        session.set_backend("reference")
        return _compare(contestant, fed, fast, chosen)
    finally:
        contestant.back()
        session.set_backend("auto")


def _compare(
    contestant: Any, fed: list[int], fast: list[torch.Tensor], chosen: list[Any]
) -> dict[str, float]:
    """Run the reference over what was fed and chosen, and compare its logits with `fast`."""
    session, n, worst, shares = contestant.session, contestant.n, 0.0, []
    allowed = 0.01 if contestant.llm.dtype is torch.float32 else 0.4
    for number, (token, got, choice) in enumerate(zip(fed, fast, chosen)):
        with Forced(session.runtime, choice) as forced:
            want = session.decode(token)
        difference = (got - want).abs().max().item()
        worst = max(worst, difference)
        shares += forced.shares
        if forced.apart:
            raise Mismatch(
                f"selection at {n} tokens: the timed path shares {min(forced.shares):.1%} with the "
                "reference"
            )
        gap = (want.max() - want[fed[number + 1]]).item()
        if not difference <= allowed * want.std().item() or gap > 2 * difference:
            raise Mismatch(
                f"step {number} at {n} tokens: the timed path says token {fed[number + 1]}, the "
                f"reference {int(want.argmax())} (largest logit difference {difference:.3g}, "
                f"spread {want.std().item():.3g})"
            )
    facts = {"largest_logit_difference": worst}
    return facts | {"selections_agree": min(shares)} if shares else facts


def what_was_chosen(runtime: Runtime) -> Any:
    """What the last step chose to read, or a method that evicts to keep: a copy."""
    return runtime.state() if isinstance(runtime, EvictingRuntime) else runtime.choice()


class Forced:
    """While it is entered, a runtime's steps read a recorded choice instead of their own, which is
    made all the same. A method that evicts takes over the recorded store when it is left.

    shares: of each own choice, the part that the recorded one has too. apart: whether any of them
    shares less than SAME and differs by more than FEW. A method that chooses nothing runs as ever.
    """

    def __init__(self, runtime: Runtime, choice: Any):
        self.runtime, self.choice = runtime, choice
        self.shares: list[float] = []
        self.apart = False
        self._hooks = ExitStack()

    def __enter__(self) -> Forced:
        runtime = self.runtime
        if isinstance(runtime, Selecting):
            self._hook("select", self._select)
        elif isinstance(runtime, OmniKVRuntime) and not isinstance(runtime, ReplayRuntime):
            self._hook("choose", self._choose)
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        self._hooks.close()
        if kind is None and isinstance(self.runtime, EvictingRuntime):
            for mine, theirs in zip(_stores(self.runtime.state()), _stores(self.choice)):
                self._count(mine, theirs)
            self.runtime.load(self.choice, None)

    def _hook(self, name: str, forced: Any) -> None:
        self._own = getattr(self.runtime, name)
        self._hooks.enter_context(mock.patch.object(self.runtime, name, forced))

    def _select(self, layer: int, q: torch.Tensor, step: Any) -> Selection:
        own, recorded = self._own(layer, q, step), self.choice[self.runtime.plan.group_of[layer]]
        if own.index is not None and recorded.index is not None:
            for mine, theirs in zip(_lists(own), _lists(recorded)):
                self._count(mine, theirs)
        return recorded

    def _choose(self, group: int, *arguments: Any) -> None:
        self._own(group, *arguments)
        runtime, groups = self.runtime, len(self.runtime.plan.groups)
        index, counts = self.choice[1 + group], self.choice[1 + groups + group]
        mine, theirs = int(runtime.counts[group][0]), int(counts[0])
        self._count(runtime.index[group][0, 0, :mine], index[0, 0, :theirs])
        runtime.index[group].copy_(index)
        runtime.counts[group].copy_(counts)

    def _count(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare two choices, int [k] each."""
        longer = max(len(mine), len(theirs))
        if not longer:
            return
        same = int(torch.isin(mine, theirs).sum())
        self.shares.append(same / longer)
        self.apart |= same < SAME * longer and longer - same > FEW


def _lists(chosen: Selection) -> Iterator[torch.Tensor]:
    """The entries of every list of every sequence, int [k] each."""
    assert chosen.index is not None and chosen.counts is not None
    for index, counts in zip(chosen.index, chosen.counts):
        for rows in own_rows(index, counts):
            yield rows[rows >= 0]


def _stores(state: Any) -> list[torch.Tensor]:
    """The positions that every K/V head of a state of EvictingRuntime holds, layer by layer."""
    return [head for layer in state[3] or () for part in layer for head in part[2]]
