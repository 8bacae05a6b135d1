"""The bounds of choosing: what each list takes against float64, attention over it, that no method
of the same granularity keeps more, and chance.

Stops: a list that ranks by the largest weight where it should by the sum, heads whose lists are
mixed up, a bound that a method can beat, chance that repeats itself or leaves a token out.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.mass_meter import Watch
from engine.methods.oracle.random_topk import RandomTopK
from engine.methods.oracle.settings import GRANULARITIES
from engine.methods.oracle.topk import OracleTopK
from engine.methods.oracle.topp import OracleTopP
from engine.methods.select.quest import Quest
from engine.methods.select.tidaldecode import TidalDecode
from engine.plan.layers import Role, tail_start
from tests.builders import GROUPS, World, random_ids, tiny_config
from tests.engine.methods.method_checks import llm_of
from tests.kernels.support.kernel_checks import check_attention

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 47, 64, 97, 127, 130))
LAYER, ROOM = 1, 131
CLOSE = 1e-5  # weights that float32 may order otherwise, of a list's last place


def weights_of(q, k):
    """Attention of every query head in float64: [Hkv, G, n]. q [H, D]; k [Hkv, n, D]."""
    folded = q.double().view(k.shape[0], -1, q.shape[-1])
    return torch.softmax(torch.einsum("hgd,hnd->hgn", folded, k.double()) * 0.25, -1)


def sums_of(weights, granularity):
    """What the lists of a layer rank by: float64 [lists, n]."""
    if granularity == "layer":
        return weights.flatten(0, 1).sum(0, keepdim=True)
    return weights.sum(1) if granularity == "kv_head" else weights.flatten(0, 1)


def assert_best(chosen, sums, count, what):
    """`chosen` [lists, count] are the first of every list, but for equals of its last place."""
    for mine, own in zip(chosen, sums):
        assert len(set(mine.tolist())) == count and mine.equal(mine.sort().values), what
        best = own.topk(count)
        odd = set(mine.tolist()) ^ set(best.indices.tolist())
        near = CLOSE * max(float(best.values[-1]), 1e-3) if count else 0.0
        assert all(abs(float(own[i] - best.values[-1])) < near for i in odd), what


def world_of(method, shape, lengths, backend, dtype, seed):
    """A world whose layer LAYER holds so many rows of each sequence."""
    world = World(method, shape, ROOM, len(lengths), backend, dtype, seed)
    for b, n in enumerate(lengths):
        world.fill(LAYER, 0, n, b)
    world.runtime.end_prompt(max(lengths))
    return world


# ---------------------------------------------------------------- what is chosen, and read


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    st.sampled_from(GROUPS),
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.integers(1, 40),
    st.sampled_from(GRANULARITIES),
    st.sampled_from((0, 64)),
    st.integers(0, 99),
)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_choices_and_attention_of_a_ragged_step(
    backend, dtype, shape, lengths, count, granularity, tail, seed
):
    """Values of rows that no head of a K/V head reads are NaN; K is read whole, to choose."""
    tail = 0 if granularity == "query_head" else tail
    method = OracleTopK(tokens=count, granularity=granularity, dense_layers=1, tail=tail)
    world = world_of(method, shape, lengths, backend, dtype, seed)
    q, (heads, kv_heads), (k, v) = world.queries(), shape, world.bank.kv(LAYER)
    starts = [tail_start(n, tail) if tail else n for n in lengths]
    sums = [
        sums_of(weights_of(q[b, 0], k[b, :, :n]), granularity)[:, :start]
        for b, (n, start) in enumerate(zip(lengths, starts))
    ]
    step = world.step(*lengths)
    world.runtime.attend(LAYER, q, step)
    chosen = world.runtime.chosen[world.plan.group_of[LAYER]]
    if max(starts) <= count:
        assert chosen.index is None
        rows = [torch.arange(start).expand(len(some), -1) for some, start in zip(sums, starts)]
    else:
        assert chosen.counts.tolist() == [min(count, start) for start in starts]
        rows = [chosen.index[b, :, : chosen.counts[b]].long() for b in range(len(lengths))]
        for own, some, b in zip(rows, sums, range(len(lengths))):
            assert_best(own, some, own.shape[1], f"sequence {b}, {granularity}")
    per_head = [own.repeat_interleave(heads // len(own), 0) for own in rows]
    for b, n in enumerate(lengths):
        for head in range(kv_heads):
            read = per_head[b].view(kv_heads, -1)[head].tolist() + [*range(starts[b], n)]
            v[b, head, [i for i in range(ROOM) if i not in read]] = float("nan")
    out = world.runtime.attend(LAYER, q, step)
    for b, n in enumerate(lengths):
        for head in range(heads):
            own = torch.cat([per_head[b][head], torch.arange(starts[b], n)])
            some = tuple(t[b, head // (heads // kv_heads)][own][None] for t in (k, v))
            which = slice(head, head + 1)
            check_attention(out[b, :, which], q[b, :, which], some, [len(own)], 0.25, f"{b} {head}")


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_where_every_query_head_has_its_own_k_and_v_both_lists_are_one(backend):
    found = []
    for granularity in ("kv_head", "query_head"):
        method = OracleTopK(tokens=20, granularity=granularity, dense_layers=0)
        world = world_of(method, (4, 4), [127, 60], backend, torch.float32, 5)
        out = world.runtime.attend(LAYER, world.queries(), world.step(127, 60))
        found.append((world.runtime.chosen[LAYER].index, out))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- so many as have the share p


def fewest(sums, start, p, floor, ceiling):
    """How many of the first `start` tokens each list takes, in float64: (least, most) within
    rounding. sums [lists, n].
    """
    total, tail = sums.sum(1, keepdim=True), sums[:, start:].sum(1, keepdim=True)
    reached = tail + sums[:, :start].sort(1, descending=True).values.cumsum(1)
    found = []
    for slack in (1e-6, -1e-6):
        least = (reached < (p - slack) * total).sum(1) + (tail < (p - slack) * total)[:, 0]
        least = torch.full_like(least, start) if p == 1 else least
        found.append(least.clamp(floor, ceiling).clamp(max=start))
    return found


@pytest.mark.parametrize("backend", ["reference", "auto", "cpu"])
@given(
    st.sampled_from(GROUPS),
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.sampled_from((0.05, 0.5, 0.9, 0.99, 1.0)),
    st.sampled_from((1, 7)),
    st.sampled_from((7, 40, ROOM)),
    st.sampled_from(("layer", "kv_head")),
    st.sampled_from((0, 64)),
    st.integers(0, 99),
)
@settings(max_examples=25, derandomize=True, deadline=None)
def test_each_list_takes_the_fewest_that_have_the_share(
    backend, shape, lengths, p, floor, ceiling, granularity, tail, seed
):
    """Between floor and ceiling; attention reads those, and values of no others."""
    given = dict(tokens=ceiling, p=p, floor=floor, granularity=granularity, tail=tail)
    world = world_of(
        OracleTopP(dense_layers=1, **given), shape, lengths, backend, torch.float32, seed
    )
    q, (heads, kv_heads), (k, v) = world.queries() * 2, shape, world.bank.kv(LAYER)
    step = world.step(*lengths)
    world.runtime.attend(LAYER, q, step)
    chosen = world.runtime.chosen[world.plan.group_of[LAYER]]
    starts = [tail_start(n, tail) if tail else n for n in lengths]
    if chosen.index is None:
        assert max(starts) <= (ceiling if p == 1 else floor)
        return
    read = []
    for b, (n, start) in enumerate(zip(lengths, starts)):
        sums = sums_of(weights_of(q[b, 0], k[b, :, :n]), granularity)
        lower, upper = fewest(sums, start, p, floor, ceiling)
        counts = chosen.counts[b].long()
        assert (lower <= counts).all() and (counts <= upper).all(), (lower, counts, upper)
        for one, own, count in zip(chosen.index[b], sums, counts.tolist()):
            assert_best(one[None, :count].long(), own[None, :start], count, f"sequence {b}")
        rows = [one[:count].tolist() for one, count in zip(chosen.index[b], counts.tolist())]
        read.append([[*own, *range(start, n)] for own in rows * (kv_heads // len(rows))])
        for head, own in enumerate(read[b]):
            v[b, head, [i for i in range(ROOM) if i not in own]] = float("nan")
    out = world.runtime.attend(LAYER, q, step)
    for b in range(len(lengths)):
        for head, own in enumerate(read[b]):
            which, some = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads), (k, v)
            some = tuple(t[b, head, own][None] for t in some)
            check_attention(out[b, :, which], q[b, :, which], some, [len(own)], 0.25, f"{b} {head}")


def test_a_step_counts_the_rows_that_its_lists_took_and_the_plan_the_most():
    method = OracleTopP(tokens=40, p=0.7, dense_layers=1, tail=64)
    world = world_of(method, (8, 2), [130], "auto", torch.float32, 3)
    before = world.runtime.rows_read(130)
    assert before[LAYER] == 40 + 66 and before[0] == 130
    world.runtime.attend(LAYER, world.queries() * 2, world.step(130))
    counts = world.runtime.chosen[0].counts[0].tolist()
    assert counts[0] != counts[1] and max(counts) < 40
    assert world.runtime.rows_read(130)[LAYER] == -(-sum(counts) // 2) + 66
    assert world.runtime.rows_read(129)[LAYER] == 40 + 65
    world.runtime.truncate(129)
    assert world.runtime.rows_read(130) == before
    rows = world.runtime.chosen_rows(LAYER)
    assert [(own >= 0).sum() for own in rows] == counts and rows.shape[1] == max(counts)
    needs = method.needs(world.plan, world.config, 131, 4)
    assert needs.selected == 40 and world.runtime.nbytes == needs.device_bytes


@pytest.mark.parametrize("offload", ["device", "host"])
def test_a_session_keeps_the_share_that_it_was_asked_for(offload):
    """By the engine's own meter, of lists that differ in length; on both tiers, to the same row."""
    method, seen = OracleTopP(tokens=200, p=0.9), []
    with llm_of().session(method, offload=offload) as session:
        session.prefill(random_ids(300))
        session.watch_with(Watch(every=1))
        for token in (3, 1, 4):
            session.decode(token)
            rows = session.runtime.rows_read(len(session))
            seen.append(rows)
            assert 0.9 <= session.watch.mass < 0.99 and max(rows[2:]) < 200
            lengths = [(session.runtime.chosen_rows(layer) >= 0).sum(1) for layer in range(2, 7)]
            assert any(len(set(some.tolist())) > 1 for some in lengths)
            for layer, some in zip(range(2, 7), lengths):
                assert rows[layer] == -(-int(some.sum()) // len(some))
        assert session.watch.lowest >= 0.9 and session.stats.sparse_steps == 3


def test_lists_of_different_lengths_come_from_host_memory_row_by_row():
    """Each row that some head chose once, and none for what stands behind a shorter list."""
    index = torch.full((1, 2, 9), -1, dtype=torch.int32)
    index[0, 0, :3], index[0, 1] = torch.tensor([0, 7, 90]), torch.arange(40, 130, 10)
    counts, start = torch.tensor([[3, 9]], dtype=torch.int32), torch.tensor([256])
    method = OracleTopK(tokens=30, granularity="kv_head")
    with (
        llm_of().session(method, offload="host") as far,
        llm_of().session(method, offload="device") as near,
    ):
        far.prefill(random_ids(300)), near.prefill(random_ids(300))
        before = far.stats.bytes_streamed
        found, (k, v) = far.bank.picked(3, index, counts, start, None), near.bank.kv(3)
        for part, whole in ((found.k, k), (found.v, v)):
            for head, count in enumerate((3, 9)):
                rows = part[0, head, found.index[0, head, :count].long()]
                assert torch.equal(rows, whole[0, head, index[0, head, :count].long()])
            tail = part[0, :, int(found.tail_start[0]) : int(found.stop[0])]
            assert torch.equal(tail, whole[0, :, 256:300])
        assert found.counts is counts and found.k.shape[2] == 3 + 9 - 1 + 44
        row = 2 * 2 * 16 * 4  # K and V of two heads in float32; no step has filled the ring yet
        assert far.stats.bytes_streamed - before == found.k.shape[2] * row


# ---------------------------------------------------------------- the bound


RIVALS = {
    "layer": (TidalDecode(tokens=24, select_layer=LAYER, correction_layer=3, gqa_reduce="all"),),
    "kv_head": (
        Quest(tokens=48, page=8, dense_layers=0),
        Quest(tokens=24, page=4, dense_layers=0, gqa_reduce="mean"),
        TidalDecode(tokens=24, select_layer=LAYER, correction_layer=3, gqa_reduce="max"),
    ),
    "query_head": (TidalDecode(tokens=24, select_layer=LAYER, correction_layer=3),),
}


def kept(world, q, n):
    """(rows per list, share of the attention of all heads that they have) of a step, in float64."""
    runtime, (group, _) = world.runtime, (world.plan.group_of[LAYER], world.runtime.attend)
    runtime.attend(LAYER, q, world.step(n))
    index, counts = runtime.chosen[group].rows()
    rows = index[0, :, : int(counts[0])].long()
    tail = torch.arange(int(runtime.tail_start(world.step(n))[0]), n).expand(len(rows), -1)
    rows = torch.cat([rows, tail], 1)
    weights = weights_of(q[0, 0], world.bank.kv(LAYER)[0][0, :, :n]).flatten(0, 1)
    mass = weights.gather(1, rows.repeat_interleave(len(weights) // len(rows), 0)).sum()
    return rows.shape[1], float(mass) / len(weights)


@given(
    st.sampled_from(GROUPS),
    st.sampled_from((97, 127, 130)),
    st.sampled_from([(name, rival) for name, some in RIVALS.items() for rival in some]),
    st.integers(0, 999),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_no_method_of_its_granularity_keeps_more(shape, n, rival, seed):
    """At the rows that it reads, on the same queries and keys; chance keeps less than both."""
    granularity, method = rival
    world = world_of(method, shape, [n], "auto", torch.float32, seed)
    q = world.queries() * 2
    rows, mass = kept(world, q, n)
    assert rows < n
    found = {}
    for cls in (OracleTopK, RandomTopK):
        bound = cls(tokens=rows, granularity=granularity, dense_layers=0)
        other = world_of(bound, shape, [n], "auto", torch.float32, seed)
        same, found[cls] = kept(other, q, n)
        assert same == rows and torch.equal(
            other.bank.kv(LAYER)[0][:, :, :n], world.bank.kv(LAYER)[0][:, :, :n]
        )
    assert found[OracleTopK] >= mass - 1e-6
    assert found[OracleTopK] > found[RandomTopK] + 0.05


# ---------------------------------------------------------------- chance


def draws(method, lengths, shape=(8, 2), layers=(1, 2), n=130):
    """{(length, layer): the lists} of one sequence, n rows of which each step sees a part."""
    world = World(method, shape, ROOM)
    found = {}
    for layer in layers:
        world.fill(layer, 0, n)
    for length in lengths:
        for layer in layers:
            world.runtime.attend(layer, world.queries(), world.step(length))
            index = world.runtime.chosen[world.plan.group_of[layer]].index
            found[length, layer] = index[0].clone()
    return found


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_chance_is_drawn_anew_by_step_layer_list_and_seed(granularity):
    method = RandomTopK(tokens=30, granularity=granularity, dense_layers=1)
    lengths = range(90, 130)
    one, two = draws(method, lengths), draws(method, lengths)
    assert all(torch.equal(one[at], two[at]) for at in one)
    other = draws(RandomTopK(tokens=30, granularity=granularity, dense_layers=1, seed=1), lengths)
    lists = [
        tuple(rows.tolist()) for some in (one, other) for index in some.values() for rows in index
    ]
    assert len(set(lists)) == len(lists) and {len(set(rows)) for rows in lists} == {30}
    # each token is as likely as any other: counts of the first 90 within 5 deviations
    share = [30 / length for length in lengths for _ in range(len(lists) // len(lengths))]
    counts = torch.bincount(torch.tensor(lists).flatten(), minlength=130)[:90].double()
    spread = sum(p * (1 - p) for p in share) ** 0.5
    assert (counts - sum(share)).abs().max() < 5 * spread


def test_two_lists_have_in_common_what_chance_gives():
    """A list's draw says nothing of the next one's, or of the next step's."""
    method = RandomTopK(tokens=30, granularity="query_head", dense_layers=1)
    found = draws(method, [120] + [121] * 1 + [*range(122, 130)])
    index = [found[at] for at in sorted(found)]
    pairs = [(a, b) for rows in index for a, b in zip(rows, rows[1:])]
    pairs += [(a[0], b[0]) for a, b in zip(index, index[2:])]
    common = [len({*a.tolist()} & {*b.tolist()}) for a, b in pairs]
    # 30 of some 125 twice: 7.2 in common, a deviation of 2 each
    assert abs(sum(common) / len(common) - 7.2) < 5 * 2 / len(common) ** 0.5 + 0.4


# ---------------------------------------------------------------- settings


def test_the_layers_that_choose_are_those_that_were_named():
    config = tiny_config(layers=7)
    assert OracleTopK().plan(config).sparse_layers == (2, 3, 4, 5, 6)
    assert OracleTopK(dense_layers=0).plan(config).sparse_layers == tuple(range(7))
    plan = OracleTopK(sparse_layers=(1, 4)).plan(config)
    assert plan.sparse_layers == (1, 4) and plan.roles[2] is Role.FULL


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(tokens=0), "tokens: found 0, expected"),
        (dict(share=0.0), "share: found 0.0"),
        (dict(granularity="head"), "granularity: found 'head', expected one of layer, kv_head"),
        (dict(dense_layers=-1), "dense_layers: found -1"),
        (dict(tail=63), "tail: found 63 under granularity 'layer', expected 0, or at least 64"),
        (dict(tail=64, granularity="query_head"), "tail: found 64 under granularity 'query_head'"),
        (dict(sparse_layers=(3, 1)), "sparse_layers: found (3, 1), expected ascending distinct"),
        (dict(sparse_layers=()), "sparse_layers: found ()"),
    ],
)
@pytest.mark.parametrize("cls", [OracleTopK, RandomTopK])
def test_settings_that_cannot_be(cls, given, said):
    with pytest.raises(SettingError, match=re.escape(said)) as found:
        cls(**given)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(p=0.0), "p: found 0.0, expected a number in (0, 1]"),
        (dict(p=1.5), "p: found 1.5, expected a number in (0, 1]"),
        (dict(p=float("nan")), "p: found nan"),
        (dict(floor=0), "floor: found 0, expected"),
        (dict(tokens=20, floor=21), "floor: found 21, above the ceiling of 20 tokens: lower it"),
        (dict(floor=4096), "floor: found 4096, above the ceiling of 2048 tokens"),
        (dict(granularity="query_head"), "granularity: found 'query_head', but lists of different"),
    ],
)
def test_shares_that_cannot_be(given, said):
    with pytest.raises(SettingError, match=re.escape(said)) as found:
        OracleTopP(**given)
    assert "\n" not in str(found.value)


def test_a_share_below_the_floor_is_refused_before_a_prompt_is_read():
    with llm_of().session(OracleTopP(share=0.1, floor=20)) as session:
        session.prefill(random_ids(250))
        session.truncate(0)
        said = "floor: found 20, above the ceiling of 19 tokens, share 0.1 of 199: lower it"
        with pytest.raises(SettingError, match=said):
            session.prefill(random_ids(199))


def test_layers_of_another_model():
    with pytest.raises(SettingError, match=r"found \(1, 9\), expected numbers from 0 to 6 \(the"):
        OracleTopK(sparse_layers=(1, 9)).plan(tiny_config(layers=7))
