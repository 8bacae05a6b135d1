"""PQCache: codes and choices of a product quantiser in float64, index by index.

Stops: pieces of another channel, codes by the angle, a softmax that counts first or newest tokens,
centroids that a truncate or a chunk changes, rows left out before there are any.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.index.clusters import cluster, nearest
from engine.methods.select.index.pqcache import PQCache
from tests.builders import GROUPS, World, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened

LENGTHS = st.sampled_from((1, 35, 36, 37, 64, 97, 127))
NEAR = 1e-6  # of two distances or scores: nearer ones may swap in float32


def quantised(keys, train, count, rounds):
    """(keys [n, D] by their centroids, gap) in float64: plain k-means on the first `train`."""
    keys, gap = keys.double(), float("inf")
    centroids = torch.stack([keys[i * train // count] for i in range(count)])
    for turn in range(rounds + 1):
        some = keys[:train] if turn < rounds else keys
        distances = torch.cdist(some, centroids) ** 2
        best = distances.topk(2, dim=1, largest=False).values
        gap = min(gap, float((best[:, 1] - best[:, 0]).min()))
        member = distances.argmin(1)
        if turn < rounds:
            for i in range(count):
                if (member == i).any():
                    centroids[i] = some[member == i].mean(0)
    return centroids[member], gap


def simulate(q, k, method):
    """(rows [Hkv, ..] that are read, gap) of one sequence. q [H, D]; k [Hkv, n, D]."""
    n, budget, rows, gap = k.shape[1], method.budget(0), [], float("inf")
    if n < method.ready or n <= budget:
        return [[*range(n)]] * len(k), gap
    last, size = n - budget // 2, k.shape[2] // method.parts
    for head, group in enumerate(q.double().view(k.shape[0], -1, q.shape[1])):
        pieces = []
        for part in k[head, method.sink :].split(size, dim=1):
            found, apart = quantised(part, method.train, 2**method.bits, method.rounds)
            pieces.append(found)
            gap = min(gap, apart)
        coded = torch.cat(pieces, 1)[: last - method.sink]
        weights = (group @ coded.T / k.shape[2] ** 0.5).softmax(1)
        score = {"sum": weights.sum(0), "max": weights.amax(0)}[method.gqa_reduce]
        order, room = score.argsort(descending=True, stable=True), budget - budget // 2
        room -= method.sink
        if len(order) > room:
            gap = min(gap, float(score[order[room - 1]] - score[order[room]]))
        best = (order[:room] + method.sink).sort().values.tolist()
        rows.append([*range(method.sink), *best, *range(last, n)])
    return rows, gap


def assert_codes_choose(world, q, lengths, found):
    """A step of layer 3 over ragged sequences reads found [sequence][K/V head], ascending, and
    attends to nothing else: what is not read is NaN once it is in the index.
    """
    runtime, (k, v) = world.runtime, world.bank.kv(3)
    group = q.shape[2] // k.shape[1]
    runtime.end_prompt(max(lengths))
    runtime.learn(3, 3, world.bank, list(lengths))
    for b, rows in enumerate(found):
        if lengths[b] == runtime.method.ready:  # the step makes the centroids anew
            continue
        for head, own in enumerate(rows):
            unread = sorted({*range(131)} - {*own, lengths[b] - 1})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    for b, rows in enumerate(found):
        assert runtime.rows_read(lengths[b])[3] == len(rows[0]) == len({*rows[0]})
        for head in range(q.shape[2]):
            kv, own = head // group, rows[head // group]
            weights = (q[b, 0, head].double() @ k[b, kv, own].double().T / 4).softmax(0)
            expected = weights @ v[b, kv, own].double()
            torch.testing.assert_close(out[b, 0, head].double(), expected, atol=1e-5, rtol=1e-5)
    chosen = runtime.chosen[3]
    if chosen.index is not None:
        tails = chosen.tail_start.tolist()
        for b, rows in enumerate(found):
            kept = chosen.index[b, :, : int(chosen.counts[b])].tolist()
            assert [[*own, *range(tails[b], lengths[b])] for own in kept] == rows


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from(
        (
            dict(sink=4, parts=2, bits=3, train=32, rounds=2),
            dict(sink=0, parts=1, bits=1, train=36, rounds=3),
            dict(sink=3, parts=16, bits=4, train=16, rounds=1),
        )
    ),
    st.sampled_from(("sum", "max")),
    st.sampled_from((9, 24)),
    st.integers(0, 99),
)
@settings(max_examples=8, derandomize=True, deadline=None)
def test_a_step_reads_what_codes_rank_first(backend, shape, lengths, how, reduce, budget, seed):
    """A ragged batch, of which one sequence may have no centroids yet; rows that are not read are
    NaN once they are in the index.
    """
    method = PQCache(tokens=budget, gqa_reduce=reduce, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, k = world.queries(), world.bank.kv(3)[0]
    found = [simulate(q[b, 0], k[b, :, :n], method) for b, n in enumerate(lengths)]
    # a code of equal distance, as of centroids that are the same, may be either
    assume(min(gap for _, gap in found) > NEAR)
    assert_codes_choose(world, q, lengths, [rows for rows, _ in found])


@given(st.sampled_from(GROUPS), st.sampled_from((1, 2, 8)), st.integers(0, 99))
@settings(max_examples=15, derandomize=True, deadline=None)
def test_with_a_centroid_per_token_it_is_the_exact_top_k(shape, parts, seed):
    """Of the tokens between the first and the newest, by the sum of their weights."""
    method = PQCache(tokens=24, sink=0, parts=parts, bits=7, train=128, rounds=3)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, 128)
    q, k = world.queries(), world.bank.kv(3)[0]
    logits = q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :116].double().mT / 4
    best = logits.softmax(-1).sum(1).topk(12, dim=1).indices.sort(1).values
    world.runtime.end_prompt(128)
    world.runtime.attend(3, q, world.step(128))
    assert torch.equal(world.runtime.chosen_rows(3), best)


@given(
    st.lists(st.tuples(st.integers(1, 130), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_codes_follow_the_bank_wherever_it_goes(moves, seed):
    method = PQCache(sink=3, bits=2, train=40, rounds=2)
    world, before = World(method, (4, 2), 130, seed=seed), 0
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        world.runtime.truncate(kept)
        world.fill(3, kept, 130)
        world.runtime.learn(3, 3, world.bank, [n])
        fresh = method.runtime(world.runtime.setup)
        fresh.learn(3, 3, world.bank, [n])
        if n >= method.ready:
            ours, theirs = (one.codes[3, 0, :, :, 3:n] for one in (world.runtime, fresh))
            assert torch.equal(ours, theirs)
            assert torch.equal(world.runtime.centroids[3], fresh.centroids[3])
        before = n


def test_rows_in_bfloat16_are_coded_in_float32():
    method = PQCache(tokens=20, sink=3, bits=3, train=50, rounds=4)
    world = World(method, (4, 2), 130, dtype=torch.bfloat16)
    world.fill(3, 0, 100)
    world.runtime.end_prompt(100)
    world.runtime.attend(3, world.queries(), world.step(100))
    keys = world.bank.kv(3)[0][0, :, 3:100].float().unflatten(2, (2, 8)).transpose(1, 2)
    pieces = keys.reshape(4, 97, 8)
    centroids = cluster(pieces[:, :50], 8, 4, cosine=False)[1]
    assert torch.equal(world.runtime.centroids[3, 0].flatten(0, 1), centroids)
    codes = nearest(pieces, centroids, cosine=False)
    assert torch.equal(world.runtime.codes[3, 0, :, :, 3:100].flatten(0, 1), codes.to(torch.uint8))


def test_an_index_is_a_byte_per_piece_and_a_table():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = PQCache(tokens=100)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1600).items()}
    assert found["codes"] == 6 * 2 * 2 * 1600
    assert found["centroids"] == 6 * 2 * 64 * 64 * 4
    assert sum(found.values()) == method.needs(method.plan(config), config, 1600, 2).device_bytes


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_turns_truncates_forks_and_other_methods_change_nothing(offload):
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; cut to before there are centroids, too.
    """
    method = PQCache(tokens=40, sink=4, bits=4, train=70, rounds=2)
    places = dict(away=30, at=(60, 71, 80, 160, 200))
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, **places, offload=offload) as (one, _):
        assert one.runtime.rows_read(200) == [40] * 4


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(bits=0), "bits: found 0, expected an int from 1 to 8"),
        (dict(bits=9), "bits: found 9, expected an int from 1 to 8"),
        (dict(train=63), "train: found 63, expected an int >= 64"),
        (dict(parts=0), "parts: found 0"),
        (dict(sink=-1), "sink"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        PQCache(**bad)


def test_pieces_that_a_key_has_not_are_refused():
    with pytest.raises(SettingError, match="parts: found 3, expected a divisor of 8, the head dim"):
        PQCache(parts=3).plan(tiny_config(layers=2, heads=8, kv_heads=2))
