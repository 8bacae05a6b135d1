"""What full attention accepts of the drafts, on real text: by kind of text, method and position.

A document is read once by full attention; every method then answers from the same bank, and every
answer is full attention's own, so all methods draft the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine import LLM, Exact, Full, SamplingParams
from engine.session.generate import generate
from engine.session.session import Session
from tools.common.documents import Text


@dataclass
class Accepted:
    """What became of the drafts of one answer. cycles: (drafted, accepted) of each verification
    whose drafts were all judged.
    """

    kind: str
    length: int
    method: str
    temperature: float
    seconds: float
    tokens: int
    cycles: list[tuple[int, int]] = field(default_factory=list)

    def by_position(self, most: int) -> list[float]:
        """Share of cycles that accepted draft i and all before it, i = 1 .. most."""
        return by_position(self.cycles, most)


def by_position(cycles: Sequence[tuple[int, int]], most: int) -> list[float]:
    """Share of cycles whose first i drafts were accepted, of those that drafted i, i = 1 .. most;
    0.0 where none did.
    """
    shares = []
    for i in range(1, most + 1):
        reached = [accepted >= i for drafted, accepted in cycles if drafted >= i]
        shares.append(sum(reached) / len(reached) if reached else 0.0)
    return shares


def cycles_of(session: Session, params: SamplingParams) -> list[tuple[int, int]]:
    """(drafted, accepted) of every cycle of an answer but the last."""
    counters, found = session.counters, []
    cycles, drafted, accepted = counters.cycles, counters.drafted, counters.accepted
    open_cycle: int | None = None
    for _ in generate(session, [], params):
        if counters.cycles > cycles:
            if open_cycle is not None:
                found.append((open_cycle, counters.accepted - accepted))
            open_cycle = counters.drafted - drafted
            cycles, drafted, accepted = counters.cycles, counters.drafted, counters.accepted
    return found


def measure(
    llm: LLM,
    texts: Sequence[Text],
    methods: Sequence[tuple[str, Exact]],
    draft: int,
    tokens: int,
    temperatures: Sequence[float],
    say: Callable[[str], None],
) -> Iterator[Accepted]:
    """Every method's drafts on every text at every temperature, an answer of `tokens` tokens each.

    methods: (name, exact mode with `draft` drafts; without lookup the drafter alone is measured).
    Raises AssertionError where an answer is not full
    attention's.
    """
    for text in texts:
        n = len(text.ids)
        with llm.session(Full()) as session:
            session.prefill(text.ids)
            wanted: dict[float, list[int]] = {}
            for temperature in temperatures:
                params = SamplingParams(
                    max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True
                )
                list(generate(session, [], params))
                wanted[temperature] = session.ids[n:]
                session.truncate(n)
            for name, method in methods:
                session.set_method(method)
                for temperature in temperatures:
                    params = SamplingParams(
                        max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True
                    )
                    began = time.thread_time()
                    cycles = cycles_of(session, params)
                    seconds = time.thread_time() - began
                    same = session.ids[n:] == wanted[temperature]
                    session.truncate(n)
                    row = Accepted(text.kind, n, name, temperature, seconds, tokens, cycles)
                    shares = " ".join(f"{x:.2f}" for x in row.by_position(draft))
                    say(
                        f"{text.name} {n} {name} t={temperature:g}: {shares} "
                        f"mean {sum(row.by_position(draft)):.2f} of {draft}"
                        f"{'' if same else ' (tokens differ from the plain loop)'}"
                    )
                    yield row
