"""The controls of a comparison: OmniKV whose selection is chance, one token, or the newest tokens.

Stops: a draw that is not uniform, that a step or a group shares with another, that a step run again
does not repeat or that depends on the tier; a control that reads other rows than it says.
"""

from collections import Counter

import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.omnikv.method import OmniKV
from engine.methods.registry import make, methods
from engine.plan.layers import tail_start
from tests.builders import random_ids, tiny_llm
from tests.engine.bank.test_offload import compare
from tests.engine.methods.method_checks import llm_of

BASE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
CONTROLS = (OmniKVRandom(**BASE), OmniKVOne(**BASE), OmniKVNewest(**BASE))
NAMES = [method.name for method in CONTROLS]
M64 = (1 << 64) - 1


def drawn(seed, group, n, k, tail):
    """k of the positions before the tail of n tokens, written out in Python's integers."""

    def mixed(x):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor & M64
        return x ^ x >> 33

    def first(stream):
        return ((seed * 0x27D4EB2F + stream * 0x165667B1) % (1 << 30)) << 32

    factor = mixed(n + first(1 + group)) % (1 << 32) | 1
    stop = tail_start(n, tail)
    score = [(mixed(first(0) + i) % (1 << 32) | 1) * factor % (1 << 32) >> 3 for i in range(stop)]
    return sorted(sorted(range(stop), key=lambda i: -score[i])[:k])


def answered(session, prompt=300, steps=5, seed=0):
    """[(length, logits, {filter layer: positions})] of the steps after a prompt."""
    ids = random_ids(prompt + steps, seed=seed)
    session.prefill(ids[:prompt])
    out = []
    for token in ids[prompt:]:
        logits = session.decode(token)
        out.append((len(session), logits, session.selections))
    assert session.stats.sparse_steps == session.stats.decode_steps == steps
    return out


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("seed", [0, 5])
def test_random_draws_what_the_formula_says(backend, seed):
    method = OmniKVRandom(seed=seed, **BASE)
    with llm_of(backend=backend).session(method) as session:
        for n, _, chosen in answered(session):
            for group, layer in enumerate((1, 4)):
                assert chosen[layer].tolist() == drawn(seed, group, n, 20, 64)


def test_random_is_uniform_and_fresh():
    """Over 300 steps every one of the 128 candidates comes up about as often, and pairs of steps,
    groups and seeds share no more tokens than chance gives.
    """
    length, k, steps = 256, 32, 300
    draws = [drawn(seed, group, length, k, 128) for seed in range(2) for group in range(2)]
    assert len(set(map(tuple, draws))) == 4
    # one tail block, so that all steps have the same candidates
    every = [drawn(seed, 0, length + i, k, 128) for seed in range(5) for i in range(60)]
    counts = Counter(token for draw in every for token in draw)
    expected = steps * k / 128
    chi = sum((counts[token] - expected) ** 2 / expected for token in range(128))
    assert chi < 190  # 127 degrees of freedom: beyond it by chance once in 5,000
    shared = [len({*a} & {*b}) for a, b in zip(every, every[1:])]
    assert abs(sum(shared) / len(shared) - k * k / 128) < 0.8  # 8 are expected, 5 sigma are 0.6
    assert len(set(map(tuple, every))) == steps
    # the first token, to which attention gives most, whatever the seed
    first = [sum(0 in draw for draw in every[60 * seed :][:60]) for seed in range(5)]
    assert min(first) >= 5, first  # 15 are expected, 3 deviations are 10


def test_newest_reads_the_tokens_before_the_tail():
    with llm_of().session(OmniKVNewest(**BASE)) as session:
        for n, _, chosen in answered(session):
            stop = tail_start(n, 64)
            assert {*map(tuple, (c.tolist() for c in chosen.values()))} == {
                tuple(range(stop - 20, stop))
            }


@pytest.mark.parametrize("budget", [dict(tokens=20), dict(tokens=None, share=0.3)])
def test_one_is_the_first_choice_of_omnikv(budget):
    """The same token as OmniKV with a budget of one, bit for bit, whatever its own budget."""
    with (
        llm_of().session(OmniKVOne(**BASE | budget)) as one,
        llm_of().session(OmniKV(**BASE | dict(tokens=1))) as other,
    ):
        for (_, a, chosen), (_, b, expected) in zip(answered(one), answered(other)):
            assert torch.equal(a, b)
            assert all(torch.equal(chosen[layer], expected[layer]) for layer in (1, 4))
            assert {len(tokens) for tokens in chosen.values()} == {1}


@pytest.mark.parametrize("method", CONTROLS, ids=NAMES)
def test_a_step_run_again_chooses_the_same(method):
    with llm_of(backend="auto").session(method) as session:
        first = answered(session)
        session.truncate(300)
        for (_, logits, chosen), token in zip(first, random_ids(305)[300:]):
            assert torch.equal(session.decode(token), logits)
            assert all(torch.equal(chosen[x], session.selections[x]) for x in chosen)


@pytest.mark.parametrize("method", CONTROLS, ids=NAMES)
def test_both_tiers_answer_alike(method):
    compare(method, [("prefill", 180), ("decode", 80), ("truncate", 30), ("decode", 3)], chunk=64)


def test_random_draws_alike_after_another_prompt():
    """Nothing but seed, position and group counts: not the text, not the steps before."""
    with tiny_llm(OmniKVRandom(**BASE), max_context=512).session() as session:
        seen = answered(session)[-1][2]
        session.truncate(10)
        session.prefill(random_ids(294, seed=9))
        session.decode(3)
        assert all(torch.equal(seen[layer], session.selections[layer]) for layer in (1, 4))


def test_they_have_names_and_refuse_what_they_ignore():
    known = methods()
    for method in CONTROLS:
        assert known[method.name] is type(method)
        assert make(method.name, {"share": 0.1}).share == 0.1
    for name, field in (
        ("omnikv_one", {"sink": 1}),
        ("omnikv_one", {"official": True}),
        ("omnikv_newest", {"scores": "raw"}),
        ("omnikv_random", {"selector": "uniform"}),
        ("omnikv_random", {"prefill_ratio": 2}),
        ("omnikv_random", {"seed": -1}),
    ):
        with pytest.raises(SettingError, match=f"^{next(iter(field))}: found"):
            make(name, field)
