"""Every method over a bank in host memory: the answers of a bank on the device, and rows that
really lie there.

Stops: a method that ignores the placement it was given, rows that stay on the device where host
memory was asked for, an answer that depends on where rows lie, bytes over the link that the plan
did not promise.
"""

import pytest
import torch

import engine.plan.placement as placement
from engine import Full
from engine.base.errors import SettingError
from engine.plan.placement import part_bytes
from tests.builders import random_ids
from tests.engine.methods.method_checks import llm_of
from tests.engine.methods.method_table import CAPACITY, TABLE, every

# of a method that evicts one setting: answers read its store, wherever the bank lies
FOUND = [
    pytest.param(row, method, id=name)
    for name, row, method in every()
    if name.endswith("-0") or not row.evicts
]
EVERY = pytest.mark.parametrize(("row", "method"), FOUND)
TIERED = pytest.mark.parametrize(
    ("row", "method"), [one for one in FOUND if not one.values[0].stays]
)


def prompts(row):
    """Tokens of the first prompts: as many as the method knows."""
    return (300,) if row.one_prompt else (140, 160)


def play(session, row):
    """Two turns with steps, a truncate into the first answer, and a fork that goes its own way."""
    seen = [session.prefill(random_ids(count, seed=count)) for count in prompts(row)]
    # into the next block of 64
    seen += [session.decode(token) for token in random_ids(24, seed=2)]
    chosen = session.selections
    session.truncate(len(session) - 22)
    seen += [session.decode(token) for token in random_ids(5, seed=3)]
    if not row.one_prompt:
        seen.append(session.prefill(random_ids(40, seed=4)))
    seen += [session.decode(token) for token in random_ids(3, seed=5)]
    with session.fork() as twin:
        seen += [twin.decode(token) for token in random_ids(4, seed=6)]
        seen.append(session.decode(3))
    return torch.stack(seen), chosen


@EVERY
def test_where_rows_lie_changes_no_bit(row, method):
    llm = llm_of()
    with llm.session(method, offload="device") as one, llm.session(method, offload="host") as two:
        (expected, chosen), (got, same) = play(one, row), play(two, row)
        assert torch.equal(got, expected)
        assert chosen.keys() == same.keys()
        assert all(torch.equal(chosen[layer], same[layer]) for layer in chosen)
        assert one.stats.host_bytes == 0
        assert (two.stats.host_bytes == 0) == bool(row.stays)
        if not row.stays:
            assert_rows_lie_in_host_memory(two, llm.plan(method, offload="host"), row)


def assert_rows_lie_in_host_memory(session, plan, row):
    """Whole blocks of every offloaded layer, and on the device what the plan says."""
    stats, layers = session.stats, plan.placement.layers
    assert session.bank.placement.layers == layers
    partial = plan.layers.partial_layers
    # what scans every key for others stays on the device
    reading = [i for i in partial if not row.scans(plan.layers, i)] or partial
    assert len(layers) >= len(reading or range(3))
    assert all(session.bank.on_host(layer) for layer in layers)
    blocks = -(-len(session) // 64)
    assert stats.host_bytes == blocks * 64 * len(layers) * part_bytes(session.loaded.config, 4)
    names = ("context bank", "working sets", "streaming")
    assert stats.bank_bytes == sum(size for name, size, _ in plan.items if name in names)


@TIERED
def test_the_fast_kernels_stream_what_the_plan_promised(row, method, monkeypatch):
    """Layers of several stream blocks: logits within rounding of the device's, and over the link no
    more than the plan says, for the prompt and for every step.
    """
    monkeypatch.setattr(placement, "STREAM_BLOCK", 64)
    llm = llm_of(backend="auto")
    settings = dict(max_context=CAPACITY, offload="host")
    ids, steps = random_ids(CAPACITY - 4), random_ids(4, seed=1)
    promised = llm.plan(method, offload="host", max_context=len(ids)).prompt_link_bytes
    plan = llm.plan(method, **settings)
    with llm.session(method, offload="device") as one, llm.session(method, **settings) as two:
        assert two.bank.placement.block < 300
        torch.testing.assert_close(two.prefill(ids), one.prefill(ids), atol=1e-4, rtol=1e-4)
        read = two.stats.bytes_streamed
        assert 0 < read <= promised
        if getattr(method, "cut", "") == "first_step":
            two.decode(7), one.decode(7)
            steps = steps[1:]
        before = moved(two)
        for token in steps:
            torch.testing.assert_close(two.decode(token), one.decode(token), atol=1e-4, rtol=1e-4)
        # a step reads rows of its tail, which lie on the device, with those that come over
        tail = two.runtime.needs.tail + 128
        newest = tail * len(plan.placement.layers) * part_bytes(llm.config, 4)
        assert moved(two) - before <= len(steps) * (plan.step_link_bytes + newest)


def moved(session):
    """Bytes that came to the device's buffers so far."""
    return session.stats.bytes_streamed + session.stats.bytes_fetched


@TIERED
def test_sessions_of_a_batch_share_no_rows(row, method):
    """Two conversations on the host tier in one step: each as on the device alone."""
    if row.without.get("U5"):
        pytest.skip(row.without["U5"])
    llm = llm_of()
    with llm.batch(slots=2) as batch:
        pairs = []
        for number, length in enumerate((140, 93)):
            ids = random_ids(length, seed=number)
            alone, one = (
                llm.session(method, offload="device"),
                batch.session(method, offload="host"),
            )
            alone.prefill(ids), one.prefill(ids)
            pairs.append((alone, one))
        for token in random_ids(5, seed=9):
            for _, one in pairs:
                batch.feed(one, token)
            done = batch.step()
            for alone, one in pairs:
                assert torch.equal(done[one], alone.decode(token))
                assert one.stats.host_bytes > 0
        for alone, _ in pairs:
            alone.close()


@TIERED
def test_a_session_is_saved_on_one_tier_and_restored_on_the_other(row, method, tmp_path):
    llm = llm_of()
    for first, then in (("host", "device"), ("device", "host")):
        path = tmp_path / first
        with llm.session(method, offload=first) as one:
            one.prefill(random_ids(150))
            [one.decode(token) for token in random_ids(4, seed=1)]
            if one.runtime.needs.history != "bank" and not one.runtime.needs.rebuilt:
                with pytest.raises(SettingError, match="expected a method that keeps every token"):
                    one.save(path)
                return
            one.save(path)
            with llm.restore(path, offload=then)[0] as two:
                assert (two.stats.host_bytes > 0) == (then == "host")
                for token in random_ids(4, seed=2):
                    assert torch.equal(one.decode(token), two.decode(token))


def test_a_bank_that_stays_is_said_in_one_line():
    """By the plan of a method without a use for host memory, where it was asked for."""
    llm = llm_of()
    for method in (row.neutral for row in TABLE if row.stays):
        said = f"{method.name} keeps its bank on the device: offload=host has no effect"
        plan = llm.plan(method, offload="host")
        assert plan.unheeded == said and said in str(plan) and "\n" not in said
        assert llm.plan(method, offload="device").unheeded == ""
    assert llm.plan(Full(), offload="host").unheeded == ""
