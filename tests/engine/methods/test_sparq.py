"""SparQ: channels, tokens, weights and means of the paper's Algorithm 1 in float64, index by index.

Stops: channels of another head or of the sign, a temperature that forgets the channels left out,
newest tokens that compete, a weight over the chosen tokens only, a mean that misses a row or keeps
one that was cut away, a copy of K that does not follow the bank.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.index.sparq import SparQ
from engine.methods.select.index.value_sums import BLOCK, ValueSums
from tests.builders import GROUPS, World, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 63, 64, 65, 97, 127))


def simulate(q, k, v, budget, r, how="sum"):
    """Algorithm 1 for one sequence in float64: (rows [Hkv, at most budget], out [H, D], gap).

    q [H, D]; k, v [Hkv, n, D]. gap: between the last score taken and the next.
    """
    q, k, v = q.double(), k.double(), v.double()
    heads, n, dim = k.shape
    newest, rows, out, gap = budget // 4, [], [], math.inf
    for head, group in enumerate(q.view(heads, -1, dim)):
        channels = group.abs().sum(0).argsort(descending=True)[:r]
        logits = []
        for one in group:
            part = one[channels].abs().sum() / one.abs().sum()
            logits.append(k[head][:, channels] @ one[channels] / (dim * part).sqrt())
        logits = torch.stack(logits)
        score = {"sum": logits.sum(0), "max": logits.amax(0), "mean": logits.mean(0)}[how].clone()
        score[max(0, n - newest) :] = math.inf
        order = score.argsort(descending=True, stable=True)
        taken = order[:budget].sort().values
        if n > budget:
            gap = min(gap, float(score[order[budget - 1]] - score[order[budget]]))
        rows.append(taken.tolist())
        for one, estimate in zip(group, logits):
            alpha = estimate.softmax(0)[taken].sum()
            exact = (k[head][taken] @ one / dim**0.5).softmax(0) @ v[head][taken]
            out.append(alpha * exact + (1 - alpha) * v[head].mean(0))
    return rows, torch.stack(out), gap


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((1, 4, 13, 16)),
    st.sampled_from(("sum", "max", "mean")),
    st.sampled_from((2, 13, 40)),
    st.integers(0, 99),
)
@settings(max_examples=20, derandomize=True)
def test_a_step_is_algorithm_one(backend, dtype, shape, lengths, r, reduce, budget, seed):
    """A ragged batch; rows that are not read are NaN once they are in the index."""
    method = SparQ(tokens=budget, r=r, gqa_reduce=reduce)
    world = World(method, shape, 131, batch=2, backend=backend, dtype=dtype, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    found = [
        simulate(q[b, 0], k[b, :, :n], v[b, :, :n], budget, r, reduce)
        for b, n in enumerate(lengths)
    ]
    assume(min(gap for _, _, gap in found) > 1e-5)
    runtime = world.runtime
    runtime.end_prompt(max(lengths))
    runtime.learn(3, 3, world.bank, list(lengths))
    for b, (rows, _, _) in enumerate(found):
        for head, own in enumerate(rows):
            unread = sorted({*range(131)} - {*own, lengths[b] - 1})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    for b, (rows, expected, _) in enumerate(found):
        error = 2e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(out[b, 0].double(), expected, atol=error, rtol=error)
        assert runtime.rows_read(lengths[b])[3] == len(rows[0])
    if max(lengths) > budget:
        tail = int(runtime.tail_start(world.step(*lengths))[0])
        read = [[*own, *range(tail, lengths[0])] for own in runtime.chosen_rows(3).tolist()]
        assert read == found[0][0]


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=15, derandomize=True)
def test_with_all_channels_it_is_the_exact_top_k(shape, seed):
    """And the weight is the attention that those tokens have."""
    world = World(SparQ(tokens=24, r=16), shape, 131, seed=seed)
    world.fill(3, 0, 113)
    q, (k, _) = world.queries(), world.bank.kv(3)
    heads = shape[1]
    logits = (q[0, 0].double().view(heads, -1, 16) @ k[0, :, :113].double().mT) / 4
    best = logits.sum(1)[:, :107].topk(18, dim=1).indices.sort(1).values
    world.runtime.end_prompt(113)
    world.runtime.attend(3, q, world.step(113))
    assert torch.equal(world.runtime.chosen_rows(3), best)
    read = torch.cat([best, torch.arange(107, 113).expand(heads, -1)], 1)
    mass = logits.softmax(-1).gather(2, read[:, None].expand(-1, logits.shape[1], -1)).sum(-1)
    torch.testing.assert_close(world.runtime.weights[3, 0].double(), mass.flatten())
    assert float(mass.max()) < 0.99


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(1, 150),
    st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_means_follow_the_text_wherever_it_goes(moves, piece, seed):
    """Cut anywhere and read on, in pieces of any length: the same bits as in one piece."""
    generator = torch.Generator().manual_seed(seed)

    def sums():
        parts = ValueSums.buffers(2, 1, 2, 300, 4)
        return ValueSums(*(torch.full(b.shape, float("nan"), dtype=b.dtype) for b in parts))

    one, rows, before = sums(), torch.zeros(2, 300, 4), 0
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        rows[:, kept:n] = torch.randn(2, n - kept, 4, generator=generator)
        first = one.begins(1, 0, kept)
        assert first == kept or kept - BLOCK < first < kept
        for at in range(first, n, piece):
            one.add(1, 0, at, rows[:, at : min(n, at + piece)])
        fresh = sums()
        fresh.add(1, 0, 0, rows[:, :n])
        for length in {n, max(first + 1, n - 63)}:
            mean = one.mean(1, 0, length)
            torch.testing.assert_close(mean, rows[:, :length].double().mean(1))
        assert torch.equal(one.mean(1, 0, n), fresh.mean(1, 0, n))
        before = n


def test_what_it_keeps_is_a_second_k_and_a_few_sums():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = SparQ(tokens=100)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1600).items()}
    assert found["by_channel"] == 6 * 1600 * 2 * 64 * 2  # bfloat16
    assert found["blocks"] == 6 * 2 * 64 * 8 * 26 and found["prefix"] == 6 * 2 * 64 * 8 * 64
    assert found["logits"] == 8 * 1600 * 4 and found["index"] == 6 * 2 * 75 * 4
    assert sum(found.values()) == method.needs(method.plan(config), config, 1600, 2).device_bytes
    without = SparQ(tokens=100, mean=False)
    assert "blocks" not in without.buffers(without.plan(config), config, 1600)


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_turns_truncates_forks_and_other_methods_change_nothing(offload):
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; cut by more than a block too.
    """
    method = SparQ(tokens=48, r=4)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, away=70, offload=offload) as (one, _):
        assert one.runtime.rows_read(260) == [48] * 4


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(r=0), "r: found 0"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
        (dict(dense_layers=-1), "dense_layers"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        SparQ(**bad)


def test_more_channels_than_a_head_has_are_refused():
    with pytest.raises(SettingError, match=r"r: found 9, expected at most 8, the head dimension"):
        SparQ(r=9).plan(tiny_config(layers=2, heads=8, kv_heads=2))
