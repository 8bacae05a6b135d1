"""One document under every method: reads it once or per method, asks the questions of both turns,
and records every answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from engine import LLM, Full
from engine.session.session import Session
from tools.banks.registry import REAL, quantiser
from tools.banks.simulated import simulated
from tools.common.records import Record
from tools.compare.bytes import resident
from tools.compare.kept import inner_of
from tools.compare.methods import Variant
from tools.compare.turns import Turns
from tools.tasks import TASKS, make_sample
from tools.tasks.prompts import answer_text, is_right, token_counter

SPARE = 8  # tokens an answer may be longer than the right one before it is cut


@dataclass
class Answer:
    """One greedy answer. tokens: without the end token. fed: how many of them lie in the bank.

    compared, same, kl: positions with full attention's history, how many of them say its token, and
    the sum of KL(full || method) in nats there. bytes_read: keys and values read in decode steps;
    bytes_link: those that crossed from host memory. rows: rows that a layer read, summed over the
    steps: the mean over heads and over the layers that read less than everything, or all rows if
    there is no such layer. chosen: those of `rows` that the budget chose or kept; the others are
    the tail. context: tokens in the session, summed over the steps. decode_cpu: thread CPU seconds
    of the steps. held, held_of: of a session that forgets, the bytes of K and V that it had
    allocated after the first step, and full attention's of as many tokens.
    """

    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    steps: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes_read: int = 0
    bytes_link: int = 0
    compared: int = 0
    same: int = 0
    kl: float = 0.0
    rows: float = 0.0
    context: int = 0
    chosen: int = 0
    decode_cpu: float = 0.0
    held: int = 0
    held_of: int = 0

    def facts(self) -> Record:
        """What a record keeps of it: all but what only the session needs."""
        return {name: value for name, value in asdict(self).items() if name != "fed"}

    def count(self, session: Session) -> None:
        """Add the rows of the step that has just run."""
        length = len(session)
        read = session.runtime.rows_read(length)
        layers = session.plan.partial_layers or range(len(read))
        self.rows += sum(read[layer] for layer in layers) / len(layers)
        self.context += length
        self.chosen = session.runtime.k if session.plan.partial_layers else 0
        if session.stats.forgets and not self.held:
            self.held, self.held_of = resident(session)


class Reference:
    """Full attention's decisions along its own answer. Others are compared with them for as long as
    they said the same.
    """

    def __init__(self) -> None:
        self.said: list[int] = []  # token ids, the end token included
        self.log_probs: list[torch.Tensor] = []  # float32 [vocab] of each decision

    def add(self, logits: torch.Tensor, token: int) -> None:
        """Keep a decision."""
        self.said.append(token)
        self.log_probs.append(torch.log_softmax(logits.double(), -1).float().cpu())

    def compare(self, answer: Answer, logits: torch.Tensor, token: int) -> bool:
        """Note in `answer` a decision with the same history; returns whether the history stays the
        same.
        """
        at = answer.compared
        if at >= len(self.said):
            return False
        p, q = self.log_probs[at].double(), torch.log_softmax(logits.double(), -1).cpu()
        answer.kl += max(0.0, float((p.exp() * (p - q)).sum()))
        answer.compared += 1
        answer.same += token == self.said[at]
        return token == self.said[at]


def speak(
    session: Session,
    ids: Sequence[int],
    most: int,
    sparse: bool,
    reference: Reference | None = None,
    keep: Reference | None = None,
    steps: bool = False,
) -> Answer:
    """Answer greedily after reading `ids` (may be empty where the session has logits), with at most
    `most` tokens.

    reference: full attention's decisions to compare with; keep: an empty Reference to fill; steps:
    the method's decode steps read `ids`, which are part of the prompt's seconds. Raises
    AssertionError where `sparse` and a step was not.
    """
    before, out, together = session.stats, Answer(), reference is not None
    read = before
    if steps and ids:
        for token in ids:
            logits = session.decode(token)
        read = session.stats
        out.prompt_seconds = read.decode_seconds - before.decode_seconds
        stepped = read.sparse_steps - before.sparse_steps
        if sparse and stepped != len(ids):
            raise AssertionError(f"{stepped} of {len(ids)} steps that read were sparse")
    else:
        logits = session.prefill(ids) if ids else session.last_logits
    while True:
        token = int(logits.argmax())
        if keep is not None:
            keep.add(logits, token)
        if reference is not None and together:
            together = reference.compare(out, logits, token)
        if token in session.loaded.end_token_ids:
            break
        out.tokens.append(token)
        if len(out.tokens) >= most:
            break
        began = time.thread_time()
        logits = session.decode(token)
        out.decode_cpu += time.thread_time() - began
        out.fed += 1
        out.count(session)
    after = session.stats
    out.steps = after.decode_steps - read.decode_steps
    dense = out.steps - (after.sparse_steps - read.sparse_steps)
    if sparse and dense:
        raise AssertionError(f"{dense} of {out.steps} decode steps were not sparse")
    out.prompt_seconds += after.prefill_seconds - before.prefill_seconds
    out.decode_seconds = after.decode_seconds - read.decode_seconds
    out.bytes_read = (
        after.bytes_read_sparse
        + after.bytes_read_dense
        - read.bytes_read_sparse
        - read.bytes_read_dense
    )
    out.bytes_link = (
        after.bytes_fetched + after.bytes_streamed - read.bytes_fetched - read.bytes_streamed
    )
    return out


@dataclass(frozen=True)
class Rules:
    """Settings of every document: questions per document, turns (1 or 2), how answers are judged
    (tools.tasks.prompts.JUDGES) and cut, the seed. question: "dense" where full attention reads the
    questions, "sparse" where the method's own decode steps do.
    """

    questions: int = 4
    turns: int = 2
    judge: str = "exact"
    max_tokens: int | None = None
    seed: int = 0
    question: str = "dense"


@dataclass(frozen=True)
class Job:
    """One document: its task, length in tokens and number, and how many of its questions begin a
    conversation.
    """

    task: str
    length: int
    number: int
    conversations: int


class Paper:
    """One made document: its questions, right answers and prompts in a model's tokens.

    Conversation i asks question i first and question i + 1 (round about) second, so that each
    question is asked in both turns.
    """

    def __init__(self, llm: LLM, job: Job, rules: Rules):
        per = min(rules.questions, TASKS[job.task].max_questions)
        self.llm, self.job, self.rules = llm, job, rules
        self.seed = rules.seed * 100_000 + job.number
        count = token_counter(llm.tokenizer)
        self.sample = make_sample(job.task, job.length, count, self.seed, per)
        self.turns = Turns(llm.tokenizer, self.sample.document, self.sample.questions)
        self.right = [count(text) for text in self.sample.answers]

    def most(self, question: int) -> int:
        """Tokens after which an answer is cut."""
        return self.rules.max_tokens or self.right[question] + SPARE

    def second(self, first: int) -> int | None:
        """The question after the first one, or None."""
        other = (first + 1) % len(self.sample.questions)
        return other if self.rules.turns > 1 and other != first else None

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer; a base model's first line."""
        return answer_text(self.llm.tokenizer, tokens)

    def room(self, spare: int = 64) -> int:
        """Tokens that a session of two turns may take. spare: for a template's own words."""
        answers = max(self.most(q) for q in range(len(self.right)))
        return len(self.turns.shared) + 2 * (max(map(len, self.turns.own)) + answers + spare)

    def record(self, variant: Variant, question: int, turn: int, answer: Answer) -> Record:
        """One line of answers.jsonl."""
        text, sample = self.text(answer.tokens), self.sample
        return {
            **variant.asked(self.job.task, self.job.length, self.seed, question, turn),
            "depth": sample.meta["depths"][question],
            "right": int(is_right(self.rules.judge, text, sample, question)),
            **answer.facts(),
            "text": text,
            "expected": sample.answers[question],
        }


class Reader:
    """Asks one document's questions of one variant after the other; the document is read once for
    those that leave prefill alone. steps: the questions are read by the method's decode steps.
    """

    def __init__(self, llm: LLM, paper: Paper, capacity: int, steps: bool = False):
        self.llm, self.paper, self.capacity, self.steps = llm, paper, capacity, steps
        self.references: dict[int, Reference] = {}  # by the first question of a conversation
        self.seconds: dict[str, float] = {}  # by variant
        self._shared: Session | None = None
        self.document_seconds = 0.0  # of the shared reading
        self.once_seconds = 0.0  # of all readings that are made once for all questions

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shared is not None:
            self._shared.close()

    def ask(self, steps: bool) -> None:
        """Have the questions of the records that follow read by the method's decode steps, or by
        full attention.
        """
        self.steps = steps

    def records(self, variant: Variant, conversations: int) -> list[Record]:
        """Records of one variant: both turns of every conversation. Full attention must have gone
        first.
        """
        began = time.perf_counter()
        read = self._together if variant.entry.reads == "shared" else self._alone
        if getattr(variant.method, "forget", False):
            read = self._forgetting
        if variant.bank:
            read = self._packed if variant.bank in REAL else self._simulated
        out = list(read(variant, conversations))
        self.seconds[variant.label] = time.perf_counter() - began
        return out

    def _together(self, variant: Variant, conversations: int) -> Iterator[Record]:
        """Over the shared reading."""
        for first in range(conversations):
            session = self._document()
            ids, seconds = self._question(session, variant, first)
            yield from self._converse(session, variant, first, ids, seconds)
            # before the truncate: full attention has nothing to redo
            session.set_method(Full())
            session.truncate(len(self.paper.turns.shared))

    def _alone(self, variant: Variant, conversations: int) -> Iterator[Record]:
        """In the method's own session, which reads the document once."""
        with self._opened(variant) as session:
            head, seconds = len(session), session.stats.prefill_seconds
            for first in range(conversations):
                session.truncate(head)
                ids = self._rest(session, first)
                yield from self._converse(session, variant, first, ids, seconds)

    def _opened(self, variant: Variant) -> Session:
        """A session of the variant's method that has read the document, or its head where the rest
        must be read with the question.
        """
        turns, method, entry = self.paper.turns, variant.method, variant.entry
        assert method is not None
        head = (
            len(turns.shared)
            if entry.head is None
            else entry.head(self.llm, inner_of(method), len(turns.shared))
        )
        session = self.llm.session(method, max_context=self.capacity, offload=entry.place)
        if head:
            more = session.runtime.needs.final_call is not None
            more &= not self.steps or head < len(turns.shared)
            session.prefill(turns.shared[:head], more=more)
        self.once_seconds += session.stats.prefill_seconds
        return session

    def _forgetting(self, variant: Variant, conversations: int) -> Iterator[Record]:
        """In sessions that hold their store and nothing else: forks of one that has read the
        document, by full attention where the method leaves prefill alone.
        """
        if variant.entry.reads == "shared":
            for first in range(conversations):
                with self._document().fork() as session:
                    ids, seconds = self._question(session, variant, first)
                    yield from self._converse(session, variant, first, ids, seconds)
            return
        with self._opened(variant) as document:
            seconds = document.stats.prefill_seconds
            for first in range(conversations):
                with document.fork() as session:
                    ids = self._rest(session, first)
                    yield from self._converse(session, variant, first, ids, seconds)

    def _packed(self, variant: Variant, conversations: int) -> Iterator[Record]:
        """Over a bank of the engine's own, which reads the document itself."""
        turns, llm = self.paper.turns, LLM.sharing(self.llm, bank=variant.bank)
        with llm.session(Full(), max_context=self.capacity, offload="device") as session:
            if turns.shared:
                session.prefill(turns.shared)
            self.once_seconds += session.stats.prefill_seconds
            for first in range(conversations):
                yield from self._asked(session, variant, first)
                session.set_method(Full())
                session.truncate(len(turns.shared))

    def _simulated(self, variant: Variant, conversations: int) -> Iterator[Record]:
        """Over copies of the shared reading whose rows are rounded before a question is read."""
        for first in range(conversations):
            with simulated(self._document(), quantiser(variant.bank)) as session:
                yield from self._asked(session, variant, first)

    def _asked(self, session: Session, variant: Variant, first: int) -> Iterator[Record]:
        """Records of a conversation in a session that holds the document and reads the question by
        full attention.
        """
        ids, seconds = self._question(session, variant, first)
        yield from self._converse(session, variant, first, ids, seconds)

    def _rest(self, session: Session, first: int) -> list[int]:
        """What is left to read before an answer in a session that reads under its own method. Where
        its steps read the question, what comes before is read here.
        """
        turns = self.paper.turns
        before = turns.shared[len(session) :]
        if self.steps and before:
            session.prefill(before)
            before = []
        return before + turns.own[first]

    def _document(self) -> Session:
        """The shared session, which full attention has read the document in."""
        if self._shared is None:
            self._shared = self.llm.session(Full(), max_context=self.capacity, offload="device")
            if self.paper.turns.shared:
                self._shared.prefill(self.paper.turns.shared)
            self.document_seconds = self._shared.stats.prefill_seconds
            self.once_seconds += self.document_seconds
        return self._shared

    def _question(self, session: Session, variant: Variant, first: int) -> tuple[list[int], float]:
        """Hand a session that holds the document to the variant's method, after full attention has
        read the question, or before the method's steps read it. Returns (what is left to read,
        seconds of reading so far).
        """
        own, before = list(self.paper.turns.own[first]), session.stats.prefill_seconds
        if not self.steps:
            session.prefill(own)
        if variant.method != session.method:
            assert variant.method is not None
            session.set_method(variant.method)
        seconds = self.document_seconds + session.stats.prefill_seconds - before
        return own if self.steps else [], seconds

    def _converse(
        self,
        session: Session,
        variant: Variant,
        first: int,
        ids: Sequence[int],
        seconds: float = 0.0,
    ) -> list[Record]:
        """Records of a conversation in a session that has read the first question in `seconds`, or
        reads it now as `ids`.
        """
        paper, sparse = self.paper, variant.entry.sparse
        own = variant.name == "full" and not variant.bank
        keep = (
            self.references.setdefault(first, Reference())
            if own and first not in self.references
            else None
        )
        answer = speak(
            session,
            list(ids),
            paper.most(first),
            sparse,
            None if own else self.references.get(first),
            keep,
            self.steps,
        )
        answer.prompt_seconds += seconds
        out = [paper.record(variant, first, 1, answer)]
        second = paper.second(first)
        if second is not None:
            answer = speak(
                session,
                answer.tokens[answer.fed :] + paper.turns.following(first, second),
                paper.most(second),
                sparse,
                steps=self.steps,
            )
            out.append(paper.record(variant, second, 2, answer))
        return out


Each = Callable[[str, float], None]  # (a variant's label, its seconds)


def runs(variants: Sequence[Variant], skip: Sequence[str] = ()) -> list[Variant]:
    """Those that answer: not those without a method, another's aliases, or those of `skip`."""
    return [v for v in variants if v.method is not None and not v.alias and v.label not in skip]


def run_document(
    llm: LLM,
    paper: Paper,
    variants: Sequence[Variant],
    capacity: int,
    skip: Sequence[str] = (),
    each: Each | None = None,
    steps: bool = False,
) -> tuple[list[Record], dict[str, float], float]:
    """(records, {variant label: seconds}, seconds of the readings made once for all questions) of a
    Paper under `variants`, in their order.

    skip: labels with answers already; full attention then runs for comparison only, and its records
    are left out. each: called after every variant. steps: the methods' decode steps read the
    questions.
    """
    todo = runs(variants, skip)
    out: list[Record] = []
    if not todo:
        return [], {}, 0.0
    full = next(v for v in variants if v.name == "full")
    with Reader(llm, paper, capacity, steps) as reader:
        for variant in [full, *(v for v in todo if v.label != full.label)]:
            found = reader.records(variant, paper.job.conversations)
            out += found if variant in todo else []
            if each is not None:
                each(variant.label, reader.seconds[variant.label])
        return out, reader.seconds, reader.once_seconds
