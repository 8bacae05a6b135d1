"""One random sequence of operations on sessions of one LLM, each compared with its model."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field, replace

from engine import Full
from engine.base.errors import ContextTooLong, SettingError
from engine.llm import LLM
from engine.methods.mass_meter import Watch
from engine.session.session import Session
from tests.builders import session_config, tiny_llm
from tests.engine.methods.method_table import OF_SESSIONS
from tests.programs.attack.answers import VOCAB, Answers, Broken, Wrong
from tests.programs.attack.interrupt import PLACES, Interrupt, interrupted_after
from tests.programs.attack.model import Model, Under, differences, windows
from tests.programs.attack.rounding import one_rounding

CAPACITY = 384
MOST_SESSIONS = 3
LLMS: dict[tuple[int, str], LLM] = {}  # by chunk and form of the bank's rows


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
    "back_and_on": 3,
}


@dataclass
class Counts:
    """What a run has done."""

    sequences: int = 0
    operations: int = 0
    checks: int = 0  # comparisons with the oracle
    interrupts: int = 0
    skipped: int = 0  # comparisons that a method's documented limits leave no oracle for

    def __iadd__(self, other: Counts) -> Counts:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences, {self.operations} operations, {self.checks} oracle "
            f"checks ({self.skipped} left out), {self.interrupts} interrupts"
        )


def operations(seed: int) -> list[Operation]:
    """The operations of a seed."""
    rng = random.Random(seed)
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(5, 16))
    return [Operation("prefill", rng.getrandbits(48))] + [
        Operation(name, rng.getrandbits(48)) for name in names
    ]


def pick(rng: random.Random, looks_back: bool = False) -> Under:
    """A method of the table. looks_back: of those that read past queries."""
    rows = [
        row for row in OF_SESSIONS if not looks_back or any(max(windows(m)) for m in row.sparse)
    ]
    row = rng.choice(rows)
    method = rng.choice(row.sparse or (row.neutral,))
    if row.evicts:
        method = replace(method, forget=rng.random() < 0.6)
    return Under(method, row)


def llm_of(chunk: int, bank: str) -> LLM:
    """The LLM of this chunk size and form of rows, made once."""
    if (chunk, bank) not in LLMS:
        settings = dict(chunk=chunk, bank=bank, max_context=CAPACITY, threads=1)
        # heads that rows of 4 bits can have
        config = session_config(head_dim=32) if bank == "int4" else None
        LLMS[chunk, bank] = tiny_llm(Full(), config, **settings)
    return LLMS[chunk, bank]


@dataclass
class Sequence(Answers):
    """Sessions and their models, under one seed. log: what was done, in words."""

    seed: int
    counts: Counts = field(default_factory=Counts)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"world {self.seed}")
        chunk = rng.choice([16, 32, 64, 100])
        self.offload = rng.choice(["device", "host"])
        # placement must not change an answer
        self.oracle_offload = rng.choice(["device", "host"])
        self.backend = rng.choice(["auto", "auto", "reference"])
        under = pick(rng)
        self.bank = rng.choice(["auto", "auto", "auto", "int8", "int8", "int4", "fp8"])
        self.llm = llm_of(chunk, self.bank)
        session = self.llm.session(under.method, offload=self.offload)
        if self.backend != "auto":
            session.set_backend(self.backend)
        self.live: list[tuple[Session, Model]] = [(session, Model(under))]
        self.log.append(
            f"chunk {chunk}, bank {self.bank}, {self.offload} (oracle {self.oracle_offload}), "
            f"{self.backend}, {under.method!r}"
        )

    def run(self, todo: list[Operation]) -> None:
        """Do all of it, and compare at the end. Raises Wrong, or what the engine raises."""
        try:
            with one_rounding():
                self.run_all(todo)
        finally:
            for session, _ in self.live:
                session.close()

    def run_all(self, todo: list[Operation]) -> None:
        """Do all of it, and compare at the end."""
        self.counts.sequences += 1
        for operation in todo:
            self.rng = random.Random(operation.seed)
            at = self.rng.randrange(len(self.live))
            self.session, self.model = self.live[at]
            self.draw_interrupt()
            self.log.append(f"[{at}] {len(self.session)} tokens: {operation.name}")
            self.counts.operations += 1
            getattr(self, "do_" + operation.name)()
            self.settle()
            if self.rng.random() < 0.3:
                self.compare(self.session, self.model)
        for session, model in self.live:
            self.compare(session, model)

    def draw_interrupt(self) -> None:
        """Draw whether and where the operation is interrupted."""
        self.lines, self.place = None, ()
        if self.rng.random() < 0.3:  # most operations run a few thousand lines
            self.lines = int(10 ** self.rng.uniform(0.5, 4.3))
            if self.rng.random() < 0.5:  # and some hundred in one place
                self.place = self.rng.choice(PLACES)
                self.lines = int(10 ** self.rng.uniform(0, 2.7))

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
        if not model.ids:
            return
        if model.inexact is not None or model.guesses or not model.replayable:
            self.counts.skipped += 1
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
            with interrupted_after(self.lines, self.place) as countdown:
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
        opened = self.left_open()
        model.reserve(at + len(ids))
        if broken and read:
            whole = len(read) == len(ids) or len(read) % self.llm.chunk == 0
            needs = self.session.runtime.needs  # SirLLM's chunks are its segments
            self.require(whole or needs.one_chunk or needs.outputs, "part of a chunk")
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
        if model.events and model.events[-1].more and history.pending is None:
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

    def do_back_and_on(self) -> None:
        """A prompt, a truncate, a switch and steps, with nothing between them."""
        for work in (self.do_long, self.do_truncate, self.do_look_back, self.do_decode):
            self.say(f"[{len(self.session)}] {work.__name__}")
            work()
            self.settle()
            self.lines = None  # one interrupt

    def do_long(self) -> None:
        if ids := self.tokens(250):
            self.read(ids, False, lambda: self.session.prefill(ids))

    def do_look_back(self) -> None:
        self.do_switch(pick(self.rng, self.rng.random() < 0.5))

    def do_switch(self, under: Under | None = None) -> None:
        under = under or pick(self.rng)
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
        again = session.history.pending is not None
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
