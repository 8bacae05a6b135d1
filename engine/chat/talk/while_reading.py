"""A calibration on a user's own document while a session reads it.

What the chunks leave in the bank is what a passage needs (engine/calibration/passages.py), so
nothing is read for it a second time: at the end of a chunk the newest POSITIONS tokens become a
passage. After the reading the search of tools.calibrate runs over the passages, and takes what it
would take on the same texts: the document up to each passage's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.calibration.passages import MaxOverHeads, Passage
from engine.calibration.score import Passages, worth
from engine.calibration.search import Layers, Search, filters_of, full_layers, plan_of, seeing
from engine.llm import LLM
from engine.plan.layers import layer_plan, spread_over
from engine.plan.prefill_time import PrefillProgress
from engine.session.session import Session

POSITIONS = 64  # tokens of a passage
COUNT = 2  # passages: every candidate is measured on the first, the best on both
LEAST = 512  # tokens of a document worth a calibration
# tokens after which a passage costs more than its text brings (docs/CALIBRATION.md: sets found on
# 1,500 tokens hold at 6,000)
FARTHEST = 6000
SHARE, TAIL = 0.0667, 64  # as tools.calibrate: what a sparse layer reads, and the tail it adds


@dataclass(frozen=True)
class Chosen:
    """What a search chose. filters: filter layers; full: how many layers attend to everything; k:
    the budget on the longest passage; kl: mean over the passages in nats, and `guess` that of the
    even spread, which it replaces.
    """

    filters: tuple[int, ...]
    full: int
    k: int
    kl: float
    guess: float


def most_full(layers: int) -> int:
    """The most full layers that a search tries; shallow models need as many."""
    return max(layers // 3, min(4, layers - 1))


def unable(llm: LLM, tokens: int) -> str:
    """Why a document of so many tokens cannot calibrate a model; "" where it can."""
    layers = len(llm.config.seeing_layers)
    if llm.planner.cut is not None:
        return "its layers lie on several devices, and a search runs over one"
    if llm.config.recurrent is not None:
        return (
            f"the recurrent layers of this model ({llm.config.family}) have left a passage behind; "
            "python -m tools.calibrate finds filter layers"
        )
    if layers < 4:
        return f"{layers} layers see everything, and fewer than 4 leave nothing to choose"
    if tokens < LEAST:
        return f"found {tokens} tokens, expected at least {LEAST}"
    if llm.config.bank != "model":
        return "the bank holds rows of 8 bits, and a search wants them as they are"
    if llm.plan().placement is not None:
        return "the context is offloaded, and a passage needs its rows on the device"
    return ""


def seconds(llm: LLM, tokens: int) -> float:
    """About how long the calibration on a document takes, from one timed pass of POSITIONS tokens
    and the number of passes; the reading itself not counted.
    """
    llm.load()
    config, model = llm.config, llm.model
    assert model is not None
    layers = config.num_layers - len(config.local_layers)
    ids = [i % config.vocab_size for i in range(POSITIONS)]
    with llm.session(max_context=min(llm.max_context, POSITIONS)) as session:
        best = float("inf")
        for _ in range(2):  # the first pays for what is made once
            session.truncate(0)
            began = time.perf_counter()
            session.prefill(ids)
            best = min(best, time.perf_counter() - began)
    passes = Search(layers, _never, COUNT, _silent).measurements(most_full(layers))
    # attention to n rows, beside a layer's products
    n = sum(ends(tokens)) / COUNT
    products = config.attention_weights + 3 * config.hidden_size * config.intermediate_size
    attention = 2 * n * config.q_size / products
    # a set shares half of its layers with the one that it comes from
    return passes * best * 0.5 * (1 + attention)


def ends(tokens: int) -> tuple[int, ...]:
    """Where the passages of a document of so many tokens are to end: in its middle and at its end,
    or at FARTHEST.
    """
    last = min(tokens, FARTHEST)
    return tuple(last * (number + 1) // COUNT for number in range(COUNT))


def _never(full: Layers, parent: Layers | None, texts: slice) -> list[float]:
    raise AssertionError("no set is measured for an estimate")


def _silent(done: int, total: int, what: str) -> None:
    pass


@dataclass
class WhileReading:
    """Makes passages of a document that a session is reading, and searches over them.

    Call `note` after every chunk, between two of which the session is whole.
    """

    session: Session
    passages: list[Passage] = field(default_factory=list)

    def note(self, progress: PrefillProgress) -> None:
        """Make the passages that end within what has been read."""
        held = len(self.session.committed)
        for end in ends(held - progress.done + progress.total)[len(self.passages) :]:
            if POSITIONS < end <= held:
                self.passages.append(passage(self.session, end))

    @property
    def ready(self) -> bool:
        """Whether every passage has been made."""
        return len(self.passages) == COUNT

    def choose(self, tell: Callable[[float], None] = lambda left: None) -> Chosen:
        """Search; tell(seconds left, about) after every set that was measured. An exception from
        `tell` ends the search and leaves the session as it is.
        """
        config = self.session.loaded.config
        local, total = config.local_layers, config.num_layers
        layers = total - len(local)
        score = Passages(lambda: self.passages, layers, local)

        def told(done: int, moves: int, what: str) -> None:
            tell(search.measurements_left() * score.seconds / max(1, score.measured))

        search = Search(layers, score, COUNT, told)
        search.down(most_full(layers))
        found = search.known(most_full(layers))
        best = min(found.values(), key=lambda f: worth(f.cost, len(f.full), layers, SHARE))
        guess = layer_plan(total, spread_over(total, local), 0, local_layers=local)
        costs = [float(one.run(guess).kl.mean()) for one in self.passages]
        numbers = seeing(total, local)
        filters = tuple(numbers[i] for i in filters_of(best.full))
        assert len(full_layers(plan_of(best.full, layers, local))) == len(best.full) + len(local)
        k = budget(max(one.stop for one in self.passages))
        return Chosen(filters, len(best.full), k, best.cost, sum(costs) / len(costs))


def budget(tokens: int) -> int:
    """Tokens that a sparse layer reads of a text of so many."""
    return max(1, round(SHARE * tokens))


def passage(session: Session, end: int, positions: int = POSITIONS) -> Passage:
    """The tokens before position `end` of a session as a passage; it keeps the session's bank."""
    ids, start = list(session.committed[:end]), end - positions
    choose = MaxOverHeads(budget(end))
    return Passage(
        session.runner.model, session.loaded.rotary, session.bank, ids, start, end, TAIL, choose
    )
