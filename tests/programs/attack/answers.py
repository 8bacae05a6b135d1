"""Answers of a random sequence: taken whole, left early, thrown into, dropped, by several threads,
in turn with another session's.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine import SamplingParams
from engine.base.errors import Busy

VOCAB = 97


class Broken(Exception):
    """An exception of the consumer."""


class Wrong(AssertionError):
    """A session is not what it should be."""


class Answers:
    """The operations that generate. session, model: those of the operation under way; lines: where
    it is interrupted. The rest is Sequence's.
    """

    session: Any
    model: Any
    lines: int | None

    def params(self) -> SamplingParams:
        """Random settings of an answer."""
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice([0, 0.7]),
            top_k=rng.choice([0, 5]),
            seed=rng.randrange(2**62),
            ignore_eos=True,
        )

    def do_generate(self) -> None:
        ids, params, take = self.tokens(40), self.params(), self.rng.randint(0, 10)
        if not ids:
            return
        how = self.rng.choice(["all", "close", "throw", "drop", "threads", "stop"])
        self.say(f"{how}, {take} pieces after {len(ids)} tokens")
        calls = iter(range(1, 100))
        stop = (lambda: next(calls) > take) if how == "stop" else None
        if how == "threads":
            self.lines = None  # an interrupt is for one thread
        at = len(self.session)
        self.attempt(
            lambda: self.consume(self.session.generate(ids, params, None, stop), how, take)
        )
        gc.collect()
        self.account(at, ids)

    def account(self, at: int, ids: list[int]) -> None:
        """Note what an answer has left behind."""
        read = self.session.ids[at : at + len(ids)]
        self.model.reserve(at + len(ids))
        if read:
            self.require(read == ids[: len(read)], "other tokens than the prompt's")
            if len(read) < len(ids):
                self.model.interrupted(read, len(ids), self.left_open())
            else:
                self.model.add("prefill", read)
        for token in self.session.ids[at + len(ids) :]:
            self.model.add("decode", [token])
        self.model.logits = False

    def left_open(self) -> bool:
        """Whether the prompt that was interrupted is to go on, as KVzip's is."""
        history = self.session.history
        return history.pending is None and history.prompt_is_open(len(self.session.committed))

    def consume(self, pieces, how: str, take: int) -> None:
        """Take pieces of an answer, and leave it in one of several ways."""
        if how in ("all", "stop"):
            reasons = [piece.finish_reason for piece in pieces]
            self.require(reasons[-1] is not None, "an answer without an end")
            return
        if how == "threads":
            with ThreadPoolExecutor(2) as one, ThreadPoolExecutor(1) as other:
                for number in range(take):
                    thread = one if number % 2 else other
                    if thread.submit(next, pieces, None).result() is None:
                        return
                    if number == 1:
                        refused = one if thread is other else other
                        self.busy(refused)
                other.submit(pieces.close).result()
            return
        for _ in range(take):
            if next(pieces, None) is None:
                return
        if how == "close":
            pieces.close()
        elif how == "throw":
            try:
                pieces.throw(Broken())
            except Broken:
                pass

    def busy(self, thread: ThreadPoolExecutor) -> None:
        """Another thread than that of the last piece may not begin something else."""
        session = self.live[0][0]
        try:
            thread.submit(session.truncate, len(session)).result()
        except Busy:
            return
        raise Wrong("a second request was let in")

    def do_zipped(self) -> None:
        """Two sessions' answers, piece by piece in turn."""
        others = [pair for pair in self.live if pair[0] is not self.session]
        if not others or not (ids := self.tokens(20)):
            return
        mine, (session, model) = (self.session, self.model), self.rng.choice(others)
        more = self.rng.choices(range(VOCAB), k=min(len(ids), session.capacity - len(session)))
        if not more:
            return
        starts = len(self.session), len(session)
        params = self.params()
        self.lines = None

        def work() -> None:
            turns = [self.session.generate(ids, params), session.generate(more, params)]
            while turns:
                turns = [pieces for pieces in turns if next(pieces, None) is not None]

        self.attempt(work)
        gc.collect()
        self.account(starts[0], ids)
        self.session, self.model = session, model
        self.account(starts[1], more)
        self.settle()
        self.session, self.model = mine
