"""What a method says of its prompts' rows is true: rows said to be full attention's are those of
Full(), bit for bit, and a method that says nothing of them reads its prompts otherwise.

Stops: rows that another method would take for full attention's from a cache, and a prompt that is
read again although any method's rows would do.
"""

import random
from dataclasses import replace

import pytest
import torch

from engine.bank.row_origins import FULL, RowOrigins
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from tests.builders import random_ids
from tests.engine.methods.method_checks import llm_of
from tests.engine.methods.method_table import SPARSE, TABLE, every

ROWS = [row for row in TABLE if row.name != "window_recompute"]  # which has none
METHODS = [(name, row, method) for name, row, method in every(lambda row: row in ROWS)]
IDS = [name for name, _, _ in METHODS]
BLOCKS = [
    OmniKV(**SPARSE, dense_layers="block_sparse"),
    OmniKV(**SPARSE, prefill_ratio=1, prefill_block=64, dense_layers="block_sparse"),
]


def played(llm, method, turns):
    """A session after turns of (prompt tokens, answer tokens)."""
    session, ids = llm.session(method), iter(random_ids(500, seed=6))
    for prompt, answer in turns:
        session.prefill([next(ids) for _ in range(prompt)])
        for _ in range(answer):
            session.decode(next(ids))
    return session


def of_full_attention(session):
    """How many first tokens have rows of full attention, as the session notes."""
    n = len(session)
    return next((i for i in range(n) if session.origins.text(i, i + 1) != FULL), n)


def same_rows(one, other, stop):
    return all(
        torch.equal(a[0, :, :stop], b[0, :, :stop])
        for layer in range(one.bank.num_layers)
        for a, b in zip(one.bank.kv(layer), other.bank.kv(layer))
    )


@pytest.mark.parametrize(("row", "method"), [case[1:] for case in METHODS], ids=IDS)
def test_rows_said_to_be_full_attentions_are(row, method):
    """Also after an answer, and those of a second prompt."""
    llm = llm_of()
    turns = [(200, 4)] if row.one_prompt else [(200, 0), (70, 4), (60, 0)]
    with played(llm, method, turns) as session, played(llm, Full(), turns) as full:
        assert same_rows(session, full, of_full_attention(session))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_of_a_first_prompt_are_named_where_full_attention_reads_it(row):
    llm, chosen = llm_of(), []
    for method in row.sparse or (row.neutral,):
        with played(llm, method, [(400, 0)]) as session, played(llm, Full(), [(400, 0)]) as full:
            assert (of_full_attention(session) == 400) == (not row.approximate)
            chosen.append(not same_rows(session, full, 400))
    assert any(chosen) == row.approximate


@pytest.mark.parametrize("name", ["omnikv", "omnikv_exp", "quest", "tidaldecode", "pod_untrained"])
def test_exact_mode_reads_and_writes_rows_of_full_attention(name):
    row, llm = next(row for row in TABLE if row.name == name), llm_of()
    turns = [(200, 6), (60, 3)]
    method = row.sparse[0]
    if name == "pod_untrained":  # verification reads every key
        method = replace(method, forget=False)
    with played(llm, Exact(method), turns) as session, played(llm, Full(), turns) as full:
        assert of_full_attention(session) == len(session) == 269
        assert same_rows(session, full, 269)


@pytest.mark.parametrize("method", BLOCKS, ids=("block_sparse", "both"))
def test_block_sparse_layers_name_nothing_from_where_they_may_choose(method):
    plan = method.plan(llm_of().config)
    origins = RowOrigins(method.prompt_origins(plan, 0, 0, 20_000, 20_000))
    assert origins.text(16_384 - 64, 16_384) is not None
    assert origins.text(16_384, 16_385) is None and origins.text(19_999, 20_000) is None
    late = RowOrigins()
    late.add(17_000, method.prompt_origins(plan, 0, 17_000, 18_000, 20_000))
    assert late.of(17_000, 18_000) == [(18_000, None)]


def test_a_class_that_is_made_from_another_says_nothing():
    """Its prompts may be read in any way."""

    class Own(Full):
        pass

    plan = Own().plan(llm_of().config)
    assert Own().prompt_origins(plan, 0, 0, 100, 100) == [(100, None)]


def test_a_block_that_a_chunk_cuts_is_not_named():
    """Chunks of a server follow its speed, and a part of a block chooses for itself."""
    method = OmniKV(**SPARSE, prefill_ratio=1, prefill_block=64, prefill_dense_end=0)
    plan = method.plan(llm_of().config)
    whole = RowOrigins(method.prompt_origins(plan, 0, 0, 512, 512))
    assert "prefill_ratio=1" in whole.text(256, 320) and whole.text(0, 64) == FULL
    cut = method.prompt_origins(plan, 0, 300, 420, 512)
    assert [stop for stop, origin in cut if origin is None] == [320, 420]
    assert [stop for stop, origin in cut if origin] == [384]


def test_origins_against_a_list_of_them():
    draw = random.Random(3)
    for _ in range(300):
        noted, kept = RowOrigins(), []
        for _ in range(draw.randint(1, 6)):
            first = draw.randint(0, len(kept) + 3)
            spans, stop = [], first
            for _ in range(draw.randint(0, 3)):
                stop += draw.randint(1, 4)
                spans.append((stop, draw.choice([FULL, "other", None])))
            noted.add(first, spans)
            kept = (kept + [None] * first)[:first]
            for stop, origin in spans:
                kept += [origin] * (stop - len(kept))
        for i, origin in enumerate(kept):
            assert noted.text(i, i + 1) == origin
        a = draw.randint(0, len(kept))
        b = draw.randint(a + 1, len(kept) + 2)
        part = kept[a:b] + [None] * (b - len(kept))
        if None in part[: b - a]:
            assert noted.text(a, b) is None
        elif len(set(part)) == 1:
            assert noted.text(a, b) == part[0]
        else:
            assert noted.text(a, b) not in (None, FULL, "other")
