"""Steps that are issued before the host knows their token: the same answers, and the same session
whatever ends one.

On a GPU a greedy answer runs so. Here the CPU does, over a host that sees each token as late as it
may: when it waits for the copy.

Stops: a token read before its copy landed, a step too many after the answer's end, rows or counts
of a step that was given up.
"""

import copy
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from engine import Exact, Full, OmniKV, SnapKV
from engine.bank.pool.host_pool import HostPool
from engine.base.errors import EngineError
from engine.forward.graphs import GraphedStep
from engine.methods.mass_meter import Watch
from engine.runner.step_runner import StepRunner
from engine.sampling.greedy import DeviceArgmax
from engine.sampling.params import SamplingParams
from engine.session.generate import generate, runs_ahead
from tests.builders import random_ids, session_config, tiny_llm

SPARSE = OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=0)
METHODS = {
    "full": (Full(), "device"),
    "omnikv": (SPARSE, "device"),
    "windowed": (
        OmniKV(filter_layers=(1,), tokens=24, selector="uniform", dense_below=0),
        "device",
    ),
    "host tier": (SPARSE, "host"),
    "below": (OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=160), "device"),
    "evicting": (SnapKV(tokens=64, forget=False), "device"),
}
CONFIG = session_config(layers=4)
PROMPT = random_ids(150, seed=3)


class Late:
    """A pinned buffer whose copy lands when somebody waits for it; until then it holds rubbish."""

    def __init__(self):
        self.landed, self.coming = torch.full((2,), -(1 << 60)), None

    def copy_(self, pair, non_blocking):
        assert non_blocking
        self.coming = pair.clone()
        self.landed.fill_(-(1 << 60))

    def record(self):
        assert self.coming is not None, "the event stands before the copy"

    def synchronize(self):
        self.landed.copy_(self.coming)

    def __getitem__(self, which):
        return self.landed[which]


class Words:
    """A tokenizer's stream that spells every id."""

    def stream(self, context):
        return self

    def push(self, token):
        return f"<{token}>"

    def flush(self):
        return ""

    def marks(self):
        return frozenset(), frozenset()


@pytest.fixture
def ahead(monkeypatch):
    """StepRunner.runs_ahead says yes from now on, and copies land late."""

    def switch(on=True):
        monkeypatch.setattr(StepRunner, "runs_ahead", lambda runner, n: on)

    made = DeviceArgmax.__init__

    def late(self, device):
        made(self, device)
        self._on_host = self._copied = Late()

    monkeypatch.setattr(DeviceArgmax, "__init__", late)
    switch(False)
    return switch


def opened(name, capacity=256):
    method, offload = METHODS[name]
    pool = HostPool(slab_bytes=1 << 20) if offload == "host" else None
    llm = tiny_llm(method, CONFIG, max_context=capacity, offload=offload, chunk=128, host_pool=pool)
    llm.loaded = replace(llm.load(), tokenizer=Words())
    return llm.session()


def state(session):
    """All that the next call may look at, times apart."""
    ring, n = session.query_ring, len(session)
    # a host layer's views hold until the next one's
    rows = [part.clone() for layer in range(4) for part in session.bank.kv(layer, n)]
    at = torch.arange(ring.low, ring.high) % ring.slots.shape[2]
    counters = {k: v for k, v in vars(session.counters).items() if not k.endswith("seconds")}
    return {
        "ids": list(session.ids),
        "logits": session.last_logits,
        "queries": ring.slots[:, :, at].clone(),
        "valid": (ring.low, ring.high),
        "rows": rows,
        "counters": counters,
        "selected": (session.selected, session.selections),
        "prompt": (session.history.prompt_length, session.answer_length),
    }


def same(mine, theirs):
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


def told(piece):
    stats = {k: v for k, v in vars(piece.stats).items() if not k.endswith("seconds")}
    return piece.text, piece.token_id, piece.logprob, piece.finish_reason, stats


def answer(session, params, pieces=None, stops_at=None, ids=()):
    """What an answer says; closed after `pieces`, interrupted before step `stops_at`."""
    asked = iter(range(1000))
    stream = generate(
        session, list(ids), params, None, lambda: stops_at is not None and next(asked) >= stops_at
    )
    said = []
    for piece in stream:
        said.append(told(piece))
        if len(said) == pieces:
            stream.close()
    return said


def both(ahead, name, run, capacity=256):
    """`run(session)` of two sessions, read first and issued first: (results, sessions)."""
    results, sessions = [], []
    for on in (False, True):
        ahead(False)
        session = opened(name, capacity)
        session.prefill(PROMPT)
        ahead(on)
        results.append(run(session))
        sessions.append(session)
    assert same(*results), results
    assert same(*map(state, sessions))
    return results[0], sessions


ENDS = ("length", "eos", "word", "context", "interrupted", "closed")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_ends_alike(name, end, ahead):
    """And so does what follows it: cut back, forked, with another prompt."""
    plain = answer(both(ahead, name, lambda s: s.prefill([5]))[1][0], SamplingParams(max_tokens=9))
    tokens = [said[1] for said in plain]
    at = random.Random(f"{name} {end}").randrange(2, 7)
    params, named, capacity = SamplingParams(max_tokens=9), {}, 256
    if end == "eos":
        params = SamplingParams(max_tokens=9, stop_token_ids=(tokens[at],))
    if end == "word":
        params = SamplingParams(max_tokens=9, stop=(f"{tokens[at - 1]}><{tokens[at]}",))
    if end == "context":
        capacity = 151 + at
    if end == "interrupted":
        named = dict(stops_at=at)
    if end == "closed":
        named = dict(pieces=at)
    run = partial(answer, params=params, ids=[5], **named)
    said, sessions = both(ahead, name, run, capacity)
    found = [x[1] for x in said if x[1] is not None]
    assert found == tokens[: len(found)] and len(found) > 1
    assert said[-1][3] == {"eos": "stop", "word": "stop", "closed": None}.get(end, end)
    if end == "context":
        return
    after = []
    for on, session in zip((False, True), sessions):
        ahead(on)
        session.truncate(len(session) - 2)
        again = answer(session, SamplingParams(max_tokens=3))
        child = session.fork()
        after.append([again, answer(child, SamplingParams(max_tokens=3), ids=[7, 8])])
    assert same(*after) and same(*map(state, sessions))


@pytest.mark.parametrize("name", ["full", "omnikv", "host tier"])
@pytest.mark.parametrize("where", ["issued", "waiting", "nan"])
def test_a_step_that_is_given_up_has_not_run(name, where, ahead, monkeypatch):
    """Ctrl-C while it is issued or while the host waits; logits that hold NaN. The session is at
    the token before, as if the answer had been closed there, and goes on from it.
    """
    sessions, rest = [], []
    for given_up in (False, True):
        ahead(False)
        session = opened(name)
        session.prefill(PROMPT)
        ahead(True)
        stream = generate(session, [5], SamplingParams(max_tokens=9))
        for _ in range(4):
            next(stream)
        if given_up:
            whole = session.last_logits
            with monkeypatch.context() as patch:
                error = KeyboardInterrupt
                if where == "nan":
                    session.last_logits, error = whole.clone(), EngineError
                    session.last_logits[3] = float("nan")
                elif where == "waiting":
                    patch.setattr(Late, "synchronize", _interrupt)
                else:
                    patch.setattr(type(session.bank), "after_step", _interrupt)
                with pytest.raises(error):
                    next(stream)
            session.last_logits = whole
        stream.close()
        sessions.append(session)
    broken = state(sessions[1])
    assert broken.pop("selected") == (False, {}), "its selection went with the step"
    closed = state(sessions[0])
    del closed["selected"]
    assert same(closed, broken)
    for session in sessions:
        rest.append(answer(session, SamplingParams(max_tokens=5)))
    assert same(*rest) and same(*map(state, sessions))


def _interrupt(*arguments):
    raise KeyboardInterrupt


def test_the_next_step_is_issued_before_the_token_is_read(ahead, monkeypatch):
    order = []
    step, read = GraphedStep.__call__, DeviceArgmax.read
    monkeypatch.setattr(GraphedStep, "__call__", lambda s, n: order.append(n) or step(s, n))
    monkeypatch.setattr(DeviceArgmax, "read", lambda s: order.append("read") or read(s))
    session = opened("omnikv")
    ahead()
    answer(session, SamplingParams(max_tokens=3), ids=PROMPT)
    assert order == [151, "read", 152, "read", 153, "read"]


def test_a_watched_answer_counts_and_measures_alike(ahead):
    def run(session):
        session.watch = Watch(every=2, exact_below=0.999)
        said = answer(session, SamplingParams(max_tokens=7))
        return said, copy.copy(vars(session.watch))

    (_, watch), _ = both(ahead, "omnikv", run)
    assert watch["sampled"] > 1 and watch["exact_steps"] > 0


def test_what_is_drawn_or_asked_for_its_probability_is_read_first(ahead, monkeypatch):
    """And the penalty, which the host keeps."""
    monkeypatch.setattr(DeviceArgmax, "choose", None)
    session = opened("full")
    session.prefill(PROMPT)
    ahead()
    for params in (
        SamplingParams(max_tokens=2, temperature=0.7, seed=1),
        SamplingParams(max_tokens=2, logprobs=2),
        SamplingParams(max_tokens=2, repetition_penalty=1.1),
    ):
        assert answer(session, params)[-1][3] == "length"


def test_exact_mode_reads_first(monkeypatch):
    """Its host compares every token with a draft."""
    monkeypatch.setattr(GraphedStep, "captures", True, raising=False)
    session = tiny_llm(Exact(SPARSE), CONFIG, max_context=256, chunk=128).session()
    session.prefill(PROMPT)
    assert not runs_ahead(session)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("full", True), ("omnikv", True), ("host tier", True), ("evicting", False), ("below", True)],
)
def test_steps_that_replay_a_graph_run_ahead(name, expected, monkeypatch):
    """Evicting steps are eager, and so is full attention over a host tier."""
    session = opened(name)
    assert not runs_ahead(session), "a CPU reads first"
    session.loaded = replace(session.loaded, graphs=True)
    if session.bank.tiered:
        monkeypatch.setattr(HostPool, "pinned", True)
    session.set_method(Full())
    session.set_method(METHODS[name][0])
    session.prefill(PROMPT)
    assert runs_ahead(session) is expected
    session.set_method(Full())
    session.refresh_logits()
    assert runs_ahead(session) is (name != "host tier")
    with monkeypatch.context() as patch:
        patch.setattr(session.history, "pending", SimpleNamespace(ids=session.committed))
        assert not runs_ahead(session), "what a truncate has left comes first"
    session.truncate(10)
    assert session.last_logits is None and not runs_ahead(session)
