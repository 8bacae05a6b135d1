"""Tokens per second on a device whose calls return before their work has run.

Stops: the time of a launch reported as the time of a token (10,000 tokens per second), a caller who
takes his time between two pieces counted as decoding.
"""

import dataclasses

import pytest
import torch

import tools.compare.run as compare
from engine import Full
from engine.base.device import StepClock
from engine.cli.figures import answer_line, full_attention_cost
from engine.runner.step_runner import StepRunner
from engine.sampling.params import SamplingParams
from engine.session.generate import generate
from tests.builders import random_ids, tiny_llm
from tests.clocks import set_clock
from tests.fake_gpu import FakeGPU

STEP = 0.006  # seconds that the fake card works on a step


@pytest.fixture
def session(monkeypatch):
    """A session whose steps take STEP on the card's clock and nothing on the host's."""
    session = tiny_llm(Full(), max_context=512).session()
    gpu = FakeGPU(monkeypatch)
    session.clock = StepClock(torch.device("cuda:0"))
    set_clock(monkeypatch, "perf_counter", lambda: 0.0)
    real = StepRunner.run

    def run(runner, n, own):
        gpu.clock += STEP
        return real(runner, n, own)

    monkeypatch.setattr(StepRunner, "run", run)
    session.gpu = gpu
    return session


@pytest.mark.parametrize("ends", [(), (5,)], ids=["length", "end token"])
def test_an_answers_rate_is_the_devices(session, ends):
    """Also where the caller works between two pieces, and where an end token cuts the answer."""
    config = dataclasses.replace(session.loaded.config, eos_token_ids=ends)
    session.loaded = dataclasses.replace(session.loaded, config=config)
    pieces = []
    for piece in generate(session, random_ids(30), SamplingParams(max_tokens=20)):
        pieces.append(piece)
        session.gpu.clock += 1.0  # a slow terminal
        if len(pieces) == 9 and ends:
            session.last_logits = torch.zeros(97).index_fill(0, torch.tensor([5]), 9.0)
    stats = pieces[-1].stats
    steps = stats.sparse_steps + stats.dense_steps
    assert steps == (9 if ends else 20)
    assert stats.decode_seconds == pytest.approx(steps * STEP)
    assert stats.decode_rate == pytest.approx(1 / STEP)
    assert f"{1000 * STEP:.1f} ms each" in answer_line(session.planner, session, stats, None)
    assert "after 6.0 ms" in full_attention_cost(session.planner, 30, stats, 0)


def test_the_sessions_own_figures_and_the_comparisons_are_the_devices(session):
    answer = compare.speak(session, random_ids(30), 11, sparse=False)
    assert answer.decode_seconds == pytest.approx(10 * STEP) and answer.steps == 10
    assert session.stats.decode_seconds == pytest.approx(10 * STEP)


def test_what_runs_again_is_not_counted_twice(session):
    """An evicting method goes back by decoding again."""
    from engine.methods.evict.h2o import H2O

    session.set_method(H2O(tokens=30))
    session.prefill(random_ids(40))
    for token in random_ids(8):
        session.decode(token)
    session.truncate(45)
    assert session.stats.decode_steps == 8
    assert session.stats.decode_seconds == pytest.approx(8 * STEP)


def test_a_step_that_still_runs_is_counted_later(session):
    """Nobody waits for it but one who asks for all."""
    session.gpu.finished = False
    session.prefill(random_ids(30))
    session.decode(3)
    assert session.counters.decode_seconds == 0 and not session.gpu.of("wait for an event")
    assert session.stats.decode_seconds == pytest.approx(STEP)


def test_a_step_that_failed_has_no_time(session, monkeypatch):
    def fails(runner, n, own):
        session.gpu.clock += 1.0
        raise ValueError

    monkeypatch.setattr(StepRunner, "run", fails)
    with pytest.raises(ValueError):
        session.decode(3)
    assert session.clock.ended(wait=True) == 0
