"""A model on the second card: that card is current whenever the engine launches, and the caller's
own choice holds in between.

Stops: `device="cuda:1"` that loads and dies at the first decode step, kernels that run unordered on
card 0, a caller whose current device changed under his hands.
"""

from dataclasses import replace

import pytest
import torch

import engine.runner.state
from engine import LLM, OmniKV
from engine.bank.host.streams import SideStream, wait
from engine.load.options import Options
from engine.session.generate import generate
from tests.builders import random_ids, session_config, tiny_llm
from tests.fake_gpu import FakeGPU

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
SECOND = torch.device("cuda:1")


@pytest.fixture
def moved(monkeypatch):
    """(an LLM that believes itself on the second of two cards, the cards)."""
    llm = tiny_llm(METHOD, max_context=512, compile=False)
    gpu = FakeGPU(monkeypatch)
    # a Loaded takes its device from the weights, a plan from its options
    monkeypatch.setattr(type(llm.loaded), "device", SECOND)
    llm.planner.device = SECOND
    llm.planner.options = llm.options.__class__(offload="device")
    return llm, gpu


def cards_seen(gpu, monkeypatch, owner, name):
    """The current card at every call of owner.name from now on."""
    real, seen = getattr(owner, name), []

    def spy(*arguments, **named):
        seen.append(gpu.now)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, spy)
    return seen


def test_every_request_makes_the_llms_card_current(moved, monkeypatch):
    """Chunks, steps, a prompt's end, going back, another method, a fork, the end."""
    llm, gpu = moved
    session = llm.session()
    steps = cards_seen(gpu, monkeypatch, type(session.runner), "run")
    ends = cards_seen(gpu, monkeypatch, type(session.runtime), "end_prompt")
    session.prefill(random_ids(100), more=True)
    session.decode(3)  # ends the open prompt first
    session.truncate(50)
    session.refresh_logits()
    session.set_method(replace(METHOD, tokens=32))
    session.decode(4)
    closes = cards_seen(gpu, monkeypatch, type(session.bank), "close")
    session.fork().close()
    session.close()
    assert len(steps) == 2 and len(ends) >= 3 and len(closes) == 2
    assert set(steps + ends + closes) == {1} and gpu.now == 0


def test_a_session_is_made_on_the_llms_card(moved, monkeypatch):
    llm, gpu = moved
    made = cards_seen(gpu, monkeypatch, engine.runner.state, "QueryRing")
    llm.session()
    assert made == [1] and gpu.now == 0


def test_weights_are_loaded_on_the_llms_card(monkeypatch):
    """The stream is lazy: it runs while the model is put together."""
    gpu, seen = FakeGPU(monkeypatch), []

    class Stop(Exception):
        pass

    def stream(config, dtype, device):
        seen.append((device, gpu.now))
        raise Stop
        yield

    with pytest.raises(Stop):
        LLM.from_stream(session_config(), stream, device="cuda:1", offload="device")
    assert seen == [(SECOND, 1)] and gpu.now == 0


def test_between_two_pieces_the_callers_card_is_current(moved):
    """Two answers interleaved, closed in the order of their beginning, leave what they found."""
    llm, gpu = moved
    sessions = [llm.session(), llm.session()]
    answers = [generate(session, random_ids(20)) for session in sessions]
    for _ in range(3):
        for answer in answers:
            next(answer)
            assert gpu.now == 0
    for answer in answers:
        answer.close()
    assert gpu.now == 0


def test_a_wait_holds_back_the_stream_of_its_own_card(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    wait(SideStream(SECOND).record_event(), SECOND)
    assert gpu.of("wait_event") == [1]


def test_auto_is_a_card_by_its_number(monkeypatch):
    """A device without a number is whatever card is current when it is asked."""
    FakeGPU(monkeypatch)
    assert Options(device="auto").resolved_device() == torch.device("cuda", 0)
