"""FastGen: against a float64 simulation, its promise on every head, reductions, ways back, files.

tests/engine/methods/test_methods.py has the eight properties. Stops: a policy that loses more than
it may, one that is dearer than need be, a head that forgets its policy or its scores, a token taken
for another's kind.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.base.errors import SavedFileError, SettingError
from engine.methods.evict.by_head.policies import EVERYTHING, NAMES, POLICIES, chosen, kept
from engine.methods.evict.fastgen import FastGen
from engine.methods.evict.shared.ragged import Ragged
from engine.methods.full import Full
from engine.text.tokenizer import only_punctuation
from kernels.select.column_sums import column_sums
from tests.builders import POCKET, VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.fastgen_simulation import CHAIN, FastGenConversation, FastGenRule
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
MARKS = dict(special=(1, 2, 3, 4, 5, 6), punctuation=tuple(range(7, 20)))


@pytest.mark.parametrize(
    ("heads", "backend", "forget", "seed"),
    [
        ((4, 4), "reference", False, 1),
        ((8, 2), "auto", True, 2),
        ((8, 1), "auto", False, 3),
        ((16, 4), "cpu", True, 4),
    ],
)
@pytest.mark.parametrize(("eps", "window", "every"), [(0.75, 8, 4), (0.45, 30, 3), (0.9, 64, 7)])
def test_rows_logits_and_policies_are_the_simulations(
    heads, backend, forget, seed, eps, window, every
):
    """Two turns with cuts in the answers, in groups of 1, 4, 8 and 4 query heads."""
    given = dict(eps=eps, frequent=0.25, local=0.2, window=window, every=every, **MARKS)
    method = FastGen(forget=forget, **given)
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=seed)
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=13)
    oracle = FastGenConversation(
        Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights),
        FastGenRule("fastgen", 0, **given),
    )
    with llm.session(method) as session:
        every_id, cut = random.Random(seed).sample(range(VOCAB), VOCAB), 0
        for prompt, answer in ((41, 9), (23, 8)):
            ids, every_id = every_id[: prompt + answer], every_id[prompt + answer :]
            np.testing.assert_allclose(
                session.prefill(ids[:prompt]).numpy(), oracle.prompt(ids[:prompt]), atol=1e-4
            )
            for token in ids[prompt:]:
                logits = session.decode(token).numpy()
                np.testing.assert_allclose(logits, oracle.step(token), atol=1e-4)
            assert oracle.margin > 1e-6, "no test: a loss is eps, within rounding"
            names = [[NAMES[p] for p in row] for row in session.runtime.policies[0]]
            assert names == oracle.policies
            for layer in range(LAYERS):
                alive = oracle.alive[layer]
                kept_by = [np.flatnonzero(row).tolist() for row in alive]
                assert session.runtime.positions(layer) == kept_by
                cut += int((~alive).sum())
        assert cut > 0  # it was sparse


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(1, 70),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.9]),
    st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    st.integers(0, 99),
)
def test_every_head_keeps_its_promise_at_the_least_cost(count, heads, group, eps, part, seed):
    """What stays has 1 - eps of the attention of every query head; the policy before has not; each
    policy keeps what those before it keep.
    """
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(min(7, count), heads * group, 16, generator=generator)
    k = torch.randn(heads, count, 16, generator=generator)
    weights = column_sums(q, k, count - len(q), 0.25) / len(q)
    kinds = torch.randint(0, 3, (heads, count), generator=generator, dtype=torch.int8)
    positions = torch.arange(count).expand(heads, -1)
    sets = [
        kept(policy, kinds, positions, weights.sum(1), count, part, 0.2)
        for policy in range(POLICIES)
    ]
    lost = torch.stack([(weights * ~some[:, None]).sum(-1).amax(1) for some in sets])
    for head, policy in enumerate(chosen(lost, eps)):
        stays = weights[head].double() * sets[policy][head]
        assert (stays.sum(-1) >= 1 - eps - 1e-5).all()
        if policy and eps:
            before = weights[head].double() * sets[policy - 1][head]
            assert before.sum(-1).min() < 1 - eps + 1e-5
        assert policy == EVERYTHING or eps > 0
    for less, more in zip(sets, sets[1:]):
        assert not (less & ~more).any()
    assert sets[EVERYTHING].all()
    assert sets[2].sum(1).max() <= (kinds > 0).sum(1).max() + int(part * count)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_to_lose_is_full_attention_to_the_bit(shape, forget):
    method = FastGen(eps=0.0, every=2, forget=forget, **MARKS)
    with llm_of(shape).session(method) as one, llm_of(shape).session(Full()) as other:
        for seed, (prompt, answer) in enumerate(((131, 3), (1, 5), (64, 2))):
            ids = random_ids(prompt + answer, seed=seed)
            assert torch.equal(one.prefill(ids[:prompt]), other.prefill(ids[:prompt]))
            for token in ids[prompt:]:
                assert torch.equal(one.decode(token), other.decode(token))
        assert {p for heads in one.runtime.policies[0] for p in heads} == {EVERYTHING}


def test_heads_of_different_counts_lie_in_one_run():
    """And their scores with them, over cuts and growth."""
    method = FastGen(eps=0.7, every=32, **MARKS)
    with llm_of().session(method) as session:
        session.prefill(random_ids(200))
        for token in random_ids(70, seed=1):
            session.decode(token)
        layers = session.runtime.sequences[0].layers
        assert all(isinstance(parts, Ragged) for parts in layers)
        assert any(len({rows.held for rows in parts}) > 1 for parts in layers)
        for parts in layers:
            for rows in parts:
                assert rows.scores.data_ptr() >= parts.scores.data_ptr()
                assert (rows.scores[0, 0, : rows.held] >= 0).all()
            assert parts.scores.sum() > 0


@pytest.mark.parametrize("forget", [False, True])
def test_ways_back_are_exact(forget):
    method, ids = FastGen(eps=0.7, every=6, forget=forget, **MARKS), random_ids(170, seed=3)
    with llm_of().session(method) as session:
        turns = ((0, 100), (115, 160))
        for first, stop in turns:
            session.prefill(ids[first:stop])
            for token in ids[stop : 115 if stop == 100 else 170]:
                session.decode(token)
        for n in (169, 109):
            with session.fork() as copy, llm_of().session(method) as fresh:
                copy.truncate(n)
                for first, stop in turns:
                    if first < n:
                        fresh.prefill(ids[first : min(n, stop)])
                        for token in ids[stop : min(n, 115 if stop == 100 else 170)]:
                            fresh.decode(token)
                assert copy.runtime.policies == fresh.runtime.policies
                for token in (7, 8, 1, 2, 9, 3, 4):
                    found, expected = copy.decode(token), fresh.decode(token)
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                for layer in range(7):
                    assert copy.runtime.positions(layer) == fresh.runtime.positions(layer)


def test_a_saved_session_brings_its_policies_and_kinds(tmp_path):
    method = FastGen(eps=0.7, every=6, forget=True, **MARKS)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        session.save(tmp_path / "s")
        back, _ = llm_of().restore(tmp_path / "s")
        with back:
            assert back.method == method and back.runtime.policies == session.runtime.policies
            for token in (5, 1, 30, 2, 8, 9, 11, 3):
                assert torch.equal(back.decode(token), session.decode(token))
            assert back.runtime.positions(0) == session.runtime.positions(0)


@pytest.mark.parametrize("damage", range(4))
def test_a_file_with_other_policies_is_refused(damage, tmp_path):
    with llm_of().session(FastGen(eps=0.7, forget=True, **MARKS)) as session:
        session.prefill(random_ids(120))
        *rest, policies, kinds = session.runtime.state()
        policies[0] = [policies[0], [POLICIES, 0], [0], policies[0]][damage]
        kinds = [kinds[:-1], kinds, kinds, kinds.int()][damage]
        session.runtime.state = lambda: (*rest, policies, kinds)
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="makes no session"):
        llm_of().restore(tmp_path / "s")


# ---------------------------------------------------------------- kinds of tokens


def test_the_tokenizer_says_what_is_special_and_what_punctuation():
    llm = LLM(str(POCKET), method=FastGen(eps=0.2, window=16, every=8), max_context=1024, threads=1)
    special, punctuation = llm.tokenizer.marks()
    assert special == llm.tokenizer.special_ids and not special & punctuation
    for text in (".", ",", "?", ":"):
        (one,) = llm.tokenizer.encode(text, special=False)
        assert one in punctuation, text
    for i in punctuation:
        assert only_punctuation(llm.tokenizer.decode([i]).strip())
    assert llm.tokenizer.encode("a", special=False)[0] not in punctuation
    text = "The pass key of Alice is 4711, she says. Is it? Yes: it is.\n" * 12
    with llm.session() as session:
        ids = llm.encode(text)
        session.prefill(ids)
        kinds = session.runtime.kinds[0]
        assert kinds[: len(ids)].tolist() == [
            2 if i in special else int(i in punctuation) for i in ids
        ]
        (stop,) = llm.tokenizer.encode(".", special=False)
        (word,) = llm.tokenizer.encode("a", special=False)
        for token, kind in ((stop, 1), (word, 0), (min(special), 2)):
            session.decode(token)
            assert kinds[len(session) - 1] == kind
        held = [rows.held for layer in session.runtime.sequences[0].layers for rows in layer]
        assert min(held) < len(ids) // 2


def test_without_a_tokenizer_no_token_is_special():
    """Policies of tokens then keep nothing, and no head can take one."""
    with llm_of().session(FastGen(eps=0.9)) as session:
        session.prefill(random_ids(100))
        assert not session.runtime.kinds.any()
        assert {p for heads in session.runtime.policies[0] for p in heads} <= {2, 3, 4}
    assert CHAIN == NAMES


def test_heads_of_special_tokens_alone_keep_these_alone():
    """Everything is in one token: the cheapest policy does, in answers too, after their cut."""
    method = FastGen(eps=0.999, every=4, special=(0,), punctuation=(1,))
    ids = [0, *(5 + i % 40 for i in range(99))]
    with llm_of().session(method) as session:
        session.prefill(ids)
        found = session.runtime.policies[0]
        alone = [(i, j) for i, row in enumerate(found) for j, p in enumerate(row) if p == 0]
        assert alone
        for layer, head in alone:
            assert session.runtime.positions(layer)[head] == [0]
        for token in (7, 0, 8, 9):
            session.decode(token)
        for layer, head in alone:
            assert session.runtime.positions(layer)[head] == [0, 101]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(eps=1.5), "eps: found 1.5, expected"),
        (dict(eps=1.0), "eps: found 1, expected less: a head would keep nothing"),
        (dict(eps=-0.1), "eps: found -0.1, expected"),
        (dict(frequent=2), "frequent: found 2, expected"),
        (dict(local=-1), "local: found -1, expected"),
        (dict(window=65), "window: found 65, expected at most 64"),
        (dict(every=0), "every: found 0, expected"),
        (dict(tokens=9), "tokens: found 9, but fastgen has no budget: its heads keep"),
        (dict(share=0.3), "share: found 0.3, but fastgen has no budget"),
        (dict(special="abc"), "special: found 'abc', expected a list of token ids"),
        (dict(punctuation=(1, -2)), "punctuation: found .*expected whole numbers from 0 on"),
    ],
)
def test_bad_settings_are_named(given, said):
    with pytest.raises(SettingError, match=said):
        FastGen(**given)
