"""OmniKV that estimates what it does not choose from tokens drawn by chance.

Stops: a draw that favours a token, or takes one that is chosen; a weight that is not the number of
tokens that a drawn one stands for, so that sums are estimated with a bias; a bound that draws
exceed; a choice that another tier, a step run again or a draft does not repeat.
"""

import math

import pytest
import torch

from engine.bank.base import Step
from engine.base.errors import SettingError
from engine.methods.controls.controls import OmniKVOne, OmniKVRandom
from engine.methods.full import Full
from engine.methods.mass_meter import sampling_error
from engine.methods.omnikv.method import OmniKV
from engine.methods.random_bits import numbers
from engine.methods.select.across.omnikv_heads import OmniKVHeads
from engine.plan.layers import tail_start
from tests.builders import random_ids, setup_of, tiny_config
from tests.engine.bank.test_offload import compare
from tests.engine.methods.method_checks import llm_of, planted_runtime
from tests.engine.methods.test_controls import answered, drawn

BASE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
SAMPLE = OmniKV(residual="sample", residual_share=0.4, **BASE)


def choosing(method, n, backend="reference", seed=0):
    """(runtime, step, scores) of a choice at n tokens."""
    setup = setup_of(tiny_config(layers=7), method, 512, backend=backend)
    runtime = method.runtime(setup)
    runtime.end_prompt(n - 1)
    visible = torch.tensor([n], dtype=torch.int32)
    step = Step(torch.full((1, 1), n - 1), visible, None, 512, None, None)
    return runtime, step, torch.rand(1, 512, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed, backend", [(0, "reference"), (5, "auto")])
def test_a_choice_is_the_highest_and_a_draw_of_the_others(seed, backend):
    """Index by index against Python's integers, and every weight."""
    method = OmniKV(residual="sample", residual_share=0.4, residual_seed=seed, **BASE)
    with llm_of(backend=backend).session(method) as session:
        runtime, ids = session.runtime, random_ids(305)
        session.prefill(ids[:300])
        for token in ids[300:]:
            session.decode(token)
            n, chosen = len(session), session.selections
            stop = tail_start(n, 64)
            for group, layer in enumerate((1, 4)):
                by_chance = set(runtime.drawn_rows(layer).tolist())
                best = set(chosen[layer].tolist()) - by_chance
                assert len(best) == 12 and len(by_chance) == 8
                taken = next(
                    rows
                    for k in range(8, stop)
                    if len(rows := set(drawn(seed, group, n, k, 64)) - best) == 8
                )
                assert by_chance == taken
                logs = runtime.logs[group][0, : len(chosen[layer])]
                expected = [
                    math.log((stop - 12) / 8) * (i in taken) for i in chosen[layer].tolist()
                ]
                torch.testing.assert_close(logs, torch.tensor(expected))
            scores = runtime.scores[0, :stop]  # of the last group
            assert best == set(scores.topk(12).indices.tolist())


@pytest.mark.parametrize("n, share", [(300, 0.4), (129, 0.5), (211, 0.05)])
def test_sums_are_estimated_without_bias(n, share):
    """Over many draws the mean of both sums of attention is that over all tokens, and every token
    is drawn as often as any other. Unweighted they are not."""
    method = OmniKV(residual="sample", residual_share=share, **BASE)
    runtime, step, scores = choosing(method, n)
    generator = torch.Generator().manual_seed(n)
    stop, m = tail_start(n, 64), method.drawn(20)
    terms = torch.randn(stop, 4, generator=generator, dtype=torch.float64)
    terms[:, 0], terms[:, 1] = terms[:, 0].exp(), 1.0
    found, bare, counts, draws = [], [], torch.zeros(stop), 600
    for seed in range(draws):
        runtime.numbers = numbers(seed, 512)
        runtime.choose(0, scores, step)
        rows = runtime.index[0][0, 0, : int(runtime.counts[0][0])].long()
        logs = runtime.logs[0][0, : len(rows)].double()
        assert (rows.diff() > 0).all() and len(rows) == 20
        counts[rows] += 1
        found.append((logs.exp()[:, None] * terms[rows]).sum(0))
        bare.append(terms[rows].sum(0))
    wanted, found = terms.sum(0), torch.stack(found)
    error = found.std(0) / draws**0.5 + 1e-4
    # every draw counts as many tokens as there are
    torch.testing.assert_close(found[:, 1], wanted[1].expand(draws), atol=1e-3, rtol=0)
    assert ((found.mean(0) - wanted).abs() < 4 * error).all()
    assert ((torch.stack(bare).mean(0) - wanted).abs() > 4 * error).any()
    others = counts[counts < draws]
    assert len(others) == stop - 20 + m  # who is chosen always is
    expected = draws * m / len(others)
    assert ((others - expected) ** 2).mean() < 1.6 * expected


@pytest.mark.parametrize("n", [66, 128, 129, 211])
def test_a_sample_of_all_that_is_left_is_full_attention(n):
    """Bit for bit: each drawn token stands for itself."""
    method = OmniKV(residual="sample", residual_share=0.5, **BASE | dict(tokens=160))
    ids = random_ids(n + 4)
    with llm_of().session(method) as one, llm_of().session(Full()) as other:
        for session in (one, other):
            session.prefill(ids[:n])
        for token in ids[n:]:
            assert torch.equal(one.decode(token), other.decode(token))
        drawn_now = int(one.runtime.drawn_count[0])
        assert drawn_now == max(0, tail_start(n + 4, 64) - 80)
        assert one.stats.sparse_steps == 4 and one.runtime.drawn_rows(1).numel() == 0


def test_attention_is_that_of_the_weighted_rows_in_float64():
    runtime = planted_runtime(SAMPLE, torch.tensor([3, 77, 150]), backend="auto")
    layer, n = 2, 321
    q = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([n], dtype=torch.int32)
    rows, start = runtime.chosen_rows(layer), tail_start(n, 64)
    k = torch.randn(1, 2, 512, 16, generator=torch.Generator().manual_seed(2))
    v = torch.randn(1, 2, 512, 16, generator=torch.Generator().manual_seed(3))

    class Rows:
        """A bank of these rows."""

        def selected(self, layer, index, counts, tail, step, fetched):
            return k, v, index, counts, tail, step.visible

    step = Step(torch.full((1, 1), n - 1), visible, Rows(), 512, None, None)
    found = runtime.attend_sparse(layer, q, step)[0, 0].double()
    assert len(rows) == 20
    read = torch.cat([rows, torch.arange(start, n)])
    often = torch.ones(len(read), dtype=torch.float64)
    often[:20][torch.isin(rows, runtime.drawn_rows(layer))] = (start - 12) / 8
    for head in range(4):
        keys, values = (t[0, head // 2, read].double() for t in (k, v))
        logits = keys @ q[0, 0, head].double() * runtime.scale
        weights = logits.exp() * often
        expected = weights @ values / weights.sum()
        torch.testing.assert_close(found[head], expected, atol=2e-6, rtol=2e-6)


def test_the_bound_holds_and_says_something():
    """Of 200 draws about one in twenty may lie beyond it; heads of all kinds."""
    generator = torch.Generator().manual_seed(0)
    n, m, rest = 1000, 80, 900
    logits = torch.randn(4, n, generator=generator, dtype=torch.float64)
    logits[2:, :100] += 4  # most of it is chosen
    weights, values = logits.exp(), torch.randn(2, n, 16, generator=generator).double() + 0.5
    exact = (weights.view(2, 2, n) @ values / weights.view(2, 2, n).sum(-1, keepdim=True)).flatten(
        0, 1
    )
    beyond, bounds = [], []
    for _ in range(200):
        rows = torch.cat([torch.arange(100), 100 + torch.randperm(rest, generator=generator)[:m]])
        by_chance = torch.arange(180) >= 100
        bound = sampling_error(weights[:, rows], values[:, rows], by_chance, rest)
        often = torch.where(by_chance, rest / m, 1.0)
        mine = (weights[:, rows] * often).view(2, 2, -1)
        found = (mine @ values[:, rows] / mine.sum(-1, keepdim=True)).flatten(0, 1)
        error = (found - exact).norm(dim=1) / exact.norm(dim=1)
        beyond.append(error > bound)
        bounds.append(bound / error.mean())
    assert torch.stack(beyond).double().mean() < 0.05
    assert torch.stack(bounds).median() < 6
    everything = torch.arange(180) >= 90
    assert sampling_error(weights[:, :180], values[:, :180], everything, 90).max() < 1e-6


def test_check_prints_the_bound_beside_the_mass():
    with llm_of(backend="auto").session(SAMPLE) as session:
        answered(session)
        report = session.check(steps=2)
        errors = report.error_by_layer()
        assert set(errors) == {2, 3, 5, 6} and all(0 < e < math.inf for e in errors.values())
        assert "with its estimate is off   by" in str(report) and "95% of draws" in str(report)
    with llm_of(backend="auto").session(OmniKV(**BASE)) as session:
        answered(session)
        assert "estimate" not in str(session.check(steps=2))


@pytest.mark.parametrize("method", [SAMPLE, OmniKV(residual="unweighted", **BASE)])
def test_both_tiers_answer_alike(method):
    compare(method, [("prefill", 180), ("decode", 80), ("truncate", 30), ("decode", 3)], chunk=64)


def test_the_control_draws_the_same_and_weighs_nothing():
    """And neither reads another number of rows than OmniKV."""
    found = {}
    for name in ("none", "sample", "unweighted"):
        with llm_of().session(OmniKV(residual=name, **BASE)) as session:
            steps = answered(session, steps=1)
            read = session.runtime.rows_read(len(session))
            found[name] = (
                steps[0][1],
                steps[0][2][1],
                read,
                session.runtime.logs if (name != "none") else None,
            )
    assert torch.equal(found["sample"][1], found["unweighted"][1])
    assert not torch.equal(found["sample"][0], found["unweighted"][0])
    assert not any(logs.any() for logs in found["unweighted"][3])
    assert found["none"][2] == found["sample"][2] == found["unweighted"][2]


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(residual="means"), "residual: found 'means', expected one of none, sample"),
        (dict(residual="sample", residual_share=1), "residual_share: found 1, expected less"),
        (dict(residual="sample", residual_share=0), "residual_share: found 0"),
        (dict(residual="sample", residual_seed=-1), "residual_seed: found -1"),
        (dict(residual="sample", sink=16), "sink: found 16, expected at most the 15 tokens"),
        (dict(residual="sample", official=True, dense_below=0), "residual: the published code"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(SettingError, match=said):
        OmniKV(**BASE | given)


@pytest.mark.parametrize("kind", [OmniKVHeads, OmniKVRandom, OmniKVOne])
def test_methods_that_choose_another_way_refuse_it(kind):
    with pytest.raises(SettingError, match="residual: found 'sample', but"):
        kind(residual="sample", **BASE)
