"""The distance of a choice to its oracle: on planted answers and planted attention, and that every
method that chooses has an oracle of its granularity with its layers and rows.

Stops: a distance that compares other questions or budgets, one that an oracle's own choice has, a
claim that holds where chance does as well, an oracle that reads more than what it bounds.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, Full
from engine.methods.oracle.settings import GRANULARITIES
from tests.builders import random_ids
from tests.tools.test_compare import record
from tools.compare import claims, headline, stats
from tools.compare.build import Facts
from tools.compare.distance import distances, nearer_to_the_oracle, shown
from tools.compare.mass import BoundWatch, most_kept
from tools.compare.methods import REGISTRY, variants, wanted

NAMES = ("omnikv", "omnikv_random", "omnikv_newest", "oracle_omnikv")


def answers(kls, documents=12, tokens=5, spread=0.0, **more):
    """Records of `documents` documents: {name: mean KL per token}, of which neighbours differ by
    twice the spread.
    """
    made = []
    for name, kl in kls.items():
        for seed in range(documents):
            own = (kl + (spread if seed % 2 else -spread)) * tokens
            given = dict(compared=tokens, same=tokens, kl=own)
            made.append(record(name, 1, seed, budget=5.0, **given, **more))
    return made


# ---------------------------------------------------------------- planted answers


def test_the_distance_is_what_was_planted():
    made = answers(dict(zip(NAMES, (0.5, 1.75, 1.0, 0.25))), spread=0.125)
    far = distances(made, 1000)
    assert set(far) == {f"{name} 5%" for name in NAMES[:3]}
    for name, planted in zip(NAMES, (0.25, 1.5, 0.75)):
        mean, half = far[f"{name} 5%"]
        # both differ from document to document alike, so that the difference does not
        assert mean == pytest.approx(planted) and half < 1e-9
    assert shown(far["omnikv 5%"]) == "+0.250 [+0.250, +0.250]" and shown(None) == ""


def test_an_interval_is_of_documents():
    """Differences of +0.5 and 0 in turn over 12 documents: 0.25, 1.96 deviations of the mean."""
    made = answers({"omnikv": 0.5}, spread=0.25) + answers({"oracle_omnikv": 0.25})
    mean, half = distances(made, 1000)["omnikv 5%"]
    assert mean == pytest.approx(0.25)
    assert half == pytest.approx(1.96 * 0.25 * math.sqrt(12 / 11) / math.sqrt(12))


def test_only_questions_budgets_and_turns_that_both_have_are_compared():
    made = answers({"omnikv": 0.5, "oracle_omnikv": 0.25})
    strange = [
        *answers({"oracle_omnikv": 9.0}, turn=2),
        *[record("oracle_omnikv", 1, 99, budget=5.0, compared=5, same=5, kl=50.0)],
        *[
            record("oracle_omnikv", 1, s, budget=20.0, compared=5, same=5, kl=50.0)
            for s in range(9)
        ],
        *answers({"oracle_quest": 9.0}),
    ]
    assert distances(made + strange, 1000) == distances(made, 1000)
    assert distances(made + strange, 2000) == {} == distances(made[:12], 1000)
    # a method with layers kept dense is compared with an oracle that keeps them too
    kept = answers({"omnikv": 0.5}, kept=[0]) + answers({"oracle_omnikv": 0.125}, kept=[0])
    for r in kept:
        r["variant"] += " +dense 0"
    both = distances(made + kept, 1000)
    assert both["omnikv 5%"][0] == pytest.approx(0.25)
    assert both["omnikv 5% +dense 0"][0] == pytest.approx(0.375)
    # a method that does not choose has none
    assert "h2o 5%" not in distances(made + answers({"h2o": 1.0}), 1000)


@pytest.mark.parametrize(
    ("kls", "outcome", "tested"),
    [
        ((0.3, 1.75, 1.5, 0.25), "holds", True),
        # a model on which the newest tokens do: it says nothing about the choice
        ((0.3, 1.75, 0.35, 0.25), "holds", False),
        ((1.6, 1.75, 1.5, 0.25), "does not hold", True),
        # oracle and chance are one
        ((0.25, 0.25, 0.25, 0.25), "undecided", False),
    ],
)
def test_the_claim_and_its_controls(kls, outcome, tested):
    found = nearer_to_the_oracle(answers(dict(zip(NAMES, kls)), spread=0.125))
    assert (found.outcome, found.tested) == (outcome, tested)
    assert {check.name for check in found.controls} == {"omnikv_random", "omnikv_newest"}
    assert f"{kls[0] - kls[3]:+.3f} [" in found.numbers[0]
    if outcome == "holds" and not tested:
        assert found.verdict.startswith(claims.UNTESTED) and "omnikv_newest" in found.verdict


def test_the_claim_needs_all_three():
    found = nearer_to_the_oracle(answers({"omnikv": 0.5, "oracle_omnikv": 0.2}))
    assert found.outcome == claims.NOT_RUN and "oracle_omnikv" in found.numbers[0]


def test_the_table_of_controls_shows_it():
    made = answers(
        dict(zip(NAMES, (0.5, 1.75, 1.0, 0.25))), steps=3, rows=9.0, context=90, chosen=3
    )
    head, _, first, *_ = headline.controls(made, 1000)
    assert head.endswith("| KL | KL above its oracle |")
    assert first.endswith("| +0.250 [+0.250, +0.250] |") and head.count("|") == first.count("|")


def test_a_ratio_is_the_mix_of_one_column():
    values = [("a", 1.0, 2), ("b", 3.0, 4), ("a", 2.0, 5)]
    assert stats.ratio(values) == stats.mixed_ratio([values], (1,))
    mean, half = stats.mixed_ratio([values, values], (1, -1))
    assert mean == 0.0 and half < 1e-15 and stats.mixed_ratio([], ()) is None


# ---------------------------------------------------------------- planted attention


@given(
    st.sampled_from(((4, 4), (8, 2), (8, 1))),
    st.sampled_from((5, 64, 127)),
    st.integers(1, 4),
    st.sampled_from(("one", *GRANULARITIES)),
    st.integers(0, 99),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_what_the_best_rows_keep(shape, n, rows, granularity, seed):
    """Against every list's own sort, tails included; nothing random keeps more, and the best rows
    themselves keep exactly as much.
    """
    heads, kv_heads = shape
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(3 * torch.randn(heads, n, generator=generator), 1)
    lists = {"one": 1, "layer": 1, "kv_head": kv_heads}.get(granularity, heads)
    start = n - seed % 3
    chosen = torch.stack([torch.randperm(start, generator=generator)[:rows] for _ in range(lists)])
    some = chosen.clone()
    if granularity == "kv_head":
        some[0, 1:] = -1  # a list of one
    counts = (some >= 0).sum(1) + n - start
    parts = weights.double().view(lists, -1, n).sum(1)
    expected = sum(float(p.topk(int(c)).values.sum()) for p, c in zip(parts, counts)) / heads
    given_rows = some[0] if granularity == "one" else some
    assert most_kept(given_rows, weights, start) == pytest.approx(expected, abs=1e-6)
    kept = 0.0
    for part, own in zip(parts, some):
        kept += float(part[own[own >= 0]].sum() + part[start:].sum()) / heads
    assert kept <= expected + 1e-6
    best = torch.stack([p.topk(rows).indices for p in parts])
    mass = sum(float(p[own].sum()) for p, own in zip(parts, best)) / heads
    assert most_kept(best, weights, n) == pytest.approx(mass, abs=1e-6)


# ---------------------------------------------------------------- the table of methods


def test_every_method_that_chooses_has_an_oracle_of_its_granularity():
    bounded = {name: entry for name, entry in REGISTRY.items() if entry.oracle}
    assert {"omnikv", "quest", "tidaldecode", "random_topk"} <= set(bounded)
    for name, entry in bounded.items():
        oracle = REGISTRY[entry.oracle]
        assert oracle.group == "bounds" and not oracle.oracle, name
        assert oracle.granularity == entry.granularity in GRANULARITIES, name


FILES = (
    "kascade",
    "kascade_tiles",
    "hshare",
    "double_sparsity",
)  # of a model's own files, which this one has not
WHOLE = ("pqcache",)  # reads a text of fewer tokens than it learns from
FEWER = (
    "infinigen",
    "magicpig",
    "em_llm",
)  # read as many as a query wants, up to their oracle's budget


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny), dtype="float32", threads=1, method=Full())


def test_an_oracle_has_the_layers_the_rows_and_the_lists_of_what_it_bounds(llm):
    """And keeps all that its own bound does, where the other keeps less."""
    names = [name for name, entry in REGISTRY.items() if entry.oracle]
    asked = wanted([f"{name}@20" for name in names], [], [], controls=True)
    found = {v.name: v for v in variants(Facts(llm, 464, (2,), 0, 64), asked)}
    ids, read = random_ids(403, vocab=90), {}
    for name, variant in found.items():
        if variant.method is None or not variant.entry.granularity:
            assert variant.method or name.removeprefix("oracle_") in FILES, name
            continue
        if name.removeprefix("oracle_") in WHOLE:
            continue
        watch = BoundWatch()
        with llm.session(variant.method, max_context=464) as session:
            session.prefill(ids[:400])
            session.watch_with(watch)
            session.decode(ids[400])
            assert session.stats.sparse_steps == 1
            rows = session.runtime.rows_read(401)
            read[name] = rows, session.plan.sparse_layers, watch.sums, watch.most
    for name in read.keys() & names:
        (rows, layers, kept, most), oracle = read[name], read[REGISTRY[name].oracle]
        assert oracle[1] == layers and len(layers) > 0
        method = found[name].method
        # whole pages or chunks, and tokens beside the budget, which wait until they are clustered
        # or are exact
        page = getattr(method, "page", getattr(method, "chunk", 0))
        waiting = getattr(method, "segment", getattr(method, "answer", 0))
        if name in FEWER:
            assert all(1 < rows[at] <= oracle[0][at] for at in layers), name
        else:
            assert all(-waiting <= oracle[0][at] - rows[at] <= page for at in layers), name
        for at in layers:
            assert kept[at] <= most[at] + 1e-6
            # the tail of OmniKV's is outside its choice, where the measure has no tail
            slack = 1e-5 if not getattr(found[name].method, "tail", 0) else 1.0
            assert oracle[2][at] >= oracle[3][at] - slack, (name, at)
        assert sum(kept.values()) < sum(oracle[2].values())
