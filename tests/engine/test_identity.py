"""OmniKV whose budget and tail cover the bank is Full: to the bit on the reference launchers,
within rounding on the fast ones.

Stops: a row lost, doubled, reordered or seen too early on the sparse path; a wait layer or a
selector that changes an answer.
"""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.methods.full import Full
from engine.methods.omnikv.settings import OmniKV
from engine.plan.layers import tail_start
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

CAPACITY = 512
SHAPES = ((5, 4, 1), (6, 4, 2), (8, 4, 4), (10, 8, 2))  # layers, heads, kv heads


@functools.lru_cache
def model(shape):
    """Config and weights of one shape."""
    layers, heads, kv_heads = shape
    config = tiny_config(layers=layers, heads=heads, kv_heads=kv_heads, max_positions=CAPACITY)
    return config, tiny_weights(config, seed=layers)


@st.composite
def runs(draw):
    """(shape, method settings, chunk, turns): turns are (prompt length, tokens generated after it)."""
    shape = draw(st.sampled_from(SHAPES))
    filters = sorted(draw(st.sets(st.integers(0, shape[0] - 2), min_size=1, max_size=3)))
    wait = draw(st.integers(0, 2))
    turns = draw(
        st.lists(st.tuples(st.integers(1, 150), st.integers(1, 10)), min_size=1, max_size=3)
    )
    total = sum(prompt + answer for prompt, answer in turns)
    tail = draw(st.sampled_from((64, 100, 256)))
    enough = max(1, total - tail + draw(st.integers(0, 3)))
    budget = draw(st.sampled_from(({"tokens": enough}, {"tokens": 4096}, {"share": 1.0})))
    # generated tokens beyond the tail are beyond a share of the prompt
    if "share" in budget and turns[-1][1] > tail:
        budget = {"tokens": enough}
    selector = draw(st.sampled_from(("last", "uniform", "exponential")))
    method = dict(
        filter_layers=tuple(filters),
        wait_layers=wait,
        tail=tail,
        selector=selector,
        scores=draw(st.sampled_from((None, "raw"))),
        window=draw(st.sampled_from((1, 16, 64))),
        sink=draw(st.sampled_from((0, 1))),
        dense_below=0,
        **budget,
    )
    return shape, method, draw(st.sampled_from((1, 7, 64, 512))), turns


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


def both(llm, method, turns, compare):
    """Feed the same turns to OmniKV and Full; compare(sparse logits, full logits) after every call."""
    with llm.session(method) as sparse, llm.session(Full()) as full:
        for number, (prompt, answer) in enumerate(turns):
            ids = random_ids(prompt + answer, seed=number)
            compare(sparse.prefill(ids[:prompt]), full.prefill(ids[:prompt]))
            for token in ids[prompt:]:
                before = sparse.stats
                compare(sparse.decode(token), full.decode(token))
                if sparse.plan.sparse_layers:
                    assert_all_was_read(sparse, before)


def equal_bits(a, b):
    """Bitwise."""
    assert torch.equal(a, b), (a - b).abs().max()


def close(a, b):
    """Within float32 rounding of logits near 3."""
    torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)


QUIET = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore:OmniKV with filter_layers")
@settings(QUIET, max_examples=25)
@given(runs())
def test_a_budget_for_everything_is_full_attention_to_the_bit(run):
    shape, method, chunk, turns = run
    llm = tiny_llm(Full(), *model(shape), max_context=CAPACITY, chunk=chunk)
    both(llm, OmniKV(**method), turns, equal_bits)


@pytest.mark.filterwarnings("ignore:OmniKV with filter_layers")
@settings(QUIET, max_examples=12)
@given(runs())
def test_and_within_rounding_on_the_fast_kernels(run):
    shape, method, chunk, turns = run
    llm = tiny_llm(Full(), *model(shape), max_context=CAPACITY, chunk=chunk, backend="auto")
    both(llm, OmniKV(**method), turns, close)


@pytest.mark.parametrize("selector", ["last", "uniform", "exponential"])
def test_thirty_tokens_across_a_tail_block(selector):
    """The tail's start moves at n = 192 and 256 and 320: the block that leaves it must be chosen at
    once.
    """
    llm = tiny_llm(Full(), *model(SHAPES[1]), max_context=CAPACITY)
    method = OmniKV(filter_layers=(1, 3), tokens=400, tail=64, selector=selector, dense_below=0)
    for prompt in (180, 240, 310):
        both(llm, method, [(prompt, 30)], equal_bits)


def test_one_row_less_is_seen():
    """The comparison can fail: a budget one short of the candidates changes the logits."""
    llm = tiny_llm(Full(), *model(SHAPES[1]), max_context=CAPACITY)
    short = OmniKV(filter_layers=(1,), tokens=255, tail=64, dense_below=0)
    with llm.session(short) as sparse, llm.session(Full()) as full:
        ids = random_ids(330)
        sparse.prefill(ids), full.prefill(ids)
        a, b = sparse.decode(3), full.decode(3)
        assert len(sparse.selections[1]) == 255 == tail_start(331, 64) - 1
        assert not torch.equal(a, b)
