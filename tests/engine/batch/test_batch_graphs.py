"""A shared step as one graph, as far as a machine without a GPU shows it.

A "graph" here runs the captured step again into the same buffer. That shows what a replay would
read (the static tensors, never a value of the host) and when steps are captured, not whether a GPU
captures them.

Stops: a capture for every join and leave, a graph that outlives its session, a replay that reads a
token of the step that was captured, weights that are read once for each sequence.
"""

from types import SimpleNamespace

import pytest
import torch

import engine.batch.step as batch_step
from engine import OmniKV
from engine.batch.step import PATIENCE
from tests.builders import random_ids, session_config, tiny_llm
from tests.programs.launches import Launches

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)


@pytest.fixture
def captures(monkeypatch):
    """The sets that were captured."""
    made = []

    def captured(device, step):
        logits = step()
        made.append(logits.shape[1])
        return SimpleNamespace(replay=lambda: logits.copy_(step())), logits

    monkeypatch.setattr(batch_step, "captured", captured)
    return made


def opened(batch, count):
    sessions = [batch.session() for _ in range(count)]
    for seed, session in enumerate(sessions):
        session.prefill(random_ids(100 + 40 * seed, seed=seed))
        for step in (session.runner._own_step, session.runner._dense_step):
            step.captures = True
    return sessions


def stepped(batch, sessions, twins, token):
    """One step of these sessions, as their twins alone say it."""
    for session in sessions:
        batch.feed(session, token)
    found = batch.step()
    for session in sessions:
        assert torch.equal(found[session], twins[session].decode(token))


def test_a_set_that_stays_is_captured_once_and_replays_what_is_fed(captures):
    llm = tiny_llm(SPARSE, backend="reference", max_context=1024)
    with llm.batch() as batch:
        sessions = opened(batch, 3)
        twins = {session: session.fork() for session in sessions}
        for number in range(PATIENCE + 3):
            assert captures == ([3] if number >= PATIENCE else [])
            stepped(batch, sessions, twins, 5 + number)
        stepped(batch, sessions[:2], twins, 1)  # one has nothing to say: eager
        stepped(batch, sessions, twins, 2)  # the set that is known: its graph
        assert captures == [3] and len(batch._stepping._step._graphs) == 1
        for number in range(PATIENCE):
            stepped(batch, sessions[1:], twins, 30 + number)
        assert captures == [3, 2] and len(batch._stepping._step._graphs) == 2
        sessions[0].close()
        stepped(batch, sessions[1:], twins, 3)
        assert len(batch._stepping._step._graphs) == 1, "no graph reads a bank that is gone"
        sessions[2].truncate(50), twins[sessions[2]].truncate(50)
        stepped(batch, sessions[1:], twins, 4)
        assert captures == [3, 2]


def test_a_longer_bank_is_another_bucket(captures, monkeypatch):
    monkeypatch.setattr("engine.forward.graphs.FIRST_BUCKET", 128)
    llm = tiny_llm(SPARSE, backend="reference", max_context=1024)
    with llm.batch() as batch:
        sessions = opened(batch, 2)  # 100 and 140 tokens: buckets of 128 and 256
        twins = {session: session.fork() for session in sessions}
        for number in range(28 + PATIENCE + 2):
            stepped(batch, sessions, twins, number)
        assert captures == [2, 2]


def test_graphs_are_kept_for_the_sets_that_were_used_last(captures, monkeypatch):
    monkeypatch.setattr(batch_step, "MOST_GRAPHS", 2)
    llm = tiny_llm(SPARSE, backend="reference", max_context=1024)
    with llm.batch() as batch:
        sessions = opened(batch, 3)
        twins = {session: session.fork() for session in sessions}
        for some in (sessions, sessions[:2], sessions[1:]):
            for number in range(PATIENCE):
                stepped(batch, some, twins, number)
        assert captures == [3, 2, 2] and len(batch._stepping._step._graphs) <= 2
        stepped(batch, sessions[1:], twins, 1)
        assert captures == [3, 2, 2]


def test_products_are_launched_once_and_the_host_asks_nothing():
    """Triton launchers whose kernels only count, and torch's operators beside them."""
    counts = []
    record = Launches()
    with record.kernels_counted():
        config = session_config(heads=8, kv_heads=4, head_dim=16)
        llm = tiny_llm(
            SPARSE, config, backend="triton", dtype="bfloat16", step="fused", max_context=1024
        )
        with llm.batch() as batch:
            sessions = [batch.session() for _ in range(4)]
            for session in sessions:
                session.adopt([1] * 300)
                session.bank.before_step(301)
                session.runner.feed(1, 301)
            for count in (1, 4):
                parts = tuple((session.runner, True, 1024) for session in sessions[:count])
                record.by.clear()
                with torch.no_grad(), record:
                    batch._stepping._step._together(parts)
                counts.append(record.by.copy())
    one, four = counts
    layers = config.num_layers
    assert one["product_kernel"] == four["product_kernel"] == 4 * layers + 1
    assert one["norm_kernel"] == four["norm_kernel"] == 2 * layers + 1
    assert four["rotate_store_kernel"] == 4 * one["rotate_store_kernel"] == 4 * layers
    assert not {"_local_scalar_dense", "item", "nonzero", "_to_copy_to_host"} & set(four)
