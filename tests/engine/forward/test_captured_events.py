"""Events that know the capture they were recorded in: no step waits for one of another's.

A GPU refuses that. Here events carry the number of their capture, "graphs" run the captured step
again, and nothing but the events is looked at.

Stops: a draft step that waits for the fetch of the graph before it, which the device has done.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import engine.forward.graphs as step_runner
from engine import Exact, Full, OmniKV, SamplingParams
from engine.bank.host.streams import SideStream
from tests.builders import random_ids, session_config, tiny_llm

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
ANSWER = SamplingParams(max_tokens=12, ignore_eos=True)


class Captures:
    """now: the number of the capture under way, None outside of one. count: captures so far;
    waited: waits for an event of a lane.
    """

    def __init__(self):
        self.now, self.count, self.waited, self.replays = None, 0, 0, False
        self.sets = []  # the working sets whose events a replay leaves alone

    def record(self):
        return SimpleNamespace(capture=self.now, query=lambda: True)

    def wait(self, event, device=None):
        if event is None or self.replays:
            return
        self.waited += 1
        assert event.capture == self.now, (
            f"an event of capture {event.capture} is waited for in {self.now}"
        )

    def captured(self, device, step):
        for _ in range(step_runner.WARM_UP):
            step()
        self.count += 1
        self.now = self.count
        try:
            logits = step()
        finally:
            self.now = None

        def replay():  # runs no Python on a GPU
            kept = [dict(one._fetched) for one in self.sets]
            self.replays = True
            try:
                logits.copy_(step())
            finally:
                self.replays = False
                for one, events in zip(self.sets, kept):
                    one._fetched = events

        return SimpleNamespace(replay=replay), logits


@pytest.fixture
def captures(monkeypatch):
    made = Captures()
    monkeypatch.setattr(SideStream, "record_event", lambda stream: made.record())
    monkeypatch.setattr(SideStream, "wait_event", lambda stream, event: made.wait(event))
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("engine.bank.", "engine.forward.staged."))
        if ours and name != "engine.bank.host.streams":
            if hasattr(module, "wait"):
                monkeypatch.setattr(module, "wait", made.wait)
    monkeypatch.setattr(step_runner, "captured", made.captured)
    return made


@pytest.mark.parametrize("by_layer", [False, True], ids=["groups", "layers"])
@pytest.mark.parametrize(
    "method", [SPARSE, Exact(SPARSE, draft=4, lookup=False)], ids=lambda method: method.name
)
def test_a_captured_step_waits_for_its_own_events_only(captures, method, by_layer, monkeypatch):
    config = session_config(layers=6)
    llm = tiny_llm(method, config, backend="reference", max_context=1024)
    llm.loaded = replace(llm.load(), graphs=True)
    placement = llm.planner.placement

    def placed(*arguments, **named):
        found = placement(*arguments, **named)
        return found and replace(found, by_layer=by_layer)

    monkeypatch.setattr(llm.planner, "placement", placed)
    with llm.session(offload="host") as session:
        runner = session.runner
        captures.sets = session.bank._sets
        steps = [runner._own_step]
        if isinstance(method, Exact):
            steps = [runner._own_draft, runner._kept_draft]
        for step in steps:
            step.captures = True
        ids = [piece.token_id for piece in session.generate(random_ids(300), ANSWER)]
    assert captures.count == len(steps) and captures.waited
    with llm.session(offload="device") as plain:
        wanted = [piece.token_id for piece in plain.generate(random_ids(300), ANSWER)]
    assert ids == wanted


def test_a_captured_step_brings_its_own_weights(captures, monkeypatch):
    """Every pass waits for copies of its own, and a replay is counted as the pass that it is."""
    plain = tiny_llm(Full(), max_context=1024)
    llm = tiny_llm(Full(), max_context=1024, weights_offload=5)
    llm.loaded = replace(llm.load(), graphs=True)
    monkeypatch.setattr(
        "engine.forward.staged.ring._capturing", lambda device: captures.now or captures.replays
    )
    with llm.session() as session, plain.session() as other:
        session.runner._own_step.captures = True
        session.runner._dense_step.captures = True
        ids = [piece.token_id for piece in session.generate(random_ids(100), ANSWER)]
        wanted = [piece.token_id for piece in other.generate(random_ids(100), ANSWER)]
        passes = -(-100 // llm.chunk) + session.stats.decode_steps + step_runner.WARM_UP
        assert session.stats.weight_bytes_streamed == passes * llm.plan().staged_bytes
    assert ids == wanted and captures.count == 1 and captures.waited >= 5
