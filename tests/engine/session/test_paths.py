"""The same text by different paths: chunks, truncate and redo, fork, a change of method, an
interrupted prefill.

Stops: a selector's window that kept queries of forgotten tokens, a budget of another turn, a fork
that shares what it should own, rows lost when a layer changes its layout.
"""

import dataclasses

import numpy as np
import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.needs import MOST_WINDOW, RING
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import Model, Shape, check_choice
from tests.engine.methods.paper_simulation import Conversation, Rule

CAPACITY = 1024
CONFIG = tiny_config(layers=8, heads=4, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=4)
MODEL = Model(Shape(8, 4, 2, 16, 1e-5), WEIGHTS)
SELECTORS = ("last", "uniform", "exponential")
PROMPT = random_ids(300, seed=1)
ANSWER = random_ids(20, seed=2)


def method_of(selector, **changes):
    """Filters 1 and 4, one wait layer each, sparse layers 3, 6 and 7, 24 tokens beside a tail of
    64.
    """
    budget = {} if "share" in changes else {"tokens": 24}
    return OmniKV(
        **{
            "filter_layers": (1, 4),
            "wait_layers": 1,
            "selector": selector,
            "tail": 64,
            "dense_below": 0,
            **budget,
            **changes,
        }
    )


def engine(chunk=512, method=None):
    """An LLM on the reference launchers."""
    return tiny_llm(method or Full(), CONFIG, WEIGHTS, max_context=CAPACITY, chunk=chunk)


def assert_same_future(a, b, tokens=ANSWER):
    """Both sessions go on with the same bits and the same selections, in sparse steps."""
    for token in tokens:
        steps = a.stats.sparse_steps
        assert torch.equal(a.decode(token), b.decode(token))
        assert list(a.selections) == list(b.selections) and a.stats.sparse_steps == steps + 1
        assert all(torch.equal(x, y) for x, y in zip(a.selections.values(), b.selections.values()))
        assert all(0 < len(x) < len(a) for x in a.selections.values())


def follow(session, oracle, tokens):
    """Steps of engine and float64 oracle together; returns how many selections were ties."""
    ties = 0
    for token in tokens:
        logits, mine = session.decode(token), session.selections
        choices, expected = oracle.step(token, mine)
        assert set(mine) == set(oracle.source.values())
        for layer, chosen in mine.items():
            ties += check_choice(
                chosen, choices[layer], min(oracle.rule.k, len(choices[layer].scores))
            )
        np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)
    return ties


# ------------------------------------------------------------------ chunks


@pytest.mark.parametrize("chunk", [7, 64, 299, 512])
@pytest.mark.parametrize("selector", SELECTORS)
def test_chunks_of_the_prompt_do_not_change_selections(selector, chunk):
    oracle = Conversation(MODEL, Rule((1, 4), 24, selector=selector, tail=64))
    with engine(chunk).session(method_of(selector)) as session:
        np.testing.assert_allclose(
            session.prefill(PROMPT).numpy(), oracle.prompt(PROMPT), atol=1e-4
        )
        assert follow(session, oracle, ANSWER[:6]) == 0
        assert session.stats.sparse_steps == 6


# ------------------------------------------------------------------ truncate


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("answered", [1, 20, RING + 10])
def test_a_truncated_answer_was_never_there(selector, answered):
    """/retry and Ctrl-C: back to the end of the prompt, however long the answer, the future is
    bitwise that of a new answer.
    """
    llm = engine()
    with llm.session(method_of(selector)) as session, llm.session(method_of(selector)) as never:
        logits = session.prefill(PROMPT)
        never.prefill(PROMPT)
        for token in random_ids(answered, seed=9):
            session.decode(token)
        session.truncate(len(PROMPT))
        assert torch.equal(session.last_logits, logits) and session.selections == {}
        assert_same_future(session, never)


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_step_taken_back_was_never_taken(selector):
    """Drafts: some tokens of an answer are taken back, up to what the query ring holds beyond the
    window.
    """
    with engine().session(method_of(selector)) as session:
        session.prefill(PROMPT)
        for token in random_ids(20, seed=9):
            session.decode(token)
        for back in (1, 17, RING - 16):
            with session.fork() as never:
                for token in random_ids(back, seed=10):
                    session.decode(token)
                session.truncate(len(never))
                assert_same_future(session, never, ANSWER[:8])
                session.truncate(320)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("kept", [299, 250, 70])
def test_a_truncated_prompt_was_always_shorter(selector, kept):
    """Back into the prompt: what follows is what follows the shorter prompt (the window is
    recomputed where the ring lost it).
    """
    oracle = Conversation(MODEL, Rule((1, 4), 24, selector=selector, tail=64))
    oracle.prompt(PROMPT[:kept])
    oracle.prompt(ANSWER[:3])
    with engine().session(method_of(selector)) as session:
        session.prefill(PROMPT)
        for token in random_ids(30, seed=9):
            session.decode(token)
        session.truncate(kept)
        session.prefill(ANSWER[:3])
        assert follow(session, oracle, ANSWER[3:]) <= 1


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("second", [5, 60, 200])
def test_another_text_after_a_truncate_leaves_no_old_queries(selector, second):
    """The ring still holds queries of forgotten positions: none of them may be taken for the new
    text's.
    """
    oracle = Conversation(MODEL, Rule((1, 4), 24, selector=selector, window=64, tail=64))
    with engine().session(method_of(selector, window=64)) as session:
        session.prefill(PROMPT)
        for token in random_ids(30, seed=9):
            session.decode(token)
        session.truncate(310)
        session.truncate(280)
        other = random_ids(second, seed=20)
        session.prefill(other)
        session.truncate(len(session) - 2)
        oracle.prompt(PROMPT[:280] + other[:-2])
        assert follow(session, oracle, ANSWER[:10]) <= 1


def test_the_ring_knows_what_it_holds():
    """Only the newest MOST_WINDOW queries of a chunk are stored: what lies before them is not
    covered, and not claimed to be.
    """
    with engine().session(method_of("uniform")) as session:
        session.prefill(PROMPT)
        assert session.query_ring.covers(300 - MOST_WINDOW, 300) and not session.query_ring.covers(
            299 - MOST_WINDOW, 300
        )
        for token in ANSWER:
            session.decode(token)
        assert session.query_ring.covers(300 - MOST_WINDOW, 320) and not session.query_ring.covers(
            299 - MOST_WINDOW, 320
        )
        session.truncate(310)
        assert session.query_ring.covers(300, 310) and not session.query_ring.covers(300, 311)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_share_is_of_the_prefill_that_the_answer_followed(share):
    """k = floor(share x length at the latest prefill): also after a truncate into an earlier
    answer, and into a prompt.
    """
    with engine().session(method_of("last", share=share)) as session:

        def chosen_at(token=5):
            session.decode(token)
            return len(session.selections[1])

        session.prefill(PROMPT[:200])
        assert chosen_at() == int(share * 200)
        for token in ANSWER:
            session.decode(token)  # 221 tokens
        assert len(session.selections[1]) == int(share * 200)
        session.prefill(PROMPT[200:])
        assert chosen_at() == int(share * 321)
        session.truncate(215)  # into the first answer
        assert chosen_at() == int(share * 200)
        session.prefill(PROMPT[:60])
        assert chosen_at() == int(share * 276)
        session.truncate(250)  # into the second prompt
        assert chosen_at() == int(share * 250)
        session.truncate(150)  # into the first
        assert chosen_at() == int(share * 150)
        session.truncate(0)
        session.prefill(PROMPT[:250])
        assert chosen_at() == int(share * 250)


# ------------------------------------------------------------------ fork


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_fork_goes_on_alike_and_alone(selector):
    llm = engine()
    with llm.session(method_of(selector, share=0.05)) as session:
        session.prefill(PROMPT)
        for token in random_ids(12, seed=9):
            session.decode(token)
        twin, third = session.fork(), session.fork()
        expected = [session.decode(token) for token in ANSWER]
        session.truncate(len(twin))
        for number, (token, logits) in enumerate(zip(ANSWER, expected)):
            # in the middle of the answer, at the same positions
            if number == 10:
                for other in random_ids(30, seed=11):
                    third.decode(other)
                third.prefill(PROMPT[:50])
            assert torch.equal(session.decode(token), logits)
        session.truncate(len(twin))
        assert_same_future(session, twin)
        session.truncate(len(PROMPT)), twin.truncate(len(PROMPT))
        assert_same_future(session, twin)
        session.close()
        twin.decode(3)


# ------------------------------------------------------------------ another method on the same bank


@pytest.mark.parametrize("selector", SELECTORS)
def test_full_then_omnikv_then_full(selector):
    """Nothing is read again: each part of the conversation is what the float64 oracle says for its
    method on that bank.
    """
    rule = Rule((1, 4), 24, selector=selector, tail=64)
    everything = dataclasses.replace(rule, filters=())
    oracle = Conversation(MODEL, everything)
    with engine().session() as session:
        oracle.prompt(PROMPT), session.prefill(PROMPT)
        steps = 0
        for method, now in (
            (Full(), everything),
            (method_of(selector), rule),
            (Full(), everything),
            (
                method_of(selector, filter_layers=(2,), wait_layers=0),
                dataclasses.replace(rule, filters=(2,), wait=0),
            ),
        ):
            session.set_method(method)
            oracle.use(now)
            before = session.stats
            assert follow(session, oracle, random_ids(9, seed=steps)) == 0
            sparse = session.stats.sparse_steps - before.sparse_steps
            assert sparse == (9 if now.filters else 0)
            steps += 9
        assert session.stats.prefill_tokens == len(PROMPT)


def test_a_change_of_method_keeps_every_row():
    with engine().session() as session:
        session.prefill(PROMPT)
        rows = [
            tuple(part[:, :, :300].clone() for part in session.bank.kv(layer)) for layer in range(8)
        ]
        for method in (
            method_of("last"),
            method_of("last", filter_layers=(3,)),
            Full(),
            method_of("uniform"),
        ):
            session.set_method(method)
            for layer, pair in enumerate(rows):
                assert all(
                    torch.equal(a, b[:, :, :300]) for a, b in zip(pair, session.bank.kv(layer))
                )


# ------------------------------------------------------------------ beginnings and interruptions


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_session_that_only_decodes(selector):
    """No prefill at all: the budget holds from the first token on."""
    oracle = Conversation(MODEL, Rule((1, 4), 24, selector=selector, tail=64))
    with engine().session(method_of(selector)) as session:
        assert follow(session, oracle, random_ids(170, seed=5)) <= 1
        assert all(len(chosen) == 24 for chosen in session.selections.values())
        assert session.stats.sparse_steps == 170


class Stop(Exception):
    """Raised by the progress callback."""


@pytest.mark.parametrize("selector", SELECTORS)
def test_an_interrupted_prefill_leaves_a_sound_session(selector):
    """Whole chunks stay; the answer that follows has the budget of what was read."""
    oracle = Conversation(MODEL, Rule((1, 4), int(0.1 * 200), selector=selector, tail=64))
    oracle.prompt(PROMPT[:200])

    def progress(p):
        if p.done == 200:
            raise Stop

    with engine(100).session(method_of(selector, share=0.1)) as session:
        with pytest.raises(Stop):
            session.prefill(PROMPT, progress)
        assert session.ids == PROMPT[:200]
        assert follow(session, oracle, ANSWER[:5]) == 0
        assert len(session.selections[1]) == 20
