"""One random sequence of operations on sessions of one LLM, each compared with its model."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engine import Full, SamplingParams
from engine.errors import Busy, ContextTooLong, SettingError
from engine.llm import LLM
from engine.session import Session
from engine.watch import Watch
from tests.attack.interrupt import Interrupt, interrupted_after
from tests.attack.model import Model, Under, differences
from tests.builders import tiny_llm
from tests.engine.methods.method_table import TABLE

CAPACITY, VOCAB = 384, 97
MOST_SESSIONS = 3
LLMS: dict[int, LLM] = {}  # by chunk


@dataclass(frozen=True)
class Operation:
    """A name and a seed: what it does follows from these and from the session that it meets."""

    name: str
    seed: int


# how often each comes
WEIGHTS = {
    "prefill": 5,
    "part": 2,
    "decode": 4,
    "truncate": 4,
    "fork": 1,
    "switch": 3,
    "generate": 3,
    "zipped": 1,
    "check": 2,
    "backend": 1,
    "refresh": 1,
    "refused": 1,
    "broken_prompt": 2,
    "watch": 1,
}


@dataclass
class Counts:
    """What a run has done."""

    sequences: int = 0
    operations: int = 0
    checks: int = 0  # comparisons with the oracle
    interrupts: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.operations} operations, {self.checks} oracle "
            f"checks, {self.interrupts} interrupts"
        )


class Broken(Exception):
    """An exception of the consumer."""


class Wrong(AssertionError):
    """A session is not what it should be."""


def operations(seed: int) -> list[Operation]:
    """The operations of a seed."""
    rng = random.Random(seed)
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(5, 16))
    return [Operation("prefill", rng.getrandbits(48))] + [
        Operation(name, rng.getrandbits(48)) for name in names
    ]


def pick(rng: random.Random) -> Under:
    """A method of the table."""
    row = rng.choice(TABLE)
    return Under(rng.choice(row.sparse or (row.neutral,)), row)


def llm_of(chunk: int) -> LLM:
    """The LLM of this chunk size, made once."""
    if chunk not in LLMS:
        LLMS[chunk] = tiny_llm(Full(), chunk=chunk, max_context=CAPACITY, threads=1)
    return LLMS[chunk]


@dataclass
class Sequence:
    """Sessions and their models, under one seed. log: what was done, in words."""

    seed: int
    counts: Counts = field(default_factory=Counts)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"world {self.seed}")
        self.llm = llm_of(rng.choice([16, 32, 64, 100]))
        self.offload = rng.choice(["device", "host"])
        # placement must not change an answer
        self.oracle_offload = rng.choice(["device", "host"])
        self.backend = rng.choice(["auto", "auto", "reference"])
        under = pick(rng)
        session = self.llm.session(under.method, offload=self.offload)
        if self.backend != "auto":
            session.set_backend(self.backend)
        self.live: list[tuple[Session, Model]] = [(session, Model(under))]
        self.log.append(
            f"chunk {self.llm.chunk}, {self.offload} (oracle {self.oracle_offload}), "
            f"{self.backend}, {under.method!r}"
        )

    def run(self, todo: list[Operation]) -> None:
        """Do all of it, and compare at the end. Raises Wrong, or what the engine raises."""
        try:
            self.counts.sequences += 1
            for operation in todo:
                self.rng = random.Random(operation.seed)
                at = self.rng.randrange(len(self.live))
                self.session, self.model = self.live[at]
                self.lines = None
                if self.rng.random() < 0.3:  # most operations run a few thousand lines
                    self.lines = int(10 ** self.rng.uniform(0.5, 4.3))
                self.log.append(f"[{at}] {len(self.session)} tokens: {operation.name}")
                self.counts.operations += 1
                getattr(self, "do_" + operation.name)()
                self.settle()
                if self.rng.random() < 0.3:
                    self.compare(self.session, self.model)
            for session, model in self.live:
                self.compare(session, model)
        finally:
            for session, _ in self.live:
                session.close()

    # ---------------------------------------------------------------- what must always hold

    def say(self, words: str) -> None:
        """Add to the line of this operation."""
        self.log[-1] += " " + words

    def require(self, true: bool, words: str) -> None:
        """Raise Wrong where it is not."""
        if not true:
            raise Wrong(words)

    def settle(self) -> None:
        """Nothing is held, and the session's tokens are the model's."""
        if not self.llm._lock.free:
            gc.collect()
        self.require(self.llm._lock.free, "the LLM was left busy")
        mine, due = self.session.ids, self.model.ids
        self.require(mine == due, f"{len(mine)} tokens, should be {len(due)}")

    def compare(self, session: Session, model: Model) -> None:
        """Compare the next steps with those of a fresh session."""
        if model.inexact is not None or not model.ids or not model.replayable:
            return
        self.counts.checks += 1
        with model.replay(self.llm, self.oracle_offload, self.backend) as fresh:
            probe = tuple(self.rng.choices(range(VOCAB), k=3))
            found = differences(session, fresh, model.logits, probe)
        self.require(not found, found)

    def tokens(self, most: int) -> list[int]:
        """Random ids, at most so many and as many as there is room for."""
        room = min(most, self.session.capacity - len(self.session))
        return self.rng.choices(range(VOCAB), k=self.rng.randint(1, room)) if room else []

    def attempt(self, work) -> tuple[object, bool]:
        """(result, whether it was interrupted) of work(), at the line that this operation drew.
        Refusals count as done: (None, False).
        """
        try:
            with interrupted_after(self.lines) as countdown:
                result = work()
        except Interrupt as error:
            self.counts.interrupts += 1
            self.say(f"interrupted at {str(error).rpartition('engine/')[2]}")
            return None, True
        except SettingError as error:
            self.say(f"refused: {str(error)[:60]}")
            return None, False
        if countdown.hit:
            self.counts.interrupts += 1
            raise Wrong("the interrupt was swallowed")
        return result, False

    # ---------------------------------------------------------------- operations

    def read(self, ids: list[int], more: bool, work) -> None:
        """Run work(), which reads ids, and note what was read of them."""
        session, model, at = self.session, self.model, len(self.session)
        self.say(f"{len(ids)}{' and more' if more else ''}")
        _, broken = self.attempt(work)
        read = session.ids[at:]
        self.require(session.ids[:at] == model.ids and read == ids[: len(read)], "other tokens")
        opened = session.history.prompt_is_open(len(session.committed))
        opened = opened and session.history.unfinished is None
        if broken and read:
            whole = len(read) == len(ids) or len(read) % self.llm.chunk == 0
            self.require(whole or self.session.runtime.needs.one_chunk, "part of a chunk")
            model.interrupted(read, len(ids), opened)
        elif read:
            model.add("prefill", read, more)

    def do_prefill(self) -> None:
        ids = self.tokens(self.rng.choice([2, 40, 200]))
        if ids:
            self.read(ids, False, lambda: self.session.prefill(ids))

    def do_part(self) -> None:
        ids = self.tokens(self.rng.choice([2, 40, 200]))
        if ids:
            self.read(ids, True, lambda: self.session.prefill(ids, more=True))

    def do_broken_prompt(self) -> None:
        ids = self.tokens(250)
        if not ids:
            return
        left, error = self.rng.randint(1, 4), self.rng.choice([Interrupt, Broken, MemoryError])
        self.lines = None

        def progress(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise error("from progress")

        def work() -> None:
            try:
                self.session.prefill(ids, progress)
            except (Broken, MemoryError):
                raise Interrupt from None

        self.read(ids, False, work)

    def do_decode(self) -> None:
        for token in self.tokens(12):
            at = len(self.session)
            _, broken = self.attempt(lambda token=token: self.session.decode(token))
            if len(self.session) > at:
                self.model.add("decode", [token])
                self.model.logits = not broken
            if broken:
                self.lines = None
                self.reopened()
                return

    def reopened(self) -> None:
        """An interrupted step may have ended a prompt that was to go on, or not."""
        model, history = self.model, self.session.history
        if model.events and model.events[-1].more and history.unfinished is None:
            last = model.events[-1]
            opened = history.prompt_is_open(len(self.session))
            model.events[-1] = type(last)(last.kind, last.under, last.ids, opened)

    def do_truncate(self) -> None:
        n, rng = len(self.session), self.rng
        ends = [point.length for point in self.session.history.savepoints if point.length <= n]
        to = rng.choice([rng.randint(0, n), max(0, n - rng.randint(1, 6)), *ends])
        self.say(f"to {to}")
        self.attempt(lambda: self.session.truncate(to))
        if len(self.session) == to:
            self.model.truncate(to)

    def do_switch(self) -> None:
        under = pick(self.rng)
        self.say(f"to {under.method!r}")
        before, switched = self.session.method, []

        def work() -> None:
            self.session.set_method(under.method)
            switched.append(True)

        self.attempt(work)
        if switched or (self.session.method == under.method and before != under.method):
            self.model.switch(under)

    def do_backend(self) -> None:
        self.attempt(lambda: self.session.set_backend("reference"))
        self.session.set_backend(self.backend)

    def do_fork(self) -> None:
        if len(self.live) < MOST_SESSIONS:
            copy, _ = self.attempt(self.session.fork)
            if copy is not None:
                same = ("capacity", "backend", "method", "watch")
                for name in same:
                    mine, theirs = getattr(copy, name), getattr(self.session, name)
                    self.require(mine == theirs, f"the fork's {name} is {mine!r}, not {theirs!r}")
                self.live.append((copy, self.model.copy()))

    def do_check(self) -> None:
        session = self.session
        chosen = {layer: rows.tolist() for layer, rows in session.selections.items()}
        done = {layer: scores.tolist() for layer, scores in session.selection_scores.items()}
        again = session.history.unfinished is not None
        self.attempt(lambda: session.check(self.rng.randint(1, 8)))
        if not again:
            same = {layer: rows.tolist() for layer, rows in session.selections.items()} == chosen
            scores = {k: v.tolist() for k, v in session.selection_scores.items()} == done
            self.require(same and scores, "check changed the selection")

    def do_refresh(self) -> None:
        if len(self.session):
            self.attempt(self.session.refresh_logits)
            # by full attention, whatever read the prompt
            switched = any(event.kind == "switch" for event in self.model.events)
            self.model.logits = not (switched or self.model.under.row.approximate)

    def do_watch(self) -> None:
        self.session.watch = self.rng.choice([None, Watch(every=3)])

    def do_refused(self) -> None:
        session, room = self.session, self.session.capacity - len(self.session)
        for bad, error in (
            (lambda: session.prefill([1] * (room + 1)), ContextTooLong),
            (lambda: session.prefill([VOCAB]), SettingError),
            (lambda: session.decode(-1), SettingError),
            (lambda: session.truncate(len(session) + 1), SettingError),
        ):
            try:
                bad()
            except error:
                continue
            raise Wrong("was not refused")

    # ---------------------------------------------------------------- answers

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
        if read:
            self.require(read == ids[: len(read)], "other tokens than the prompt's")
            if len(read) < len(ids):
                self.model.interrupted(read, len(ids), False)
            else:
                self.model.add("prefill", read)
        for token in self.session.ids[at + len(ids) :]:
            self.model.add("decode", [token])
        self.model.logits = False

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
