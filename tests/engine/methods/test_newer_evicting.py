"""Random eviction, R-KV, VaSE, Expected Attention, ZigZagKV and RoCo: against float64 simulations,
reduced to older methods, and exact on the way back, in copies and from files.

tests/engine/methods/test_methods.py has the eight properties of all of them but random_eviction,
which reads everything until an answer is longer than its budget. Stops: a cut one step early or
late, queries of another place, chance that depends on what ran before.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.evict import random_eviction
from engine.methods.evict.a2sf import A2SF
from engine.methods.evict.expected_attention import ExpectedAttention
from engine.methods.evict.random_eviction import RandomEviction, RandomEvictionAll, draws
from engine.methods.evict.rkv import RKV, redundancy
from engine.methods.evict.roco import RoCo
from engine.methods.evict.shared.store import Part, best
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.vase import VaSE
from engine.methods.evict.zigzagkv import ZigZagKV, dealt
from engine.methods.full import Full
from engine.model.rope import apply_rope
from kernels.select import column_sums
from kernels.select.drop import largest
from tests.builders import VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.newer_simulation import NewConversation, NewRule
from tests.engine.methods.official_simulation import Model, Shape
from tests.engine.methods.test_evicting import play

LAYERS = 3
RULES = {
    "rkv": (
        RKV(tokens=30, window=5, every=7, kernel=3, importance=0.6),
        NewRule("rkv", 30, window=5, kernel=3, every=7, weight=0.6),
    ),
    "rkv by redundancy": (
        RKV(tokens=31, window=4, every=4, importance=0),
        NewRule("rkv", 31, window=4, kernel=7, every=4),
    ),
    "vase": (
        VaSE(tokens=32, window=6, every=8, protect=0.3, sink=3, seed=5),
        NewRule("vase", 32, window=6, kernel=5, every=8, protect=0.3, sink=3, seed=5),
    ),
    "random_eviction_all": (
        RandomEvictionAll(tokens=30, every=7, recent=9, seed=3),
        NewRule("random", 30, recent=9, every=7, seed=3),
    ),
    "random_eviction": (
        RandomEviction(tokens=6, every=3, recent=2, seed=4),
        NewRule("random_prompt_kept", 6, recent=2, every=3, seed=4),
    ),
    "roco": (
        RoCo(tokens=30, newest=4, recent_share=0.4),
        NewRule("roco", 30, recent=4, every=1, protect=0.4),
    ),
    "expected_attention": (ExpectedAttention(tokens=30), NewRule("expected", 30, sink=4)),
    "zigzagkv": (
        ZigZagKV(tokens=30, window=6, floor=0.3),
        NewRule("zigzag", 30, window=6, kernel=7, floor=0.3),
    ),
}
METHODS = [method for name, (method, _) in RULES.items() if name != "rkv by redundancy"]
OURS = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@pytest.mark.parametrize(
    ("heads", "backend", "forget"),
    [((4, 4), "reference", False), ((8, 2), "auto", False), ((8, 1), "auto", True)],
)
@pytest.mark.parametrize("name", RULES)
def test_rows_and_logits_are_the_simulations(name, heads, backend, forget):
    """Two turns, each with cuts in its answer: groups of 1, 4 and 8 query heads."""
    method, rule = RULES[name]
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=37)
    oracle = NewConversation(Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule)
    sizes = set()
    with llm.session(replace(method, forget=forget)) as session:
        # each token once: values of one token are alike to float32, and only then a tie
        every = random.Random(1).sample(range(VOCAB), VOCAB)
        for turn, (prompt, answer) in enumerate(((57, 17), (13, 9))):
            ids, every = every[: prompt + answer], every[prompt + answer :]
            np.testing.assert_allclose(
                session.prefill(ids[:prompt]).numpy(), oracle.prompt(ids[:prompt]), atol=1e-4
            )
            for token in ids[prompt:]:
                logits = session.decode(token).numpy()
                np.testing.assert_allclose(logits, oracle.step(token), atol=1e-4)
                for layer in range(LAYERS):
                    assert session.runtime.positions(layer) == oracle.kept(layer), (turn, layer)
                sizes.add(sum(map(len, session.runtime.positions(0))))
        assert session.bank.forgets == forget and session.stats.sparse_steps == 26
        assert session.runtime.rows_read(len(session))[0] < len(session)
    assert len(sizes) > 1 or rule.every == 1


# ---------------------------------------------------------------- reductions

SNAP = dict(tokens=50, window=8)
ALL_NEWEST = A2SF(tokens=40, newest=40, every=3)
REDUCTIONS = {
    "R-KV(importance alone, SnapKV's groups) = SnapKV": (
        RKV(importance=1, gqa_reduce="mean", every=64, **SNAP),
        SnapKV(**SNAP),
        SHAPES,
    ),
    "ZigZagKV(floor 1) = SnapKV": (ZigZagKV(floor=1, **SNAP), SnapKV(**SNAP), SHAPES),
    "RoCo(all of the budget the newest) = A2SF of the newest": (
        RoCo(tokens=40, newest=40, recent_share=1, every=3),
        ALL_NEWEST,
        SHAPES,
    ),
    # the softmax of one query over fewer tokens: the same order, of one head
    "VaSE(nothing protected, nothing drawn) = SnapKV of one query": (
        VaSE(tokens=50, window=1, protect=0, sink=0, noise=False),
        SnapKV(tokens=50, window=1, kernel=5, pool="mean"),
        SHAPES[1:2],
    ),
    "R-KV(importance alone) = SnapKV of one query": (
        RKV(tokens=50, window=1, importance=1),
        SnapKV(tokens=50, window=1),
        SHAPES[1:2],
    ),
}


@pytest.mark.parametrize("tokens", [1, 2, 33, 257, 600])
def test_the_largest_by_their_bits_are_the_largest_and_the_newest_of_equal_ones(tokens):
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randint(0, 6, (3, tokens), generator=generator) / 3
    scores[torch.rand(3, tokens, generator=generator) < 0.1] = float("inf")
    scores[1][scores[1] == 0] = -0.0  # what a root of nothing may be
    order = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(3)]).int()
    for count in {1, tokens // 2 + 1, tokens}:
        found = largest(scores, order, count).sort(1).values
        assert torch.equal(found, best(scores, order, count).sort(1).values)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_hold_to_the_bit(name):
    one, other, shapes = REDUCTIONS[name]
    for shape in shapes:
        llm = llm_of(shape)
        with llm.session(one) as a, llm.session(other) as b:
            (logits, held), (expected, kept) = play(a), play(b)
            assert held == kept and torch.equal(logits, expected)
            assert max(a.runtime.rows_read(len(a))) < len(a)


def test_without_chance_random_eviction_keeps_the_newest(monkeypatch):
    """Of equal scores the newer token's wins."""
    monkeypatch.setattr(
        random_eviction, "draws", lambda seed, layer, part, length: part.positions * 0.0
    )
    with (
        llm_of().session(RandomEvictionAll(tokens=40, every=3)) as one,
        llm_of().session(ALL_NEWEST) as other,
    ):
        (logits, held), (expected, kept) = play(one), play(other)
        assert held == kept and torch.equal(logits, expected)


# ---------------------------------------------------------------- each method's own


def part_of(heads, count):
    """A part of so many K/V heads and tokens, without K and V."""
    positions = torch.arange(count, dtype=torch.int32).expand(heads, -1)
    return Part(slice(0, heads), positions, positions, positions, None)


def test_draws_depend_on_seed_layer_head_position_and_cut_alone():
    part = part_of(2, 4000)
    found = draws(3, 1, part, 500)
    assert abs(float(found.mean()) - 0.5772) < 0.05 and abs(float(found.std()) - 1.2825) < 0.05
    for other in (draws(4, 1, part, 500), draws(3, 2, part, 500), draws(3, 1, part, 501)):
        assert abs(float(torch.corrcoef(torch.stack([found[0], other[0]]))[0, 1])) < 0.06
    assert abs(float(torch.corrcoef(found)[0, 1])) < 0.06
    one = part.head(1)
    some = one._replace(positions=one.positions[:, 70:80])
    assert torch.equal(draws(3, 1, some, 500), found[1:, 70:80])


def test_random_eviction_keeps_every_prompt_and_its_share_of_the_answer():
    """Over two turns: what the first answer has left is of the second prompt."""
    method = RandomEviction(tokens=8, every=4, recent=3)
    with llm_of().session(method) as session:
        play(session, ((60, 30),))
        first = session.runtime.positions(1)
        assert all(head[:60] == list(range(60)) and 68 <= len(head) < 72 for head in first)
        assert all(head[-3:] == [87, 88, 89] for head in first)
        assert first[0] != first[1] != session.runtime.positions(2)[1]
        session.prefill(random_ids(20, seed=1))
        for token in random_ids(9, seed=2):
            session.decode(token)
        for old, new in zip(first, session.runtime.positions(1)):
            assert new[: len(old)] == old and new[len(old) :][:20] == list(range(90, 110))
            assert len(new) == len(old) + 20 + 9
        for token in random_ids(3, seed=3):
            session.decode(token)
        assert all(
            len(new) == len(old) + 20 + 8 for old, new in zip(first, session.runtime.positions(1))
        )


def test_random_eviction_all_is_even_over_a_prompt():
    """One cut: no third of a prompt is left more often than another."""
    with llm_of().session(RandomEvictionAll(tokens=150, recent=0)) as session:
        session.prefill(random_ids(450))
        held = [
            at for layer in range(7) for head in session.runtime.positions(layer) for at in head
        ]
    thirds = np.histogram(held, bins=3, range=(0, 450))[0] / len(held)
    assert abs(thirds - 1 / 3).max() < 0.04, thirds


@pytest.mark.parametrize("count", [1, 2, 31, 64, 97])
@pytest.mark.parametrize("floats", [1, 500, 1 << 18])
def test_redundancy_is_the_same_in_tiles(count, floats, monkeypatch):
    """Against a loop over rows, in float64."""
    monkeypatch.setitem(column_sums.TILES, "cpu", floats)
    k = torch.randn(2, count, 5, generator=torch.Generator().manual_seed(count))
    k[:, count // 2 :] += 2 * k[:, : count - count // 2]  # some are alike
    found = redundancy(k, 0.5)
    for head, mine in zip(k.double().numpy(), found.numpy()):
        unit = head / np.linalg.norm(head, axis=-1, keepdims=True)
        cosines = unit @ unit.T
        for i, row in enumerate(cosines):
            row[i] = 0
            row[np.flatnonzero(row > 0.5)[-1:]] = 0
        expected = np.exp(cosines.mean(0))
        np.testing.assert_allclose(mine, expected / expected.sum(), atol=1e-6)


def test_of_what_is_said_again_and_again_the_last_time_is_least_redundant():
    """Ten keys far apart, and ten that are one: the others leave out the last, which leaves out the
    one before it.
    """
    k = torch.cat([torch.eye(11)[:10], torch.eye(11)[10:].expand(10, -1)])[None]
    found = redundancy(k, 0.5)[0]
    torch.testing.assert_close(found[19].expand(10), found[:10])
    assert found[19] < found[18] < found[10:18].min()


def test_vase_keeps_values_of_a_large_range():
    """Whatever the attention: a quarter of the budget, the first tokens among it."""
    with llm_of().session(VaSE(tokens=80, window=16, every=16, forget=False)) as session:
        session.prefill(random_ids(300))
        for layer in (3, 6):  # in layer 0 a token has one value, wherever it stands
            v = session.bank.kv(layer)[1][0, :, : 300 - 16]
            ranges = v.amax(-1) - v.amin(-1)
            ranges[:, :4] = float("inf")
            for head, large in zip(session.runtime.positions(layer), ranges.topk(20).indices):
                assert {*large.tolist()} <= {*head} and len(head) == 80


def test_expected_weights_are_those_of_a_gaussian():
    """Of one layer, by 200,000 draws of queries: the closed form is exp of mean and half the
    variance.
    """
    method = ExpectedAttention(tokens=30, values=False, sink=0)
    with llm_of(SHAPES[1]).session(method) as session:
        runtime = session.runtime
        queries = torch.randn(50, 4, 16, generator=torch.Generator().manual_seed(0)) * 2
        at = torch.arange(50)
        turned = apply_rope(queries, *runtime.rotary.at(at))
        runtime.begin_prompt(0, 50)
        keys = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(1))
        for layer in range(7):
            runtime.observe(0, layer, 0, turned, keys, 0, 0)
        runtime.commit(50)
        part = part_of(4, 50)._replace(k=keys, v=keys)
        found = runtime.rank(runtime.sequences[0], 3, part, None)
        mean, spread = runtime._turned(runtime.sequences[0].sums[3], 50, 3)
    for head in range(4):
        root = torch.linalg.cholesky(spread[head, 0] + 1e-5 * torch.eye(16))
        drawn = torch.randn(200_000, 16, generator=torch.Generator().manual_seed(2)) @ root.T
        expected = ((drawn + mean[head, 0]) @ keys[head].T / 4).exp().mean(0)
        torch.testing.assert_close(found[head], expected / expected.sum(), atol=3e-3, rtol=0.1)


def test_layer_budgets_keep_their_sum_their_floor_and_their_order():
    rng = np.random.default_rng(0)
    for layers, mean, low, high in (
        (1, 40, 8, 100),
        (2, 5, 5, 9),
        (7, 50, 10, 60),
        (32, 31, 1, 64),
        (7, 60, 10, 60),
        (3, 1, 4, 1),
    ):
        for power in (0.1, 1, 6):
            needs = (rng.random(layers) ** power + 1e-3).tolist()
            found = dealt(needs, mean, low, high)
            assert sum(found) == layers * mean
            assert min(found) >= min(low, mean) and max(found) <= high
            order = np.argsort(needs)
            assert all(
                a <= b + 1 for a, b in zip(np.array(found)[order], np.array(found)[order][1:])
            )
    assert dealt([1.0, 1.0, 1.0], 20, 4, 99) == [20, 20, 20]
    assert dealt([1.0, 3.0], 20, 4, 99) == [12, 28]
    assert dealt([1.0, 99.0], 20, 4, 24) == [16, 24]  # what the second cannot use is the first's


def test_zigzagkv_gives_layers_different_budgets():
    with llm_of().session(ZigZagKV(tokens=60, window=8)) as session:
        session.prefill(random_ids(200))
        budgets = session.runtime.sequences[0].budgets
        held = [len(session.runtime.positions(layer)[0]) for layer in range(7)]
    assert held == budgets and len(set(budgets)) > 2 and sum(budgets) == 7 * 60


# ---------------------------------------------------------------- going back, copies, files


@OURS
def test_going_back_a_fork_and_a_file_are_exact(method, tmp_path):
    """To places in an answer just before a cut, whose queries a file has too."""
    llm, ids, path = llm_of((2, 4, 2)), random_ids(160, seed=3), tmp_path / "session"
    method = replace(method, forget=True)

    def read(session, stop):
        session.prefill(ids[:90])
        for token in ids[90 : min(stop, 117)]:
            session.decode(token)
        if stop > 117:
            session.prefill(ids[117:stop])
        return session

    for stop in (103, 140):
        with llm.session(method) as fresh, llm.session(method) as session:
            read(fresh, stop), read(session, 160).truncate(stop)
            session.save(path)
            with session.fork() as twin, llm.restore(path)[0] as back:
                for token in range(11, 25):
                    expected = fresh.decode(token)
                    for one in (session, twin, back):
                        assert torch.equal(one.decode(token), expected), (stop, token)
                assert back.runtime.positions(1) == fresh.runtime.positions(1)


@OURS
def test_what_full_attention_has_read_serves_as_well(method):
    """A change of method in the middle of an answer: all so far is the prompt."""
    # each token once: no two values are alike to float32
    llm, ids = llm_of((2, 4, 2)), random.Random(3).sample(range(VOCAB), 90)
    with llm.session(Full()) as session, llm.session(method) as fresh:
        session.prefill(ids[:70])
        for token in ids[70:]:
            session.decode(token)
        session.set_method(method)
        fresh.prefill(ids)
        for token in range(11, 23):
            got, expected = session.decode(token), fresh.decode(token)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
            assert session.runtime.positions(1) == fresh.runtime.positions(1)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    st.sampled_from(METHODS),
    st.sampled_from(((3, 4, 4), (3, 8, 2), (3, 8, 1))),
    st.sampled_from((1, 7, 64)),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from((1, 2, 5, 31, 33, 64, 89)), st.integers(0, 19)),
        min_size=1,
        max_size=3,
    ),
)
def test_any_lengths_turns_and_chunks(method, shape, chunk, forget, turns):
    """Prompts shorter than a window or a budget, answers of no token: held are distinct tokens, the
    newest among them, no more than the budget and what comes before a cut, within the plan's bytes.
    """
    llm, method = llm_of(shape, chunk, "auto"), replace(method, forget=forget)
    most, read = llm.plan(replace(method, forget=False)).bytes_of("retained rows"), 0
    with llm.session(method) as session:
        for number, (prompt, answer) in enumerate(turns):
            ids, read = random_ids(prompt + answer, seed=number), read + prompt
            assert session.prefill(ids[:prompt]).isfinite().all()
            for step, token in enumerate(ids[prompt:]):
                assert session.decode(token).isfinite().all()
                n = len(session)
                for layer, budget in enumerate(session.runtime.sequences[0].budgets):
                    room = method.max_rows(budget)
                    room = budget + step + 2 if room is None else room
                    for head in session.runtime.positions(layer):
                        assert head == sorted(set(head)) and head[0] >= 0 and head[-1] == n - 1
                        assert len(head) < room
                assert 0 < session.stats.store_bytes <= most


def test_what_cannot_be_is_refused_in_one_line():
    for call, message in (
        (lambda: RKV(every=4), "every: found 4, expected at least the window of 8 tokens"),
        (lambda: RKV(tokens=7), "tokens: found 7, expected at least the window of 8 tokens"),
        (lambda: RKV(importance=1.5), "importance: found 1.5"),
        (lambda: VaSE(window=65), "window: found 65, expected at most 64"),
        (lambda: VaSE(protect=-1), "protect: found -1"),
        (lambda: VaSE(every=9), "every: found 9, expected at least the window of 64 tokens"),
        (lambda: RandomEviction(seed=-1), "seed: found -1"),
        (lambda: RandomEvictionAll(every=0), "every: found 0"),
        (lambda: RandomEvictionAll(tokens=3, share=0.1), "budget: found tokens=3 and share=0.1"),
        (lambda: RoCo(newest=-1), "newest: found -1"),
        (lambda: ZigZagKV(mass=0), "mass: found 0"),
        (lambda: ZigZagKV(floor=2), "floor: found 2"),
        (lambda: ExpectedAttention(future=0), "future: found 0"),
        (lambda: ExpectedAttention(covariance="yes"), "covariance: found 'yes'"),
    ):
        with pytest.raises(SettingError, match=message):
            call()


def test_published_defaults():
    """Those of the sources (docs/METHODS.md), where nothing is given."""
    assert (RKV().window, RKV().every, RKV().importance, RKV().kernel) == (8, 128, 0.1, 7)
    vase = VaSE()
    assert (vase.tokens, vase.window, vase.every, vase.protect, vase.sink) == (
        4096,
        64,
        64,
        0.25,
        4,
    )
    assert (vase.kernel, vase.pool, vase.gqa_reduce) == (5, "mean", "mean")
    assert (RandomEviction().tokens, RandomEviction().recent, RandomEviction().every) == (
        2048,
        64,
        64,
    )
    assert (RoCo().newest, RoCo().recent_share, RoCo().every) == (10, 0.3, 1)
    assert (ZigZagKV().mass, ZigZagKV().floor) == (0.9, 0.2)
    assert (ExpectedAttention().future, ExpectedAttention().sink) == (512, 4)
