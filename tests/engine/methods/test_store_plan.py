"""What is planned for the stores of evicting methods, beside what sessions hold."""

import pytest

from engine import LLM
from engine.methods.evict.scissorhands import Scissorhands
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.snapkv import SnapKV
from tests.builders import random_ids
from tests.engine.methods.method_checks import llm_of
from tests.engine.methods.method_table import CAPACITY, every


@pytest.mark.parametrize(
    ("row", "method"),
    [pytest.param(row, method, id=name) for name, row, method in every(lambda row: row.evicts)],
)
def test_a_plan_counts_a_prompt_and_an_answer_apart(row, method, monkeypatch):
    """What is planned for a store is what a session holds after a prompt that leaves an answer's
    room, and that answer; not a store of all tokens, as after a prompt of one.
    """
    monkeypatch.setattr("engine.methods.evict.shared.settings.ANSWER", 24, raising=False)
    llm = llm_of()
    plan = llm.plan(method)
    planned = plan.bytes_of("retained rows")
    # a prompt's scores, which are gone when the store is made
    rows = Evicting.store_bytes(method, plan.layers, llm.config, 4, CAPACITY)
    with llm.session(method) as session:
        session.prefill(random_ids(CAPACITY - 24))
        held = session.stats.store_bytes
        for token in random_ids(24):
            session.decode(token)
            held = max(held, session.stats.store_bytes)
        assert len(session) == CAPACITY
        kept = session.runtime.method.held_bytes(plan.layers, llm.config, 4, CAPACITY - 24, 24)
    # what some keep, their heads alone know: the most is planned
    assert held <= planned and (kept <= held or "U2" in row.without)
    # a store of share is planned for the longest prompt; Scissorhands' grows to twice its budget
    assert rows <= 1.1 * max(held, kept) or isinstance(method, Scissorhands)
    line = next(line for line in str(plan).splitlines() if "retained rows" in line)
    if method.max_rows(40) is None:
        assert "after a prompt of 488 tokens and an answer of 24; " in line
        assert line.endswith("a token of a longer answer")
    else:
        assert line.endswith("the most that is kept beside the bank")


def test_snapkv_at_128k_is_planned_for_what_it_keeps():
    """Llama-3-8B, 2,048 tokens kept: .27 GB after the prompt, .13 after an answer of 1,024; it was
    17.6 GB beside a bank of 17.2.
    """
    method, kept = SnapKV(forget=False), dict(max_context=131072, load=False, dtype="bfloat16")
    plan = LLM("llama-3-8b-262k", method=method, **kept)
    store = plan.plan().bytes_of("retained rows")
    assert store == (2048 + 1024 + 16) * 32 * 8 * (2 * 128 * 2 + 4)
    assert plan.plan().bytes_of("context bank") > 17e9
