"""Steps of many widths on compiled pieces: one graph serves them.

Stops: a batch that falls apart at its ninth number of sessions, because torch.compile gives up
after eight shapes, and runs each step again session by session.
"""

import functools

import pytest
import torch

import engine.batch.stepping
from engine import Full
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

CONFIG = tiny_config(layers=2, heads=4, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, sharpness=2.0)
SESSIONS = 11


@pytest.fixture
def compiling(monkeypatch):
    """torch.compile without a compiler behind it; its counters start at zero."""
    compiled = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def test_a_batch_grows_beyond_eight_sessions(compiling, monkeypatch):
    alone = []

    def again(step):
        alone.append(step)

    monkeypatch.setattr(engine.batch.stepping, "_prepared_again", again)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=64, backend="auto", compile=True)
    plain = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=64, backend="auto", compile=False)
    batch, twin, sessions = llm.batch(slots=SESSIONS), plain.session(), []
    twin.prefill(random_ids(20))
    for count in range(1, SESSIONS + 1):
        sessions.append(batch.session())
        sessions[-1].prefill(random_ids(20))
        for session in sessions:
            batch.feed(session, 3)
        found = batch.step()
        assert not any(isinstance(value, Exception) for value in found.values())
        assert alone == [], f"{count} sessions were stepped one by one"
    torch.testing.assert_close(found[sessions[-1]], twin.decode(3), atol=2e-4, rtol=2e-4)
    # of either half a graph for one token and at most two for several, however many they are
    assert compiling["stats"]["unique_graphs"] <= 6
