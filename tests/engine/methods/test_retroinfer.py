"""RetroInfer: zones of clusters index by index, and attention to rows and means together, against a
simulation in float64, token by token.

Stops: a cluster that is cut, read beyond the budget, or estimated though it is read; a mean of
another cluster's tokens, or one that counts once; first or waiting tokens that are estimated; an
index that does not follow the bank.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.select.wave.retroinfer import RetroInfer
from engine.methods.select.wave.zones import zones_of
from tests.builders import GROUPS, World, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened
from tests.engine.methods.test_clusterkv import NEAR, clustered

LENGTHS = st.sampled_from((1, 4, 5, 24, 25, 44, 45, 64, 97, 127))


def simulate(q, k, v, method):
    """(rows [Hkv, ..] that each head reads before the tail, out [H, D], gap) of one sequence. q
    [H, D]; k, v [Hkv, n, D], all in float64.
    """
    n, rows, outs, gap = k.shape[1], [], [], float("inf")
    segments = max(0, n - 1 - method.sink) // method.segment
    tail = min(n - 1, method.sink + segments * method.segment)
    for head, group in enumerate(q.view(k.shape[0], -1, q.shape[1])):
        clusters = []
        for number in range(segments):
            first = method.sink + number * method.segment
            own = k[head, first : first + method.segment]
            member, _, apart = clustered(own, method.clusters, method.rounds)
            gap = min(gap, apart)
            for i in range(method.clusters):
                tokens = torch.nonzero(member == i).flatten() + first
                if len(tokens):
                    logits = k[head, tokens] @ group.T / 4
                    all_logits = k[head] @ group.T / 4
                    score = (group @ k[head, tokens].mean(0)).max()
                    if method.rank == "exact":
                        score = (logits.exp() / all_logits.exp().sum(0)).sum()
                    clusters.append((float(score), tokens))
        clusters.sort(key=lambda pair: -pair[0])
        gap = min([gap, *(a - b for (a, _), (b, _) in zip(clusters, clusters[1:]))])
        taken, count = list(range(min(method.sink, n - 1))), 0
        while count < len(clusters) and len(taken) + len(clusters[count][1]) <= method.budget(0):
            taken += clusters[count][1].tolist()
            count += 1
        most = int(method.estimate * segments * method.clusters)
        read = torch.tensor([*sorted(taken), *range(tail, n)])
        logits, values = [k[head, read] @ group.T / 4], [v[head, read]]
        for _, tokens in clusters[count : count + most]:
            mean = k[head, tokens].mean(0)
            logits.append((group @ mean / 4)[None] + math.log(len(tokens)))
            values.append(v[head, tokens].mean(0)[None])
        outs.append(torch.cat(logits).T.softmax(1) @ torch.cat(values))
        rows.append(sorted(taken))
    return rows, torch.cat(outs), gap


@pytest.mark.parametrize("backend", ["reference", "auto", "cpu"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((dict(sink=4, segment=20, per=5), dict(sink=0, segment=13, per=2))),
    st.sampled_from((dict(estimate=0.0), dict(estimate=0.4), dict(estimate=1.0, rank="exact"))),
    st.sampled_from((5, 13, 40)),
    st.integers(0, 99),
)
@settings(max_examples=6, derandomize=True, deadline=None)
def test_a_step_reads_and_estimates_its_zones(backend, shape, lengths, how, more, budget, seed):
    """A ragged batch; rows that are not read are NaN once they are in the index, where no scores
    are made of them.
    """
    method = RetroInfer(tokens=budget, rounds=2, **how, **more)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    found = [
        simulate(q[b, 0].double(), k[b, :, :n].double(), v[b, :, :n].double(), method)
        for b, n in enumerate(lengths)
    ]
    assume(min(gap for _, _, gap in found) > NEAR)
    runtime, group = world.runtime, world.plan.group_of[3]
    runtime.end_prompt(max(lengths))
    runtime.learn(group, 3, world.bank, list(lengths))
    tails, full = runtime.tail_start(world.step(*lengths)).tolist(), max(lengths) - 1 <= budget
    for b, n in enumerate(lengths):
        for head, own in enumerate(found[b][0]):
            waits = range(method.since(n), n)  # in no cluster: learnt again
            unread = sorted({*range(131)} - {*own, *range(tails[b], n), *waits})
            if method.rank == "centroid":
                k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    for b, (rows, expected, _) in enumerate(found):
        torch.testing.assert_close(out[b, 0].double(), expected, atol=2e-5, rtol=2e-5)
        most = max(len(own) for own in rows)
        assert full or most + lengths[b] - tails[b] <= runtime.rows_read(lengths[b])[3]
    chosen = runtime.chosen[group]
    if chosen.index is not None:
        for b, (rows, _, _) in enumerate(found):
            for head, own in enumerate(rows):
                counted = int(chosen.counts[b, head])
                assert chosen.index[b, head, :counted].tolist() == own


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_with_a_cluster_per_token_it_is_the_top_k_and_full_attention(shape, seed):
    """Without estimates a step reads the exact top-k of every K/V head; with all of them nothing is
    lost, since a token is its own mean.
    """
    method = RetroInfer(tokens=24, sink=0, segment=20, per=1, estimate=0.0)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, 117)
    q, (k, v) = world.queries(), world.bank.kv(3)
    logits = q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :100].double().mT
    best = logits.amax(1).topk(24, dim=1).indices.sort(1).values
    world.runtime.end_prompt(117)
    world.runtime.attend(3, q, world.step(117))
    assert torch.equal(world.runtime.chosen_rows(3), best)
    assert world.runtime.rows_read(117)[3] == 24 + 17
    every = RetroInfer(tokens=24, sink=0, segment=20, per=1, estimate=1.0)
    runtime = every.runtime(world.runtime.setup)
    runtime.end_prompt(117)
    found = runtime.attend(3, q, world.step(117))
    assert torch.equal(runtime.chosen_rows(3), best)
    weights = (q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :117].double().mT / 4).softmax(-1)
    expected = (weights @ v[0, :, :117].double()).flatten(0, 1)
    torch.testing.assert_close(found[0, 0].double(), expected, atol=1e-5, rtol=1e-5)


def test_zones_follow_each_other_and_leave_out_what_is_empty():
    scores = torch.tensor([[1.0, 9.0, 5.0, 7.0, 3.0], [2.0, 2.0, 2.0, 2.0, 9.0]])
    sizes = torch.tensor([[3, 4, 0, 2, 5], [6, 1, 0, 1, 2]], dtype=torch.int32)
    zones = zones_of(scores, sizes, 7, 2)
    assert zones.tokens.tolist() == [6, 2]  # 4 + 2, and 5 more do not fit; 2, and 6 more do not
    assert zones.estimated.tolist() == [[4, 0], [0, 1]]
    torch.testing.assert_close(zones.logs.exp(), torch.tensor([[5.0, 3.0], [6.0, 1.0]]))
    assert zones.place[0].tolist() == [3, 0, 4, 1, 2]
    zones = zones_of(scores, sizes, 100, 3)
    assert zones.tokens.tolist() == [14, 10] and (zones.logs == float("-inf")).all()


def test_exact_ranks_hold_more_attention_than_centroids():
    """The control: at the same bytes, by as much as ranking loses."""
    kept = {}
    for rank in ("centroid", "exact"):
        method = RetroInfer(tokens=40, sink=0, segment=60, per=6, rank=rank)
        world = World(method, (4, 2), 256, seed=4)
        world.fill(3, 0, 250)
        q, k = 3 * world.queries(), world.bank.kv(3)[0][0, :, :250]
        world.runtime.end_prompt(250)
        world.runtime.attend(3, q, world.step(250))
        weights = (q[0, 0].view(2, 2, 16) @ k.mT / 4).softmax(-1)
        rows = world.runtime.chosen_rows(3)
        mine = weights.sum(1).gather(1, rows.clamp(min=0)).masked_fill(rows < 0, 0.0)
        kept[rank] = float(mine.sum())
    assert kept["exact"] > kept["centroid"]


def test_its_index_is_counted():
    """Of every 16 tokens two means and a size, each token's cluster, and a zone."""
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = RetroInfer(tokens=100, segment=320)
    plan = method.plan(config)
    found = {n: b.nbytes(2) for n, b in method.buffers(plan, config, 1604).items()}
    assert found["centroids"] == found["values"] == 4 * 1600 // 16 * 2 * 64 * 2
    assert found["sizes"] == 4 * 1600 // 16 * 2 * 4
    assert found["estimated"] == found["logs"] == 4 * int(0.232 * 100) * 2 * 4
    assert sum(found.values()) == method.needs(plan, config, 1604, 2).device_bytes


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_turns_truncates_forks_and_other_methods_change_nothing(offload):
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; cut by more than a segment too.
    """
    method = RetroInfer(tokens=40, segment=30, per=5)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, offload=offload) as (one, _):
        assert one.runtime.rows_read(260)[3] == 40 + 16


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(per=0), "per: found 0, expected an int from 1 to 8192"),
        (dict(per=8193), "per: found 8193"),
        (dict(tokens=4), "tokens: found 4, expected more than the 4 first tokens"),
        (dict(estimate=1.5), "estimate: found 1.5"),
        (dict(rank="ann"), "rank: found 'ann', expected one of centroid, exact"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        RetroInfer(**bad)


def test_it_does_not_draft():
    with pytest.raises(SettingError, match="retroinfer cannot draft for exact mode: a draft would"):
        Exact(RetroInfer())
