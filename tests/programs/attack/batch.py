"""One random sequence of operations on sessions of a batch, each beside a session alone to which
the same happens, uninterrupted.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine import Exact, Full, OmniKV, SamplingParams
from engine.base.errors import EngineError, SettingError
from engine.llm import LLM
from engine.methods.select.quest import Quest
from engine.runner.rewind import replay
from engine.session.session import Session
from tests.builders import session_config, tiny_llm
from tests.engine.methods.method_table import rows_for
from tests.programs.attack.answers import VOCAB, Wrong
from tests.programs.attack.interrupt import PLACES, Interrupt, interrupted_after
from tests.programs.attack.model import TOLERANCE, WINDOW
from tests.programs.attack.sequence import Operation

CAPACITY = 288
LAYERS = 6
SPARSE = OmniKV(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
METHODS = [
    *((row.name, method) for row in rows_for(LAYERS) for method in row.sparse or (row.neutral,)),
    ("exact", Exact(SPARSE, draft=3)),
    ("exact", Exact(SPARSE, draft="auto")),
    ("exact", Exact(Quest(tokens=80, page=8), draft=2, lookup=False)),
]
# (form of the bank's rows, launchers): how much of the sequences
WORLDS = {
    ("auto", "reference"): 3,
    ("int8", "reference"): 2,
    ("int4", "reference"): 2,
    ("auto", "auto"): 2,
}
BATCH_PLACES = (*PLACES, ("/engine/batch/", "/runner/step.py"))
MOST = 4  # sessions of a batch
LLMS: dict[tuple[str, str, int], LLM] = {}  # by form of rows, launchers and chunk

HELP = """\
Batches: every operation is done by a session of a batch and, uninterrupted, by a session alone, on
tiers drawn apart; tokens and logits are compared after each. On the reference launchers (float32,
int8 and int4 rows) they must be equal bit for bit: a session's rows are packed from the same bits
there, whoever shares its step, so that no rounding can flip. On the launchers of the machine
(float32 only) logits must agree within 2e-3 and greedy tokens must be equal. Where an interrupt
has cost queries that a method may look back at, and full attention computes them anew, the pair is
given up and counted as left out (docs/RELIABILITY.md)."""

# how often each comes
WEIGHTS = {
    "new": 3,
    "prefill": 3,
    "part": 1,
    "step": 9,
    "write": 4,
    "truncate": 3,
    "fork": 2,
    "switch": 3,
    "save": 2,
    "close": 1,
}


def operations(seed: int) -> list[Operation]:
    """The operations of a seed."""
    rng = random.Random(f"batch {seed}")
    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(3, 10))
    return [Operation(name, rng.getrandbits(48)) for name in ["new", "new", *names]]


@dataclass
class BatchCounts:
    """What a run has done. by: sequences by form of rows and launchers; pairs by tier and method;
    operations by name.
    """

    sequences: int = 0
    checks: int = 0  # logits compared
    answers: int = 0  # whole answers compared
    interrupts: int = 0
    skipped: int = 0  # pairs given up: an interrupt cost queries
    by: dict[str, int] = field(default_factory=dict)

    def __iadd__(self, other: BatchCounts) -> BatchCounts:
        self.by = dict(Counter(self.by) + Counter(other.by))
        for name, value in vars(other).items():
            if name != "by":
                setattr(self, name, getattr(self, name) + value)
        return self

    def count(self, *names: str) -> None:
        """Count one under each name."""
        for name in names:
            self.by[name] = self.by.get(name, 0) + 1

    def __str__(self) -> str:
        return (
            f"{self.sequences} batches, {self.checks} logits and {self.answers} answers compared, "
            f"{self.interrupts} interrupts, {self.skipped} pairs left out"
        )


def llm_of(bank: str, backend: str, chunk: int) -> LLM:
    """The LLM of this form of rows, these launchers and this chunk size, made once."""
    if (bank, backend, chunk) not in LLMS:
        # heads that rows of 4 bits can have
        config = session_config(layers=LAYERS, **(dict(head_dim=32) if bank == "int4" else {}))
        settings = dict(bank=bank, backend=backend, chunk=chunk, max_context=CAPACITY, threads=1)
        LLMS[bank, backend, chunk] = tiny_llm(Full(), config, **settings)
    return LLMS[bank, backend, chunk]


class Pair:
    """mine: a session of the batch; alone: the one to which the same happens."""

    def __init__(self, mine: Session, alone: Session) -> None:
        self.mine, self.alone = mine, alone

    def __len__(self) -> int:
        return len(self.alone)

    def both(self, work: Callable[[Session], object]) -> bool:
        """Do work() with both; whether it was let in. Refusals must be the same."""
        said = []
        for session in (self.alone, self.mine):
            try:
                work(session)
                said.append("")
            except EngineError as error:
                said.append(f"{type(error).__name__}: {error}")
        if said[0] != said[1]:
            raise Wrong(f"alone {said[0] or 'let in'!r}, in the batch {said[1] or 'let in'!r}")
        return not said[0]

    def same_queries(self) -> bool:
        """Whether both hold the same of the newest queries that a method may look back at."""
        held = []
        for session in (self.mine, self.alone):
            replay(session)
            ring, n = session.query_ring, len(session)
            held.append(max(ring.low, n - WINDOW) if ring.high == n else n)
        return held[0] == held[1]

    def close(self) -> None:
        """Close both."""
        self.mine.close()
        self.alone.close()


class BatchSequence:
    """A batch and its pairs, under one seed. log: what was done, in words."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(f"batch world {seed}")
        self.counts, self.log = BatchCounts(), []
        bank, backend = rng.choices(list(WORLDS), list(WORLDS.values()))[0]
        self.exact = backend == "reference"
        chunk = rng.choice([32, 64])
        self.llm = llm_of(bank, backend, chunk)
        self.batch = self.llm.batch(MOST)
        self.pairs: list[Pair] = []
        self.rows = bank if bank != "auto" else "float32"
        self.log.append(f"{self.rows} rows, {backend} launchers, chunks of {chunk}")
        self.counts.count(f"{self.rows} rows, {backend} launchers")

    def run(self, todo: list[Operation]) -> None:
        """Do all of it, and compare at the end. Raises Wrong, or what the engine raises."""
        self.counts.sequences += 1
        try:
            for operation in todo:
                self.rng = random.Random(operation.seed)
                if operation.name != "new" and not self.pairs:
                    continue
                self.log.append(f"{operation.name}:")
                self.counts.count(operation.name)
                getattr(self, "do_" + operation.name)()
                self.settle()
            for pair in self.pairs:
                self.goes_on(pair)
        finally:
            self.batch.close()
            for pair in self.pairs:
                pair.close()
        self.require(not self.llm.load().host_pool.in_use, "host memory was left taken")

    # ---------------------------------------------------------------- what must always hold

    def say(self, words: str) -> None:
        """Add to the line of this operation."""
        self.log[-1] += " " + words

    def require(self, true: bool, words: str) -> None:
        """Raise Wrong where it is not."""
        if not true:
            raise Wrong(words)

    def settle(self) -> None:
        """Nothing is held, and pairs hold the same; those that cannot be compared are given up."""
        self.require(self.llm._lock.free, "the LLM was left busy")
        for pair in list(self.pairs):
            mine, alone = pair.mine.ids, pair.alone.ids
            self.require(mine == alone, f"{len(mine)} tokens in the batch, {len(alone)} alone")
            if not alone:
                self.drop(pair)
            elif not pair.same_queries():
                self.counts.skipped += 1
                self.drop(pair)

    def drop(self, pair: Pair) -> None:
        """Close a pair."""
        self.pairs.remove(pair)
        pair.close()

    def compare(self, mine: torch.Tensor | None, alone: torch.Tensor, what: str) -> None:
        """Compare logits, as the launchers allow."""
        self.counts.checks += 1
        if mine is None:
            raise Wrong(f"{what}: no logits")
        if not torch.equal(mine, alone):
            by = float((mine - alone).abs().max())
            self.require(not self.exact and by <= TOLERANCE, f"{what}: logits differ by {by:.3g}")

    def goes_on(self, pair: Pair) -> None:
        """One more step of a pair."""
        token = self.rng.randrange(VOCAB)
        if len(pair) < CAPACITY:
            self.batch.feed(pair.mine, token)
            self.took(pair, token, self.batch.step()[pair.mine], "at the end")

    def took(self, pair: Pair, token: int, done: object, what: str) -> None:
        """Have the session alone take a token too. done: what the step of the batch returned, None
        where an interrupt took that away.
        """
        try:
            alone = pair.alone.decode(token)
        except EngineError as error:
            self.require(str(done) == str(error), f"{what}: {error} alone, {done!r} in the batch")
            return
        if isinstance(done, Exception):
            raise done
        self.compare(pair.mine.last_logits, alone, what)
        self.require(done is None or done is pair.mine.last_logits, f"{what}: others' logits")

    # ---------------------------------------------------------------- chance

    def tokens(self, most: int, pair: Pair | None = None) -> list[int]:
        """Random ids, at most so many and as many as there is room for beside an answer."""
        room = min(most, CAPACITY - 16 - (len(pair) if pair else 0))
        return self.rng.choices(range(VOCAB), k=room) if room > 0 else []

    def some(self) -> list[Pair]:
        """Some of the pairs, at least one."""
        return self.rng.sample(self.pairs, self.rng.randint(1, len(self.pairs)))

    def attempt(self, work: Callable[[], object], often: float) -> bool:
        """Do work(), by this chance with an interrupt at a random line; whether it came."""
        lines, place = None, ()
        if self.rng.random() < often:
            lines = int(10 ** self.rng.uniform(0.5, 4))
            if self.rng.random() < 0.6:
                place = self.rng.choice(BATCH_PLACES)
                lines = int(10 ** self.rng.uniform(0, 2.7))
        try:
            with interrupted_after(lines, place) as countdown:
                work()
        except Interrupt as error:
            self.counts.interrupts += 1
            self.say(f"interrupted at {str(error).rpartition('engine/')[2]}")
            return True
        self.require(not (lines and countdown.hit), "the interrupt was swallowed")
        return False

    # ---------------------------------------------------------------- operations

    def do_new(self) -> None:
        if len(self.batch.sessions) == MOST:
            return
        name, method = self.rng.choice(METHODS)
        tiers = self.rng.choices(["device", "host"], k=2)
        mine = self.batch.session(method, offload=tiers[0])
        pair = Pair(mine, self.llm.session(method, offload=tiers[1]))
        self.pairs.append(pair)
        ids = self.tokens(self.rng.choice([1, 30, 64, 65, 130]))
        self.say(f"{method!r} on {tiers[0]} (alone on {tiers[1]}), {len(ids)} tokens")
        self.counts.count(f"tier {tiers[0]}", f"method {name}")
        if not pair.both(lambda session: session.prefill(ids)):
            self.drop(pair)

    def do_prefill(self, more: bool = False) -> None:
        pair = self.rng.choice(self.pairs)
        if ids := self.tokens(self.rng.choice([1, 5, 40, 70]), pair):
            self.say(f"{len(ids)} after {len(pair)}")
            pair.both(lambda session: session.prefill(ids, more=more))

    def do_part(self) -> None:
        self.do_prefill(more=True)

    def do_step(self) -> None:
        fed: list[tuple[Pair, int]] = []
        for pair in self.some():
            given: int | None = self.rng.randrange(VOCAB)
            if pair.alone.last_logits is not None and self.exact and self.rng.random() < 0.3:
                given = None
            if len(pair) == CAPACITY:
                continue
            token = given if given is not None else int(pair.alone.last_logits.argmax())
            if given is None and pair.mine.last_logits is None:
                # an interrupt came between a prompt's rows and its logits
                self.refused(lambda session=pair.mine: self.batch.feed(session, None))
                given = token
            self.batch.feed(pair.mine, given)
            fed.append((pair, token))
        self.say(f"of {len(fed)}")
        found: dict[Session, object] = {}
        if self.attempt(lambda: found.update(self.batch.step()), often=0.6):
            found = dict(self.batch.step())
        for pair, token in fed:
            self.took(pair, token, found.get(pair.mine), "a step")

    def refused(self, work: Callable[[], object]) -> None:
        """Do what must raise SettingError."""
        try:
            work()
        except SettingError:
            return
        raise Wrong("let in without logits")

    def do_write(self) -> None:
        params = SamplingParams(
            max_tokens=self.rng.randint(1, 7),
            temperature=self.rng.choice([0, 0.7]) if self.exact else 0,
            seed=self.rng.randrange(2**62),
            ignore_eos=True,
        )
        given: list[tuple[Pair, list[int], int]] = []
        for pair in self.some():
            ids = self.tokens(self.rng.choice([0, 1, 20, 80]), pair)
            if len(pair) + len(ids) + 8 < CAPACITY:
                self.batch.write(pair.mine, ids, params)
                given.append((pair, ids, len(pair)))
        self.say(f"{[(at, len(ids)) for _, ids, at in given]}")
        told: dict[Session, list] = {pair.mine: [] for pair, _, _ in given}

        def run() -> None:
            for session, piece in self.batch.run():
                told[session].append(piece)

        broken = self.attempt(run, often=0.5)
        for pair, ids, at in given:
            self.batch.stop(pair.mine)
            if broken:
                self.followed(pair, ids, at)
            else:
                self.answered(pair, ids, params, told[pair.mine])

    def answered(self, pair: Pair, ids: list[int], params: SamplingParams, told: list) -> None:
        """Compare a whole answer with that of the session alone."""
        said: list = []
        try:
            said.extend(pair.alone.generate(ids, params))
        except EngineError as error:
            said.append(error)
        self.counts.answers += 1
        same = [type(piece) for piece in told] == [type(piece) for piece in said]
        last = told[-1] if told else None
        if isinstance(last, Exception) and not (same and str(last) == str(said[-1])):
            raise last
        self.require(same, f"{len(told)} pieces in the batch, {len(said)} alone")
        self.require(words(told) == words(said), f"{words(told)} in the batch, {words(said)} alone")

    def followed(self, pair: Pair, ids: list[int], at: int) -> None:
        """Have the session alone do what an interrupted answer has done. A prompt that was read in
        part is taken back.
        """
        read = pair.mine.ids[at:]
        self.say(f"left at {len(pair.mine)}")
        if len(read) < len(ids):
            self.require(read == ids[: len(read)], "other tokens than the prompt's")
            pair.mine.truncate(at)
            return
        if ids and not self.let_in(pair.alone, ids):
            raise Wrong("read what alone is refused")
        for token in read[len(ids) :]:
            pair.alone.decode(token)
        if pair.mine.last_logits is not None and pair.alone.last_logits is not None:
            self.compare(pair.mine.last_logits, pair.alone.last_logits, "an answer broken off")

    def let_in(self, session: Session, ids: list[int]) -> bool:
        """Read a prompt; whether it was let in."""
        try:
            session.prefill(ids)
        except EngineError:
            return False
        return True

    def do_truncate(self) -> None:
        pair = self.rng.choice(self.pairs)
        n = self.rng.choice([self.rng.randint(1, len(pair)), max(1, len(pair) - 1)])
        self.say(f"{len(pair)} to {n}")
        pair.alone.truncate(n)
        if self.attempt(lambda: pair.mine.truncate(n), often=0.3):
            pair.mine.truncate(n)

    def do_switch(self) -> None:
        pair, (_, method) = self.rng.choice(self.pairs), self.rng.choice(METHODS)
        self.say(f"at {len(pair)} to {method!r}")

        def work(session: Session) -> None:
            if session is not pair.mine:
                session.set_method(method)
            elif self.attempt(lambda: session.set_method(method), often=0.3):
                session.set_method(method)

        if not pair.both(work):
            self.say("refused")

    def do_fork(self) -> None:
        pair, copies = self.rng.choice(self.pairs), []
        try:
            if self.attempt(lambda: copies.append(pair.mine.fork()), often=0.3):
                copies = [pair.mine.fork()]
            copies.append(pair.alone.fork())
            self.compare_steps(copies[0], copies[1], "a fork")
        finally:
            for copy in copies:
                copy.close()

    def compare_steps(self, one: Session, other: Session, what: str) -> None:
        """Compare two more steps of two sessions."""
        for token in self.tokens(2):
            if len(other) < CAPACITY and Pair(one, other).both(lambda s, t=token: s.decode(t)):
                self.compare(one.last_logits, other.last_logits, what)

    def do_save(self) -> None:
        """The session alone goes on from its file; or the batch's says from its file what the one
        alone says.
        """
        pair, mine = self.rng.choice(self.pairs), self.rng.random() < 0.5
        tier = self.rng.choice(["device", "host"])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "session")
            try:
                (pair.mine if mine else pair.alone).save(path)
            except SettingError:
                return self.say("refused")
            restored = self.llm.restore(path, offload=tier)[0]
        if not mine:
            pair.alone.close()
            pair.alone = restored
            return None
        with restored, pair.alone.fork() as copy:
            self.compare_steps(restored, copy, "a restored session")

    def do_close(self) -> None:
        if len(self.pairs) > 1:
            self.drop(self.rng.choice(self.pairs))


def words(pieces: Iterable) -> list[object]:
    """What an answer's pieces say."""
    return [
        str(piece) if isinstance(piece, Exception) else (piece.token_id, piece.finish_reason)
        for piece in pieces
    ]
