"""XAttention: the blocks that each query head reads, attention over exactly those, and that a whole
model reads less and stays near.

Stops: a diagonal for an antidiagonal, a group of queries that sees keys ahead of it, a softmax over
blocks in place of groups, one list for a group's heads, a block too few for the threshold.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.prompts import xattention
from engine.methods.prompts.xattention import XAttention, taken
from engine.plan.prefill_time import PrefillFlops
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights

SPARSE = XAttention(threshold=0.5, stride=4, block=16)
CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=6, sharpness=2.0)
CHUNKS = ((0, 64), (32, 16), (48, 31), (45, 1), (37, 40), (63, 34), (0, 97), (61, 4))


def taken_by_rule(q, k, method, start, scale):
    """{first query of a block that chooses: (the older blocks that one head reads, the least gap to
    its threshold)} by loops over float64: q [C, D] at positions from `start` on, k [T, D].
    """
    stop, stride, block = start + len(q), method.stride, method.block

    def product(i, j):
        inside = start <= i < stop and j < stop
        return float(q[i - start] @ k[j]) if inside else 0.0

    found = {}
    for first, last, chooses in method.blocks(start, stop):
        if not chooses:
            continue
        own = first // block
        sums = [0.0] * (own + 1)
        for group in range(first // stride, -(-last // stride)):
            logits = []
            for keys in range(group + 1):
                anti = (
                    product(group * stride + stride - 1 - i, keys * stride + i)
                    for i in range(stride)
                )
                logits.append(sum(anti) * scale / stride)
            total = sum(math.exp(x - max(logits)) for x in logits)
            for keys, x in enumerate(logits):
                sums[keys * stride // block] += math.exp(x - max(logits)) / total
        wanted, read = method.threshold * sum(sums), sums[0] + sums[own]
        mine, gap = {0}, abs(read - wanted)
        for other in sorted(range(1, own), key=lambda n: (-sums[n], n)):
            if read >= wanted:
                break
            mine.add(other)
            read += sums[other]
            gap = min(gap, abs(read - wanted))
        apart = sorted(sums[1:own])
        gap = min([gap, *(b - a for a, b in zip(apart, apart[1:]))])
        found[first] = sorted(mine), gap
    return found


@given(
    st.sampled_from(GROUPS),
    st.sampled_from(CHUNKS),
    st.sampled_from((SPARSE, XAttention(0.3, stride=8, block=8), XAttention(0.9, 1, 16))),
    st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_each_query_head_takes_blocks_by_the_rule(shape, chunk, method, seed):
    """Block by block against loops in float64, where no gap is a tie to float32."""
    (heads, kv_heads), (start, count) = shape, chunk
    world = World(method, shape, 200, seed=seed)
    world.fill(1, 0, start + count)
    q, k = world.queries(count), world.bank.kv(1)[0]
    choosing = [b for b in method.blocks(start, start + count) if b[2]]
    if not choosing:
        return
    found = world.runtime.choose(q[0], k[0], start)
    for head in range(heads):
        rows = k[0, head // (heads // kv_heads)].double()
        given_ = q[0, :, head].double(), rows, method, start, world.runtime.scale
        for n, (first, (mine, gap)) in enumerate(taken_by_rule(*given_).items()):
            if gap > 1e-5:
                assert found[head, n].nonzero().flatten().tolist() == mine
            assert not found[head, n, first // method.block :].any()


@given(st.sampled_from(GROUPS), st.sampled_from(CHUNKS), st.sampled_from(("reference", "auto")))
@settings(max_examples=10, deadline=None)
def test_attention_over_what_each_head_keeps(shape, chunk, backend):
    """Against dense attention in float64 with the other blocks masked."""
    (heads, kv_heads), (start, count) = shape, chunk
    world = World(SPARSE, shape, 200, seed=3, backend=backend)
    world.fill(1, 0, start + count)
    q, (k, v) = world.queries(count), world.bank.kv(1)
    out = world.runtime.attend_prompt(1, q, world.bank, start)[0]
    blocks = [b for b in SPARSE.blocks(start, start + count) if b[2]]
    keep = world.runtime.choose(q[0], k[0], start) if blocks else None
    size, seen = SPARSE.block, torch.ones(heads, count, start + count, dtype=torch.bool).tril(start)
    for n, (first, last, _) in enumerate(blocks):
        older = keep[:, n, : first // size].repeat_interleave(size, 1)
        seen[:, first - start : last - start, : first // size * size] &= older[:, None]
    rows_k, rows_v = (
        t[0, :, : start + count].double().repeat_interleave(heads // kv_heads, 0) for t in (k, v)
    )
    logits = torch.einsum("chd,htd->hct", q[0].double(), rows_k) * world.runtime.scale
    weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
    expected = torch.einsum("hct,htd->chd", weights, rows_v)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    assert not blocks or world.runtime.past_read < world.runtime.past


def test_whole_blocks_of_128_go_by_the_block_sparse_kernel(monkeypatch):
    """And blocks that a chunk cuts by themselves: the same attention, to float32."""
    method, shape = XAttention(threshold=0.4), GROUPS[-1]
    world = World(method, shape, 800, seed=5)
    world.fill(1, 0, 700)
    q, found = world.queries(500), []
    for size in (xattention.BLOCK, 0):  # of no size: every block apart
        monkeypatch.setattr(xattention, "BLOCK", size)
        found.append(world.runtime.attend_prompt(1, q, world.bank, 200))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert 0 < world.runtime.past_read < world.runtime.past


def test_the_fewest_blocks_that_reach_the_threshold():
    """The first and the own one count before the others; of equal ones the older goes first."""
    sums = torch.tensor([[0.1, 0.2, 0.05, 0.2, 0.1, 0.35]])
    for threshold, expected in ((0.3, [0]), (0.46, [0, 1]), (0.7, [0, 1, 3]), (0.9, [0, 1, 3, 4])):
        assert taken(sums, threshold)[0].nonzero().flatten().tolist() == expected


def opened(method, **more):
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=1024, **more).session(method)


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_with_strides_of_one_the_estimate_is_the_attention(threshold):
    """So each head keeps the threshold of what its block gives, and one block less would not; as
    many blocks by chance keep less.
    """
    method, shape, start, count = XAttention(threshold, 1, 16), GROUPS[-1], 96, 64
    world, draw = World(method, shape, 200, seed=7), torch.Generator().manual_seed(0)
    world.fill(1, 0, start + count)
    q, k, group = 3 * world.queries(count)[0], world.bank.kv(1)[0][0], shape[0] // shape[1]
    keep, kept, chance = world.runtime.choose(q, k, start), [], []
    logits = torch.einsum(
        "chd,htd->hct", q.double(), k.double().repeat_interleave(group, 0)[:, :160]
    )
    ahead = torch.ones(count, start + count, dtype=torch.bool).triu(start + 1)
    weights = (logits * world.runtime.scale).masked_fill(ahead, -math.inf).softmax(-1)
    mass = weights.unflatten(2, (-1, 16)).sum(3).unflatten(1, (-1, 16)).mean(2)  # [H, blocks, keys]
    for n in range(count // 16):
        own = start // 16 + n
        for head in range(shape[0]):
            mine, taken_ = mass[head, n], keep[head, n, :own]
            read = float(mine[:own][taken_].sum() + mine[own])
            others = mine[1:own][taken_[1:]]
            assert read >= threshold - 1e-5
            assert not len(others) or read - float(others.min()) < threshold + 1e-5
            drawn = 1 + torch.randperm(own - 1, generator=draw)[: len(others)]
            kept.append(read)
            chance.append(float(mine[drawn].sum() + mine[0] + mine[own]))
    assert sum(kept) > 1.01 * sum(chance), (sum(kept), sum(chance))


def test_a_step_reads_everything_that_a_prompt_left_out():
    with opened(SPARSE) as session, opened(Full()) as dense:
        ids = random_ids(300, seed=1)
        assert (session.prefill(ids) - dense.prefill(ids)).abs().max() > 1e-3
        session.decode(3)
        assert session.runtime.rows_read(301) == [301] * 4


def test_work_is_counted():
    """All of it before a block has chosen, then as blocks have; a threshold of 1 is dense."""
    work = PrefillFlops.of(CONFIG)
    with opened(SPARSE) as session, opened(XAttention(threshold=1.0)) as whole:
        before = session.runtime.prompt_flops(work, 0, 600)
        session.prefill(random_ids(600, seed=1))
        after = session.runtime.prompt_flops(work, 0, 600)
        dense = whole.runtime.prompt_flops(work, 0, 600)
    assert after[1] < dense[1] < before[1] and after[0] == dense[0] == before[0]
    assert dense[1] == pytest.approx(work.parts(0, 600)[1])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(threshold=0.0), "threshold"),
        (dict(threshold=1.5), "threshold"),
        (dict(stride=0), "stride: found 0"),
        (dict(block=100), "block: found 100, expected a multiple of the stride of 16"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        XAttention(**bad)
