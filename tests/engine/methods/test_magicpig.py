"""MagicPIG: signs, draws, probabilities and the estimate in float64, index by index.

Stops: signs of keys with their mean, of another head's directions, tokens of one table, weights by
a probability of the whole group, by the key as it is, or of tokens that are read with certainty, a
mean that a truncate or a chunk changes, rows left out before there is one.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.varying.magicpig import MagicPIG
from kernels.sketch.drawn import LEAST, drawing
from tests.builders import GROUPS, World, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened

LENGTHS = st.sampled_from((1, 29, 30, 31, 64, 97, 127))
NEAR = 1e-6  # of a sign from zero, or of two counts: nearer ones may be either in float32


def simulate(q, k, v, directions, method):
    """(rows [Hkv, ..] that are read, out [H, D], gap) of one sequence in float64. q [H, D]; k, v
    [Hkv, n, D]; directions [Hkv, D, L * K].
    """
    q, k, v, directions = (t.double() for t in (q, k, v, directions))
    heads, n, dim = k.shape
    if n < method.ready or n <= method.sink + method.recent:
        weights = (q.view(heads, -1, dim) @ k.mT / dim**0.5).softmax(-1)
        return [[*range(n)]] * heads, (weights @ v).flatten(0, 1), math.inf
    last, rows, out, gap = n - method.recent, [], [], math.inf
    for head, group in enumerate(q.view(heads, -1, dim)):
        keys = k[head] - k[head, method.sink : method.ready].mean(0)
        mine, theirs = keys @ directions[head], group @ directions[head]
        gap = min(gap, float(mine[method.sink : last].abs().min()), float(theirs.abs().min()))
        mine, theirs = (t.unflatten(1, (method.tables, -1)) > 0 for t in (mine, theirs))
        agree = (mine[None] == theirs[:, None]).all(-1).sum(-1)  # [G, n]
        drawn = agree >= 2
        most = agree.amax(0)[method.sink : last]
        union = (most >= 2).nonzero().flatten()
        room = method.budget(0) - method.recent - method.sink
        if len(union) > room:  # of equal counts the older
            union = most.argsort(descending=True, stable=True)[:room].sort().values
        union = union + method.sink
        rows.append([*range(method.sink), *union.tolist(), *range(last, n)])
        for g, one in enumerate(group):
            own = [t for t in union.tolist() if drawn[g, t]]
            cosine = keys[own] @ one / keys[own].norm(dim=1) / one.norm()
            p = (1 - cosine.arccos() / math.pi) ** method.bits
            tables = method.tables
            chance = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
            read = [*range(method.sink), *own, *range(last, n)]
            logits = k[head, read] @ one / dim**0.5
            logits[method.sink : method.sink + len(own)] -= (chance + LEAST).log()
            out.append(logits.softmax(0) @ v[head, read])
    return rows, torch.stack(out), gap


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from(
        (
            dict(sink=4, recent=3, bits=3, tables=6, train=26),
            dict(sink=0, recent=1, bits=1, tables=2, train=30),
            dict(sink=1, recent=20, bits=7, tables=30, train=9),
        )
    ),
    st.sampled_from((30, 120)),
    st.integers(0, 99),
)
@settings(max_examples=15, derandomize=True, deadline=None)
def test_a_step_weighs_what_it_draws(backend, shape, lengths, how, budget, seed):
    """A ragged batch, of which one sequence may have no mean yet; rows that are not read are NaN
    once they are in the index.
    """
    method = MagicPIG(tokens=budget, middle=False, seed=seed, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v), runtime = world.queries(), world.bank.kv(3), world.runtime
    found = [
        simulate(q[b, 0], k[b, :, :n], v[b, :, :n], runtime.directions, method)
        for b, n in enumerate(lengths)
    ]
    assume(min(gap for _, _, gap in found) > NEAR)
    runtime.end_prompt(max(lengths))
    runtime.learn(2, 3, world.bank, list(lengths))
    for b, (rows, _, _) in enumerate(found):
        if lengths[b] == method.ready:  # the step makes the mean anew
            continue
        for head, own in enumerate(rows):
            unread = sorted({*range(131)} - {*own, lengths[b] - 1})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    for b, (_, expected, _) in enumerate(found):
        torch.testing.assert_close(out[b, 0].double(), expected, atol=1e-4, rtol=1e-4)
    read = math.ceil(sum(map(len, found[0][0])) / shape[1] - 1e-9)
    assert runtime.rows_read(lengths[0])[3] == read
    chosen = runtime.chosen[2]
    if chosen.index is not None:
        for b, (rows, _, _) in enumerate(found):
            lists = zip(chosen.index[b], chosen.counts[b].tolist())
            tail = range(int(chosen.tail_start[b]), lengths[b])
            assert [[*own[:count].tolist(), *tail] for own, count in lists] == rows


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (4, 12), (10, 150)])
def test_a_token_is_drawn_as_often_as_its_weight_says(bits, tables):
    """Over 600 sets of directions, at four angles: the estimate weighs by the true chance."""
    method = MagicPIG(bits=bits, tables=tables, sink=0, recent=1, train=8)
    angles = torch.tensor([0.3, 0.8, 1.3, 2.2], dtype=torch.float64)
    keys = torch.stack([angles.cos(), angles.sin()], 1)
    wanted, generator = (
        drawing(1 - angles / math.pi, bits, tables),
        torch.Generator().manual_seed(1),
    )
    ways = torch.randn(600, 2, bits * tables, generator=generator, dtype=torch.float64)
    of_keys, of_query = (keys @ ways > 0), (ways[:, :1] > 0)  # the query points along the first
    agree = (of_keys == of_query).unflatten(2, (method.tables, -1)).all(-1).sum(-1)
    often = (agree >= 2).double().mean(0)
    spread = (wanted * (1 - wanted) / 600).sqrt()
    assert ((often - wanted).abs() <= 4 * spread + 1e-3).all(), (often, wanted)


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_where_everything_is_drawn_it_is_full_attention(shape, seed):
    """One sign in 255 tables: nothing that is not opposite is left out, and weighs but itself."""
    method = MagicPIG(tokens=200, bits=1, tables=255, sink=2, recent=5, train=50, middle=False)
    world, full = World(method, shape, 131, seed=seed), World(Full(), shape, 131)
    world.fill(3, 0, 120)
    for mine, theirs in zip(full.bank.kv(3), world.bank.kv(3)):
        mine.copy_(theirs)
    q = world.queries()
    world.runtime.end_prompt(120)
    out = world.runtime.attend(3, q, world.step(120))
    assert world.runtime.chosen[2].counts.tolist() == [[115] * shape[1]]
    expected = full.runtime.attend(3, q, full.step(120))
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


@given(
    st.lists(st.tuples(st.integers(1, 130), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(0, 9),
)
@settings(max_examples=15, deadline=None)
def test_signs_follow_the_bank_wherever_it_goes(moves, seed):
    method = MagicPIG(sink=3, bits=3, tables=5, recent=4, train=40, middle=False)
    world, before = World(method, (4, 2), 130, seed=seed), 0
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        world.runtime.truncate(kept)
        world.fill(3, kept, 130)
        world.runtime.learn(2, 3, world.bank, [n])
        fresh = method.runtime(world.runtime.setup)
        fresh.learn(2, 3, world.bank, [n])
        if n >= method.ready:
            ours, theirs = (one.codes[2, 0, :, :, 3:n] for one in (world.runtime, fresh))
            assert torch.equal(ours, theirs)
        before = n


CONFIG = tiny_config(layers=5, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    method = MagicPIG(tokens=90, bits=5, tables=20, sink=3, recent=10, train=40)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, away=70, offload="host") as (one, _):
        rows = one.runtime.rows_read(260)
        assert rows[0] == rows[2] == 260 and all(13 < rows[i] <= 90 for i in (1, 3, 4))


def test_what_it_keeps_is_two_bytes_a_table():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = MagicPIG(tokens=100)
    plan = method.plan(config)
    found = {n: b.nbytes(2) for n, b in method.buffers(plan, config, 1600).items()}
    assert found["codes"] == 4 * 1600 * 2 * 150 * 2 and found["means"] == 4 * 2 * 64 * 4
    assert found["directions"] == 2 * 64 * 1500 * 4 and found["agreed"] == 8 * 1600
    assert sum(found.values()) == method.needs(plan, config, 1600, 2).device_bytes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(bits=0), "bits: found 0, expected an int from 1 to 15"),
        (dict(tables=0), "tables: found 0, expected an int from 2 to 255"),
        (dict(recent=0), "recent: found 0"),
        (dict(train=0), "train: found 0"),
        (dict(middle=1), "middle: found 1, expected True or False"),
        (dict(gqa_reduce="sum"), "gqa_reduce: found 'sum'"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        MagicPIG(**bad)
