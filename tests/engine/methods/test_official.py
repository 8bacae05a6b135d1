"""OmniKV(official=True) against an independent float64 simulation of the published code: equal
indices at every step.

Stops: any drift of the compatibility mode from the published behaviour, which would make
comparisons meaningless.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods import official_simulation as simulation
from tests.engine.methods.official_simulation import check_choice

LAYERS = 12
CONFIG = tiny_config(layers=LAYERS, heads=4, kv_heads=2)
SHORT, LONG = 61, 300
FILTER_SETS = ((0, 4), (2, 3, 8), (1, 5), (2,))
# below the window, 1, 0, a fraction that rounds down to 0 at both lengths, above the window,
# fractions
BUDGETS = (8, 1, 0, 0.003, 33, 0.067, 0.3)
ENGINE = {
    "last": ("last", None),
    "softmax_before_last": ("last", "softmax"),
    "uniform": ("uniform", None),
    "exp": ("exponential", None),
}


def cases(scoring):
    """(length, Settings): budgets x lengths under the published window of 16, and waits x filter
    sets under one of 5.
    """
    for number, (budget, length) in enumerate(itertools.product(BUDGETS, (SHORT, LONG))):
        yield length, simulation.Settings(FILTER_SETS[number % 4], number % 3, scoring, budget, 16)
    for number, (wait, filters) in enumerate(itertools.product((0, 1, 2), FILTER_SETS)):
        yield (
            (SHORT, LONG)[number % 2],
            simulation.Settings(filters, wait, scoring, BUDGETS[number % len(BUDGETS)], 5),
        )


@pytest.fixture(scope="module")
def world():
    """The engine, the simulated model, and its prompts by length."""
    weights = tiny_weights(CONFIG, seed=3)
    model = simulation.Model(simulation.Shape(LAYERS, 4, 2, 16, 1e-5), weights)
    prompts = {n: simulation.prefill(model, random_ids(n, seed=n)) for n in (SHORT, LONG)}
    return tiny_llm(Full(), CONFIG, weights, max_context=512), model, prompts


def official(scoring, filters, wait, budget, window=16):
    """The engine's method for the published settings."""
    selector, scores = ENGINE[scoring]
    size = {"tokens": budget} if isinstance(budget, int) else {"share": budget}
    return OmniKV(
        filter_layers=filters,
        wait_layers=wait,
        selector=selector,
        scores=scores,
        window=window,
        official=True,
        **size,
    )


def compare(world, length, settings, steps):
    """Both sides fed the same tokens; returns how many selections were compared and how many were
    float32 ties.
    """
    llm, model, prompts = world
    method = official(
        settings.scoring, settings.filters, settings.wait, settings.budget, settings.window
    )
    decode = simulation.Decode(model, prompts[length], settings)
    compared = ties = 0
    with llm.session(method) as session:
        first = session.prefill(random_ids(length, seed=length)).numpy()
        np.testing.assert_allclose(first, prompts[length].logits, atol=1e-4)
        assert session.selections == {}
        for step, token in enumerate(random_ids(steps, seed=7), 1):
            before = session.stats
            logits = session.decode(token)
            mine = session.selections
            choices, expected = decode.step(token, mine)
            groups = set(decode.source.values())
            assert set(mine) == groups
            for layer in groups:
                ties += check_choice(
                    mine[layer], choices[layer], len(choices[layer].indices) - choices[layer].forced
                )
                compared += 1
            np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)
            after = session.stats
            assert after.sparse_steps == step and after.dense_steps == 0
            rows = sum(decode.seen[layer] for layer in decode.source)
            assert after.rows_read_sparse - before.rows_read_sparse == rows
    return compared, ties


@pytest.mark.parametrize("scoring", simulation.SCORINGS)
def test_every_index_of_every_step_is_that_of_the_published_code(world, scoring):
    compared = ties = 0
    for length, settings in cases(scoring):
        found = compare(world, length, settings, settings.window + 2 if settings.windowed else 5)
        compared, ties = compared + found[0], ties + found[1]
    assert compared > 200 and ties <= compared // 100, (compared, ties)


@pytest.mark.parametrize("window", [1, 5, 32])
@pytest.mark.parametrize("scoring", ["uniform", "exp"])
def test_other_windows(world, scoring, window):
    compared, ties = compare(
        world, SHORT, simulation.Settings((1, 5), 1, scoring, 12, window), window + 4
    )
    assert ties <= compared // 20


def test_raw_scores_are_the_default_of_last_and_softmax_that_of_the_windows():
    assert OmniKV(official=True).kind == "raw"
    assert OmniKV(official=True, scores="softmax").kind == "softmax"
    assert OmniKV(official=True, selector="uniform").kind == "softmax"
    assert OmniKV(official=True, selector="exponential").kind == "softmax"
    with pytest.raises(SettingError, match="scores"):
        OmniKV(official=True, selector="uniform", scores="raw")


@pytest.mark.parametrize("scoring", simulation.SCORINGS)
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("budget", ["S", "S+1", 4096, 1.0])
def test_budget_of_the_whole_prompt_is_full_attention_to_the_bit(world, scoring, length, budget):
    llm, _, _ = world
    budget = {"S": length, "S+1": length + 1}.get(budget, budget)
    ids = random_ids(length, seed=length)
    with (
        llm.session(official(scoring, (2, 3, 8), 1, budget)) as sparse,
        llm.session(Full()) as full,
    ):
        assert torch.equal(sparse.prefill(ids), full.prefill(ids))
        for step, token in enumerate(random_ids(18, seed=1), 1):
            assert torch.equal(sparse.decode(token), full.decode(token)), step
            assert all(
                torch.equal(chosen, torch.arange(length)) for chosen in sparse.selections.values()
            )
            assert sparse.stats.sparse_steps == step and len(sparse.selections) == 2


def test_budget_below_the_window_shrinks_as_the_window_leaves_the_prompt(world):
    """Budget 8, window 16: 1 + 15 at t = 1, 1 + 14 at t = 2, ... and 8 from t = 9 on; nothing
    forced from t = 16 on.
    """
    llm, _, _ = world
    with llm.session(official("uniform", (1, 5), 1, 8)) as session:
        session.prefill(random_ids(LONG, seed=LONG))
        dropped = False
        for step, token in enumerate(random_ids(24, seed=7), 1):
            session.decode(token)
            forced = max(0, 16 - step)
            for chosen in session.selections.values():
                assert len(chosen) == (1 + forced if step < 9 else 8)
                assert chosen[len(chosen) - forced :].tolist() == list(range(LONG - forced, LONG))
                dropped |= step >= 16 and LONG - 1 not in chosen.tolist()
        assert dropped


@pytest.mark.parametrize("scoring", simulation.SCORINGS)
def test_a_fraction_that_rounds_to_nothing_leaves_the_generated_tokens(world, scoring):
    llm, _, _ = world
    with llm.session(official(scoring, (1, 5), 1, 0.001)) as session:
        session.prefill(random_ids(LONG, seed=LONG))
        for step, token in enumerate(random_ids(18, seed=7), 1):
            before = session.stats.rows_read_sparse
            session.decode(token)
            chosen = 0 if scoring in ("last", "softmax_before_last") else 1 + max(0, 16 - step)
            assert all(len(s) == chosen for s in session.selections.values())
            # layers 3, 4 and 7-11
            assert session.stats.rows_read_sparse - before == (chosen + step) * 7


@pytest.mark.parametrize("scoring", simulation.SCORINGS)
def test_prompts_too_short_for_the_published_code_are_refused_before_they_are_read(world, scoring):
    llm, _, _ = world
    least = 15 if scoring in ("uniform", "exp") else 2
    for length in (1, least - 1):
        with llm.session(official(scoring, (1, 5), 1, 8)) as session:
            with pytest.raises(SettingError, match=f"at least {least}"):
                session.prefill(random_ids(length))
            assert len(session) == 0
            session.prefill(random_ids(40))  # the session is as new
    with llm.session(official(scoring, (1, 5), 1, 8)) as session:
        session.prefill(random_ids(least))
        for step, token in enumerate(random_ids(20, seed=2), 1):
            session.decode(token)
            assert session.stats.sparse_steps == step
    prompt_of_one = simulation.Prompt(least - 1, [], [], [], None)
    with pytest.raises(ValueError):
        simulation.Decode(world[1], prompt_of_one, simulation.Settings((1, 5), 1, scoring, 8))


def test_shortest_prompt_of_a_window_matches_too(world):
    """S = W - 1: at t = 1 no key is scored and all are forced."""
    llm, model, prompts = world
    prompts = {**prompts, 15: simulation.prefill(model, random_ids(15, seed=15))}
    for scoring in ("uniform", "exp"):
        compared, _ = compare(
            (llm, model, prompts), 15, simulation.Settings((1, 5), 1, scoring, 4), 20
        )
        assert compared == 40


def test_a_second_prefill_is_refused_and_changes_nothing(world):
    llm, _, _ = world
    method = official("exp", (1, 5), 1, 12)
    ids, answer = random_ids(SHORT, seed=SHORT), random_ids(6, seed=2)
    with llm.session(method) as session, llm.session(method) as other:
        session.prefill(ids)
        other.prefill(ids)
        for token in answer[:3]:
            assert torch.equal(session.decode(token), other.decode(token))
        with pytest.raises(SettingError, match="second prefill"):
            session.prefill(random_ids(5, seed=9))
        assert len(session) == SHORT + 3
        for token in answer[3:]:
            assert torch.equal(session.decode(token), other.decode(token))
        session.truncate(0)
        session.prefill(ids)
        other.truncate(SHORT)
        assert torch.equal(session.decode(answer[0]), other.decode(answer[0]))


def test_prefill_in_chunks_is_one_prefill(world):
    weights = tiny_weights(CONFIG, seed=3)
    llm = tiny_llm(
        official("uniform", (2, 3, 8), 1, 0.1), CONFIG, weights, max_context=512, chunk=37
    )
    whole, _, _ = world
    with llm.session() as session, whole.session(llm.method) as other:
        ids = random_ids(LONG, seed=LONG)
        torch.testing.assert_close(session.prefill(ids), other.prefill(ids), atol=1e-5, rtol=1e-5)
        session.decode(5), other.decode(5)
        assert all(
            torch.equal(session.selections[layer], other.selections[layer]) for layer in (3, 8)
        )
        assert len(session.selections[3]) == math.floor(0.1 * LONG)


def test_the_simulation_itself_says_what_the_description_says():
    """Layers of {2,3,8}, one wait layer: dense 0-4, 8, 9; sparse 5-7 (of 3), 10 and 11 (of 8)."""
    assert simulation.source_of(12, (2, 3, 8), 1) == {5: 3, 6: 3, 7: 3, 10: 8, 11: 8}
    assert simulation.source_of(8, (0, 4), 2) == {3: 0, 7: 4}
    assert simulation.source_of(6, (5,), 0) == {}
    assert simulation.source_of(6, (2,), 0) == {3: 2, 4: 2, 5: 2}
    assert simulation.top(np.array([1.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]
    assert simulation.top(np.array([1.0, 2.0]), 5).tolist() == [0, 1]
    assert simulation.top(np.array([1.0, 2.0]), 0).tolist() == []
