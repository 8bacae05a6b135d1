"""Contestants of a decode benchmark and the rounds they run: interleaved A B A B, every step timed
after a warm-up.

A contestant offers `name`, `settings` (text), rewind(), step() -> token and close(). The engine's
is here and uses the public API only; other engines are in tools/bench/hf.py and
tools/bench/llamacpp.py.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass, field, replace

import torch

from engine.base.errors import EngineError
from engine.base.figures import brief
from engine.methods.base import Setup
from engine.methods.evict.shared.settings import Evicting
from engine.session.generate import runs_ahead
from tools.bench.floor import StepBytes, step_bytes, sync
from tools.bench.verify import Mismatch
from tools.common.synthetic_bank import synthesize

# steps that a contestant may be past its depth: below 2.5% of the shallowest
DRIFT = 100
NOISY = 1.25  # p95 over median beyond this is called noisy


@dataclass
class Cell:
    """One row of the table: one contestant, one test. Times in seconds; `why` says why there is
    none.
    """

    name: str
    test: str  # "tg" (one token at depth n) or "pp" (a prompt of n tokens)
    n: int
    tokens: int = 1  # tokens per timed call
    seconds: list = field(default_factory=list)
    why: str = ""
    note: str = ""
    settings: str = ""
    floor: float | None = None
    needed: StepBytes | None = None
    extra: dict = field(default_factory=dict)

    def fail(self, why: str) -> None:
        """Say why there is no time; the first reason stays."""
        self.why = self.why or why

    def expect(self, settings: str, needed: StepBytes, floor: float) -> None:
        """Note one of our methods: its settings, the bytes of a step and the seconds they take."""
        self.settings, self.needed, self.floor = settings, needed, floor

    @property
    def median(self):
        """Seconds per call, or None."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def p95(self):
        """Seconds that 95% of the calls stay below."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else None

    @property
    def rate(self):
        """(mean, standard deviation) of tokens per second."""
        rates = [self.tokens / s for s in self.seconds]
        return (
            (statistics.fmean(rates), statistics.stdev(rates) if len(rates) > 1 else 0.0)
            if rates
            else None
        )

    @property
    def noisy(self):
        """Whether the spread says that something else ran."""
        return bool(self.seconds) and self.p95 > NOISY * self.median

    def to_dict(self):
        """Plain dict for JSON; milliseconds, bytes and shares."""
        found = {
            "name": self.name,
            "test": self.test,
            "n": self.n,
            "settings": self.settings,
            "why": self.why,
            "note": self.note,
        }
        if self.seconds:
            mean, deviation = self.rate
            found |= {
                "ms_median": 1e3 * self.median,
                "ms_p95": 1e3 * self.p95,
                "ms_min": 1e3 * min(self.seconds),
                "samples": len(self.seconds),
                "tokens_per_s": mean,
                "tokens_per_s_sd": deviation,
                "noisy": self.noisy,
            }
        if self.needed is not None:
            found["bytes"] = vars(self.needed)
        if self.floor is not None:
            found["floor_ms"] = 1e3 * self.floor
            if self.seconds:
                found |= {
                    "share_of_floor": self.floor / self.median,
                    "gb_per_s": self.needed.floor / self.median / 1e9,
                }
        return found | self.extra


class Engine:
    """A session of an LLM at depth n, through its public API: LLM.session, decode, truncate,
    set_backend, stats.
    """

    def __init__(self, name, llm, n):
        self.name, self.llm, self.n = name, llm, n
        self.session = llm.session()
        self.settings = brief(self.session.method)
        try:
            synthesize(self.session, n)
        except BaseException:
            self.session.close()
            raise
        self.token = self.session.ids[-1]

    def rewind(self):
        """Back to n tokens, once there is little room left: going back each time would find what
        later steps fetched.
        """
        if len(self.session) - self.n > DRIFT:
            self.back()

    def back(self):
        """Back to exactly n tokens."""
        self.session.truncate(self.n)

    @property
    def ahead(self):
        """Whether a step waits for the one before it, as in an answer on a GPU."""
        return runs_ahead(self.session)

    def step(self):
        """One greedy step as in an answer; reading the token waits for the device."""
        if self.ahead:
            self.session.step(None)
            self.token = self.session.ids[-1]
        else:
            self.token = int(self.session.decode(self.token).argmax())
        return self.token

    def close(self):
        """Give the bank back."""
        self.session.close()


def engine_bytes(llm, n, prompt):
    """StepBytes of a step that makes a bank n tokens long, from an LLM's own method and plan; what
    session.stats counts afterwards must agree. prompt: tokens at the end of the prefill, which fix
    a budget by share.
    """
    plan, size = llm.plan(), llm.dtype.itemsize
    rows, choosing = [n] * plan.layers.num_layers, 0
    if n >= plan.dense_below:
        rows, choosing = counted(llm, plan.method, plan.layers, prompt, n)(n)
    return replace(step_bytes(llm.config, size, plan.layers, n, rows), choosing=choosing)


def counted(llm, method, layers, prompt, capacity):
    """A function from n, the tokens of a session after a step, to (tokens that each layer reads,
    bytes that choosing reads beside them), as the method declares them: a store's course after the
    prompt, or what a runtime of it for `capacity` tokens counts without a bank.
    """
    if isinstance(method, Evicting):
        budgets = method.budgets(layers, prompt)
        return lambda n: ([method.course(b, prompt, n - prompt)[1] for b in budgets], 0)
    # room for the whole prompt: a runtime may note its tokens where it ends
    runtime = method.runtime(Setup.of(llm.config, method, capacity, plan=layers, dtype=llm.dtype))
    runtime.end_prompt(prompt)
    return lambda n: (runtime.rows_read(n), runtime.choosing_bytes(n))


def fetched_bytes(llm, n):
    """Bytes that a step at n tokens brings over the link: whole layers where nothing selects, else
    what planted reuse leaves over.
    """
    plan, row = llm.plan(), llm.config.kv_bytes(llm.dtype.itemsize)
    if plan.placement is None:
        return 0
    layers = len(plan.placement.layers)
    if not plan.placement.budget:
        needs = plan.method.needs(plan.layers, llm.config, plan.max_context, llm.dtype.itemsize)
        return layers * min(n, n if needs.step_rows is None else needs.step_rows) * row
    return round(
        layers * min(plan.placement.budget, n) * row * (1 - getattr(plan.method, "reuse", 0.0))
    )


@dataclass(frozen=True)
class Entrant:
    """Who takes part at one depth: a name, how to make the contestant, and the bytes it will hold
    (on a GPU also those of the host).
    """

    name: str
    make: object  # () -> contestant
    bytes: int = 0
    host_bytes: int = 0
    # contestant -> dict of facts for the cell, before it is timed; raises Mismatch
    check: object = None


class Match:
    """Rounds of several entrants at one depth: in turns A B A B, each with a warm-up step and some
    timed ones.

    Where all fit into `room` (and `host_room`) bytes together they are made once and live on;
    otherwise each is made anew for its turn. Every other round runs in reverse order. An entrant
    that raises anything but an interrupt leaves with its reason, the others go on. crashed: those
    that neither said that they cannot run nor failed their check. clock: seconds, before and after
    a step.
    """

    def __init__(
        self, entrants, device, room, held=None, host_room=float("inf"), clock=time.perf_counter
    ):
        self.entrants, self.device, self.held = entrants, device, held or (lambda: 0)
        self.clock = clock
        self.together = (
            sum(e.bytes for e in entrants) <= room
            and sum(e.host_bytes for e in entrants) <= host_room
        )
        self.times, self.facts, self.failed = (
            {e.name: [] for e in entrants},
            {e.name: {} for e in entrants},
            {},
        )
        self.live, self.wrong, self.crashed = {}, set(), set()  # wrong: those of a Mismatch

    def run(self, rounds, steps, budget=None, warm_up=1, finish=None):
        """Time up to `rounds` rounds (at least two, then none that begins after `budget` seconds).
        finish(name, contestant) runs once per entrant after its last turn. Everything is closed at
        the end.
        """
        began = time.perf_counter()
        try:
            for number in range(rounds):
                last = number + 1 == rounds or (
                    number >= 1 and budget is not None and time.perf_counter() - began > budget
                )
                for entrant in self.entrants[:: 1 if number % 2 == 0 else -1]:
                    if entrant.name not in self.failed:
                        self._enter(entrant, steps, warm_up, finish if last else None)
                if last:
                    break
        finally:
            for contestant in self.live.values():
                _close(contestant)
            self.live = {}

    def _enter(self, entrant, steps, warm_up, finish):
        contestant = self.live.get(entrant.name)
        try:
            if contestant is None:
                contestant = self._make(entrant)
            self.times[entrant.name] += _turn(contestant, steps, self.device, warm_up, self.clock)
            if finish is not None:
                finish(entrant.name, contestant)
        except Exception as error:
            self.failed[entrant.name], self.times[entrant.name] = reason(error), []
            if isinstance(error, Mismatch):
                self.wrong.add(entrant.name)
            elif crashed(error):
                self.crashed.add(entrant.name)
            _close(self.live.pop(entrant.name, None))
            return
        if not self.together:
            contestant.close()
            self.live.pop(entrant.name, None)

    def _make(self, entrant):
        before, facts = self.held(), self.facts[entrant.name]
        contestant = self.live[entrant.name] = entrant.make()
        contestant.step()
        facts.setdefault("held_bytes", self.held() - before)
        facts["settings"] = contestant.settings
        if entrant.check is not None and "checked" not in facts:
            facts["checked"] = entrant.check(contestant)
        return contestant


def _turn(contestant, steps, device, warm_up, clock):
    contestant.rewind()
    for _ in range(warm_up):
        contestant.step()
    sync(device)
    if getattr(contestant, "ahead", False):
        contestant.step()  # it waits for nothing, and every later one for the one before
    seconds = []
    for _ in range(steps):
        start = clock()
        contestant.step()
        seconds.append(clock() - start)
    return seconds


def _close(contestant):
    """Give back what a contestant holds. One that failed has said why, and may fail at this too."""
    if contestant is not None:
        with contextlib.suppress(Exception):
            contestant.close()


def reason(error):
    """One line that says why a cell is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (EngineError, Mismatch, Missing))
    return (text if known else f"{type(error).__name__}: {text}")[:300]


def crashed(error):
    """Whether an error is a fault: it says neither what cannot run here nor what does not fit."""
    said = (EngineError, Mismatch, Missing, MemoryError, torch.OutOfMemoryError)
    return not isinstance(error, said)


class Missing(Exception):
    """A peer that is not installed or cannot run this shape."""
