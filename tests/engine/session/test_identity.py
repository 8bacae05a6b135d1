"""OmniKV at the edges of its tail, with a budget for everything: Full, to the bit.

Stops: a row lost, doubled, reordered or seen too early where a block leaves the tail. The method
table's U1 has the other settings.
"""

import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.layers import tail_start
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

CAPACITY = 512
CONFIG = tiny_config(layers=8, max_positions=CAPACITY)


def assert_all_was_read(session, before):
    """The step was sparse by its counters and by its selections, and its sparse layers read every
    row.
    """
    n, plan = len(session), session.plan
    assert session.stats.sparse_steps == before.sparse_steps + 1
    assert session.stats.rows_read_sparse - before.rows_read_sparse == n * len(plan.sparse_layers)
    groups = [group.filter_layer for group in plan.groups if group.layers]
    assert list(session.selections) == groups
    start = tail_start(n, session.method.tail)
    assert all(torch.equal(chosen, torch.arange(start)) for chosen in session.selections.values())


def both(llm, method, turns):
    """Feed the same turns to OmniKV and Full: the same bits after every call."""
    with llm.session(method) as sparse, llm.session(Full()) as full:
        for number, (prompt, answer) in enumerate(turns):
            ids = random_ids(prompt + answer, seed=number)
            assert torch.equal(sparse.prefill(ids[:prompt]), full.prefill(ids[:prompt]))
            for token in ids[prompt:]:
                before = sparse.stats
                assert torch.equal(sparse.decode(token), full.decode(token))
                if sparse.plan.sparse_layers:
                    assert_all_was_read(sparse, before)


@pytest.mark.parametrize(
    ("selector", "tail", "wait_layers"),
    [("last", 64, 1), ("uniform", 100, 0), ("exponential", 64, 2)],
)
def test_thirty_tokens_across_a_tail_block(selector, tail, wait_layers):
    """The tail's start moves at n = 192 and 256 and 320: the block that leaves it must be chosen at
    once.
    """
    settings = dict(filter_layers=(1, 3), tokens=400, sink=1, dense_below=0)
    method = OmniKV(selector=selector, tail=tail, wait_layers=wait_layers, **settings)
    llm = tiny_llm(Full(), CONFIG, tiny_weights(CONFIG, seed=6), max_context=CAPACITY)
    for prompt in (180, 240, 310):
        both(llm, method, [(prompt, 30), (1, 3)])
