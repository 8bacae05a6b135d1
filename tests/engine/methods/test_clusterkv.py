"""ClusterKV: clusters of a k-means in float64, token by token, and choices of whole clusters, index
by index.

Stops: keys told apart by length, a cluster of another segment or head, the last cluster read beyond
the budget, first or waiting tokens that compete, an index that does not follow the bank.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.index.clusterkv import ClusterKV
from engine.methods.select.index.clusters import cluster
from tests.builders import GROUPS, World, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened

LENGTHS = st.sampled_from((1, 4, 5, 24, 25, 44, 45, 64, 65, 97, 127))
NEAR = 1e-5  # of two cosines or scores: nearer ones may swap in float32


def clustered(keys, count, rounds):
    """(members [S], centroids [C, D], the least gap between the two best cosines) of keys [S, D]
    in float64: plain k-means by cosine.
    """
    keys, gap = keys.double(), float("inf")
    centroids = torch.stack([keys[i * len(keys) // count] for i in range(count)])
    for turn in range(rounds + 1):
        lengths = keys.norm(dim=1)[:, None] * centroids.norm(dim=1)
        cosines = keys @ centroids.T / lengths.clamp(min=1e-12)
        if count > 1:
            best = cosines.topk(2, dim=1).values
            gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
        member = cosines.argmax(1)
        if turn < rounds:
            for i in range(count):
                if (member == i).any():
                    centroids[i] = keys[member == i].mean(0)
    return member, centroids, gap


def simulate(q, k, method, how):
    """(rows [Hkv, ..] before the tail, gap) of one sequence. q [H, D]; k [Hkv, n, D]."""
    n, rows, gap = k.shape[1], [], float("inf")
    segments = max(0, n - 1 - method.sink) // method.segment
    for head, group in enumerate(q.double().view(k.shape[0], -1, q.shape[1])):
        found = []
        for number in range(segments):
            first = method.sink + number * method.segment
            own = k[head, first : first + method.segment]
            member, centroids, apart = clustered(own, method.clusters, method.rounds)
            gap = min(gap, apart)
            for i, centroid in enumerate(centroids):
                logits = group @ centroid
                score = {"max": logits.max(), "mean": logits.mean(), "sum": logits.sum()}[how]
                tokens = (torch.nonzero(member == i).flatten() + first).tolist()
                found.append((float(score), tokens))
        found.sort(key=lambda pair: -pair[0])
        scores = torch.tensor([score for score, _ in found])
        gap = min([gap, *(-scores.diff()).tolist()])
        taken = [*range(min(method.sink, n - 1))]
        for _, tokens in found:
            taken += tokens[: max(0, method.budget(0) - len(taken))]
        rows.append(sorted(taken))
    return rows, gap


@given(
    st.sampled_from(((1, 1), (4, 2), (17, 5), (24, 24))),
    st.integers(0, 4),
    st.sampled_from((1, 3, 16)),
    st.integers(0, 99),
)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_clusters_are_those_of_plain_k_means(sizes, rounds, dim, seed):
    """Of several sets at once; one of a key per token is every key itself."""
    size, count = sizes
    keys = torch.randn(3, size, dim, generator=torch.Generator().manual_seed(seed))
    keys *= torch.rand(3, size, 1, generator=torch.Generator().manual_seed(seed)) * 9 + 0.1
    member, centroids = cluster(keys, count, rounds)
    for i, own in enumerate(keys):
        expected, means, gap = clustered(own, count, rounds)
        assume(gap > NEAR)
        assert torch.equal(member[i], expected)
        torch.testing.assert_close(centroids[i].double(), means, atol=1e-4, rtol=1e-4)
    if count == size and dim > 1:
        assert torch.equal(centroids, keys)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((dict(sink=4, segment=20, per=5), dict(sink=0, segment=13, per=13))),
    st.sampled_from(("max", "mean", "sum")),
    st.sampled_from((1, 13, 40)),
    st.integers(0, 99),
)
@settings(max_examples=8, derandomize=True, deadline=None)
def test_a_step_reads_whole_clusters(backend, shape, lengths, how, reduce, budget, seed):
    """A ragged batch; rows that are not read are NaN once they are in the index."""
    method = ClusterKV(tokens=budget, rounds=2, gqa_reduce=reduce, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    found = [simulate(q[b, 0], k[b, :, :n], method, reduce) for b, n in enumerate(lengths)]
    assume(min(gap for _, gap in found) > NEAR)
    runtime, group = world.runtime, world.plan.group_of[3]
    runtime.end_prompt(max(lengths))
    runtime.learn(group, 3, world.bank, list(lengths))
    tails = runtime.tail_start(world.step(*lengths)).tolist()
    rows = [
        [[*own, *range(tail, n)] for own in heads]
        for (heads, _), tail, n in zip(found, tails, lengths)
    ]
    for b, heads in enumerate(rows):
        for head, own in enumerate(heads):
            waits = range(method.since(lengths[b]), lengths[b])  # in no cluster: learnt again
            unread = sorted({*range(131)} - {*own, *waits})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    for b, heads in enumerate(rows):
        assert runtime.rows_read(lengths[b])[3] == len(heads[0]) == len({*heads[0]})
        for head in range(shape[0]):
            kv = head * shape[1] // shape[0]
            own = heads[kv]
            weights = (q[b, 0, head].double() @ k[b, kv, own].double().T / 4).softmax(0)
            expected = weights @ v[b, kv, own].double()
            torch.testing.assert_close(out[b, 0, head].double(), expected, atol=1e-5, rtol=1e-5)
    if runtime.chosen[group].index is not None:
        chosen = runtime.chosen[group]
        for b, (heads, _) in enumerate(found):
            counted = int(chosen.counts[b])
            assert chosen.index[b, :, :counted].tolist() == heads


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=15, derandomize=True)
def test_with_a_cluster_per_token_it_is_the_exact_top_k(shape, seed):
    method = ClusterKV(tokens=24, sink=0, segment=20, per=1)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, 117)
    q, k = world.queries(), world.bank.kv(3)[0]
    logits = q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :100].double().mT
    best = logits.amax(1).topk(24, dim=1).indices.sort(1).values
    world.runtime.end_prompt(117)
    world.runtime.attend(3, q, world.step(117))
    assert torch.equal(world.runtime.chosen_rows(3), best)
    assert world.runtime.rows_read(117)[3] == 24 + 17


@given(
    st.lists(st.tuples(st.integers(1, 130), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_clusters_follow_the_bank_wherever_it_goes(moves, seed):
    method = ClusterKV(sink=3, segment=17, per=4, rounds=1)
    world, before = World(method, (4, 2), 130, seed=seed), 0
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        world.runtime.truncate(kept)
        world.fill(3, kept, 130)
        world.runtime.learn(1, 3, world.bank, [n])
        fresh = method.runtime(world.runtime.setup)
        fresh.learn(1, 3, world.bank, [n])
        stop, count = method.since(n), method.segments(n) * method.clusters
        ours, theirs = (one.member[1, 0, :, 3:stop] for one in (world.runtime, fresh))
        assert torch.equal(ours, theirs)
        ours, theirs = (one.centroids[1, 0, :, :count] for one in (world.runtime, fresh))
        torch.testing.assert_close(ours, theirs)
        # every token is in one cluster of its own segment
        own = torch.arange(max(0, stop - 3)) // 17
        assert torch.equal(world.runtime.member[1, 0, :, 3:stop] // 4, own.expand(2, -1).int())
        before = n


def test_rows_in_bfloat16_are_clustered_in_float32():
    method = ClusterKV(tokens=20, sink=3, segment=40, per=4)
    world = World(method, (4, 2), 130, dtype=torch.bfloat16)
    world.fill(3, 0, 100)
    world.runtime.end_prompt(100)
    world.runtime.attend(3, world.queries(), world.step(100))
    keys = world.bank.kv(3)[0][0, :, 3:83].float().reshape(4, 40, 16)
    member, centroids = cluster(keys, 10, method.rounds)
    found = world.runtime.member[1, 0, :, 3:83].reshape(2, 2, 40) % 10
    assert torch.equal(found, member.view(2, 2, 40).int())
    own = world.runtime.centroids[1, 0, :, :20].reshape(4, 10, 16)
    assert torch.equal(own, centroids.bfloat16())


def test_an_index_is_a_80th_of_k_and_a_number_per_token():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = ClusterKV(tokens=100)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1616).items()}
    assert found["centroids"] == 4 * 1600 // 80 * 2 * 64 * 2
    assert found["member"] == 4 * 1616 * 2 * 4
    assert sum(found.values()) == method.needs(method.plan(config), config, 1616, 2).device_bytes


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_turns_truncates_forks_and_other_methods_change_nothing(offload):
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; cut by more than a segment too.
    """
    method = ClusterKV(tokens=40, sink=4, segment=30, per=5)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, offload=offload) as (one, _):
        assert one.runtime.rows_read(260)[3] == 40 + 16


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(per=321), "per: found 321, expected an int from 1 to 320"),
        (dict(per=0), "per: found 0"),
        (dict(segment=0), "segment: found 0"),
        (dict(sink=-1), "sink"),
        (dict(rounds=-1), "rounds"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        ClusterKV(**bad)
