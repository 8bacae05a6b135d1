"""On a GPU banks and buffers are whole blocks of 64 tokens, so that no size and no stride makes
Triton compile a kernel once more; the limit of a session stays what was asked for.

Stops: seconds of compiling in mid-answer when the last bucket begins, a plan that does not count
the rows added, a buffer of another length than the bank.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.bank.base
import engine.load.memory
import engine.load.planner
from engine import OmniKV
from engine.bank.device import DeviceBank
from engine.base.errors import ContextTooLong
from engine.forward.graphs import bucket_for
from engine.load.memory import memory_items
from engine.plan.placement import reserved_rows
from tests.builders import random_ids, session_config, tiny_llm

CONFIG = session_config()
METHOD = OmniKV(filter_layers=(1, 4), share=0.1, tail=64, dense_below=0)
LAYERS = METHOD.plan(CONFIG)


def divisible(bank):
    """Which sizes and strides of a bank's views Triton sees as multiples of 16."""
    numbers = [bank.capacity]
    for layer in range(bank.num_layers):
        for rows in bank.kv(layer):
            numbers += [*rows.stride(), rows.shape[2]]
    return [number % 16 == 0 for number in numbers]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70000), st.integers(1, 70000))
def test_a_kernel_meets_the_same_divisibility_at_every_capacity(capacity, n):
    bank, round_one = (
        DeviceBank(CONFIG, LAYERS, rows, torch.bfloat16, "meta") for rows in (capacity, 4096)
    )
    assert divisible(bank) == divisible(round_one)
    assert capacity <= bank.capacity < capacity + 64
    assert bucket_for(min(n, capacity), bank.capacity) % 64 == 0


@pytest.mark.parametrize("context", [1, 63, 64, 1001, 4097, 131071])
def test_the_plan_counts_the_rows_that_are_added(context):
    def items(tokens):
        found = memory_items(
            CONFIG, METHOD, LAYERS, torch.bfloat16, torch.device("cuda"), tokens, 1, "triton"
        )
        return {name: size for name, size, _ in found}

    bank = DeviceBank(CONFIG, LAYERS, context, torch.bfloat16, "meta")
    assert items(context) == items(bank.capacity)
    assert items(context)["context bank"] == bank.nbytes
    assert reserved_rows(context, "cpu") == context


@pytest.mark.parametrize("offload", ["device", "host"])
def test_a_session_of_an_odd_length_in_whole_blocks(offload, monkeypatch):
    """A CPU that rounds as a GPU does: bank, scratch and scores of 1024 rows for a limit of 1000,
    the answers of exactly 1000, and the bytes of the plan.
    """
    settings = dict(max_context=1000, offload=offload, backend="reference")
    with tiny_llm(METHOD, **settings).session() as session:
        expected = [session.prefill(random_ids(300)), *(session.decode(i) for i in range(5))]
    for module in (engine.bank.base, engine.load.planner, engine.load.memory):
        monkeypatch.setattr(module, "reserved_rows", lambda tokens, _: reserved_rows(tokens, "gpu"))
    llm = tiny_llm(METHOD, **settings)
    with llm.session() as session:
        got = [session.prefill(random_ids(300)), *(session.decode(i) for i in range(5))]
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        runtime = session.runtime
        assert session.bank.capacity == runtime.setup.capacity == runtime.scores.shape[1] == 1024
        names = ("context bank", "working sets", "streaming")
        items = {name: size for name, size, _ in llm.plan().items}
        assert session.bank.nbytes == sum(items.get(name, 0) for name in names)
        assert session.scratch_bytes == items["decode scratch"]
        assert runtime.nbytes == items["selection"]
        with pytest.raises(ContextTooLong, match="1000"):
            session.prefill(random_ids(700))
