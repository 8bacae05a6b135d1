"""What would be accepted of drafts that begin at any token of an answer: one table for every draft
length, since greedy drafts from a position are the same however the cycles before it went.

Full attention answers; then drafts begin after each of its tokens, and a draft ends where it
differs from the answer. From the accepted counts the cycles of any draft length follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine import Exact, Full
from engine.base.errors import EngineError
from engine.exact.prompt_lookup import PromptLookup
from engine.exact.runner import ExactRunner
from engine.methods.base import Method
from engine.methods.exact import MOST_DRAFTS
from engine.session.session import Session


class Known:
    """Stands for the sampler of an answer that is known: a guess is judged at once, and the first
    wrong one ends the draft. forced: every guess is the known token; its logits are kept.
    """

    def __init__(self, tokens: Sequence[int], forced: bool = False):
        self.tokens, self.forced = tokens, forced
        self.left, self.logits = MOST_DRAFTS, []  # type: ignore[var-annotated]

    @contextmanager
    def drafting(self) -> Iterator[Callable[[torch.Tensor], int]]:
        """As Sampler.drafting."""
        at = iter(self.tokens)

        def guess(logits: torch.Tensor) -> int:
            wanted = next(at, -1)
            if self.forced:
                self.logits.append(logits.clone())
            elif int(logits.argmax()) != wanted:
                raise EngineError("a wrong guess")
            return wanted

        yield guess


@dataclass
class Starts:
    """Drafts from every token of one answer. accepted[i]: right ones, 0 to 7, of a draft that
    begins after token i; looked_up: the same of what follows the newest three tokens where they
    occurred before, -1 where they did not. choice: where a draft's selection comes from.
    """

    kind: str
    length: int
    filters: str
    share: float
    choice: str
    dtype: str
    accepted: list[int]
    looked_up: list[int]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)


def cycles(accepted: Sequence[int], draft: int) -> list[int]:
    """Accepted drafts of each cycle of an answer whose cycles draft `draft` tokens; a last cycle
    that has fewer tokens left than drafts is left out.
    """
    found, at = [], 0
    while at + draft < len(accepted):
        found.append(min(accepted[at], draft))
        at += 1 + found[-1]
    return found


def answer(session: Session, ids: Sequence[int], tokens: int) -> list[int]:
    """Full attention's greedy answer after a prompt, taken back again."""
    logits = session.prefill(ids)
    written: list[int] = []
    for _ in range(tokens):
        written.append(int(logits.argmax()))
        logits = session.decode(written[-1])
    session.truncate(len(ids))
    return written


Drafts = Callable[[ExactRunner, int, Known], int]


def own_drafts(runner: ExactRunner, n: int, known: Known) -> int:
    """Drafts of exact mode as it is: the first step chooses. Right ones after the n-th token."""
    return len(runner._guess(n, min(MOST_DRAFTS, len(known.tokens))))


def accepted(
    session: Session, method: Method, tokens: Sequence[int], drafts: Drafts = own_drafts
) -> list[int]:
    """Right drafts after each token of an answer but the last 7; the session ends as it began."""
    start, found = len(session), []
    session.set_method(Exact(method, lookup=False))
    runner = session.runner
    assert isinstance(runner, ExactRunner)
    for i, token in enumerate(tokens[:-MOST_DRAFTS]):
        n = start + i + 1
        known = Known(tokens[i + 1 : i + 1 + MOST_DRAFTS])
        session.write_with(known)  # type: ignore
        runner.feed(token, n)
        session.bank.before_step(n)
        found.append(drafts(runner, n, known))
        session.write_with(None)
        session.decode(token)
    session.truncate(start)
    session.set_method(Full())
    return found


def looked_up(ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """As `accepted`, of drafts that need no model; -1 where the newest tokens are new."""
    lookup, found = PromptLookup(), []
    for i, token in enumerate(tokens[:-MOST_DRAFTS]):
        drafts = lookup.drafts([*ids, *tokens[:i]], token, MOST_DRAFTS)
        right = 0
        while right < len(drafts) and drafts[right] == tokens[i + 1 + right]:
            right += 1
        found.append(right if drafts else -1)
    return found
