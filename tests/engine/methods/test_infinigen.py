"""InfiniGen: turns, columns, guesses, counts and choices in float64, index by index.

Stops: a turn of another head, columns by queries alone, a threshold of the group or of another
head, counts rounded up or per head, a choice that knows the step's own token, queries of another
layer's input or turned to another position, queries that reach another session of a batch.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.forward.ahead.queries import foreseeing
from engine.forward.decode import step_together
from engine.methods.full import Full
from engine.methods.oracle.topk import OracleTopK
from engine.methods.select.varying.infinigen import InfiniGen
from engine.methods.select.varying.skew import skewed
from engine.model.rope import apply_rope
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened

LENGTHS = st.sampled_from((1, 2, 3, 63, 64, 65, 97, 127))
NEAR = 1e-5  # of two scores, or a score and the threshold: nearer ones may swap in float32


def turned(q, k):
    """The turn of one K/V head in float64, the best columns first: q [S, G, D], k [S, D]."""
    vectors = torch.linalg.svd(q.double().flatten(0, 1), full_matrices=False).Vh.mT
    sizes = (q.double() @ vectors).abs().sum((0, 1)) / q.shape[1]
    sizes += (k.double() @ vectors).abs().sum(0)
    return vectors[:, sizes.argsort(descending=True)]


def simulate(q, k, skew, method):
    """(rows [Hkv, ..] that are read of n tokens, the newest included, gap) of one sequence in
    float64. q [H, D]; k [Hkv, n - 1, D], what was there before; skew [Hkv, D, r].
    """
    heads, n, dim = k.shape
    if n == 0:
        return [[0]] * heads, math.inf
    below, gap = [], math.inf
    for head, group in enumerate(q.double().view(heads, -1, dim)):
        keys = k[head].double() @ skew[head].double()
        logits = torch.stack([keys @ (one @ skew[head].double()) / dim**0.5 for one in group])
        own = logits - logits.max(1, keepdim=True).values
        below.append(own.amax(0) if method.gqa_reduce == "max" else own.mean(0))
        gap = min(gap, float((below[-1] + method.alpha).abs().min()))
    wanted = sum(int((own > -method.alpha).sum()) for own in below) // heads
    room, rows = min(max(1, wanted), method.budget(0) - 1), []
    for own in below:
        order = own.argsort(descending=True, stable=True)
        if n > room:
            gap = min(gap, float(own[order[room - 1]] - own[order[room]]))
        rows.append([*order[:room].sort().values.tolist(), n])
    return rows, gap


@given(st.sampled_from(GROUPS), st.integers(5, 40), st.integers(0, 99))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_the_turn_keeps_logits_and_orders_columns_by_what_they_carry(shape, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(max(16, tokens), shape[0], 16, generator=generator)
    k = torch.randn(shape[1], len(q), 16, generator=generator)
    found, group = skewed(0, q, k).double(), shape[0] // shape[1]
    eye = torch.eye(16, dtype=torch.float64).expand_as(found)
    torch.testing.assert_close(found.mT @ found, eye, atol=1e-5, rtol=0)
    for head in range(shape[1]):
        wanted = turned(q[:, head * group : (head + 1) * group], k[head])
        # a singular vector's sign is free
        torch.testing.assert_close(found[head].abs(), wanted.abs(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((1, 4, 16)),
    st.sampled_from(("max", "mean")),
    st.sampled_from((0.3, 1.5, math.inf)),
    st.sampled_from((2, 24, 90)),
    st.integers(0, 99),
)
@settings(max_examples=12, derandomize=True, deadline=None)
def test_a_step_reads_what_the_layer_before_foresaw(
    backend, shape, lengths, columns, reduce, alpha, budget, seed
):
    """A ragged batch whose layer asks otherwise than was foreseen; rows that are not read are NaN
    once they are chosen.
    """
    method = InfiniGen(tokens=budget, columns=columns, alpha=alpha, gqa_reduce=reduce)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n - 1, b)
    foreseen, q, (k, v) = world.queries(), world.queries(), world.bank.kv(3)
    runtime, step = world.runtime, world.step(*lengths)
    runtime.end_prompt(max(lengths))
    runtime.begin_prompt(0, 1)
    skew = runtime.skew[2]
    found = [
        simulate(foreseen[b, 0], k[b, :, : n - 1], skew, method) for b, n in enumerate(lengths)
    ]
    assume(min(gap for _, gap in found) > NEAR)
    runtime.foresee(3, foreseen, step)
    for b, n in enumerate(lengths):
        world.fill(3, n - 1, n, b)
        for head, own in enumerate(found[b][0]):
            unread = sorted({*range(131)} - {*own})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, step)
    if max(lengths) - 1 < budget and alpha == math.inf or max(lengths) == 1:
        assert runtime.chosen[2].index is None
        return
    for b, n in enumerate(lengths):
        index, count = runtime.chosen[2].index[b], int(runtime.chosen[2].counts[b])
        assert [[*own[:count].tolist(), n - 1] for own in index] == found[b][0]
        for head in range(shape[0]):
            kv = head * shape[1] // shape[0]
            own = found[b][0][kv]
            weights = (q[b, 0, head].double() @ k[b, kv, own].double().T / 4).softmax(0)
            expected = weights @ v[b, kv, own].double()
            torch.testing.assert_close(out[b, 0, head].double(), expected, atol=1e-5, rtol=1e-5)
    assert runtime.rows_read(lengths[0])[3] == len(found[0][0][0])


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_with_all_columns_and_the_true_queries_it_is_the_oracle(shape, seed):
    """Of what was there before the step, by the best logit of a group; with one query head to a
    K/V head that is its attention.
    """
    world = World(InfiniGen(tokens=25, columns=16, alpha=math.inf), shape, 131, seed=seed)
    world.fill(3, 0, 113)
    q, k = world.queries(), world.bank.kv(3)[0]
    logits = q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :112].double().mT
    below = (logits - logits.amax(-1, keepdim=True)).amax(1)
    best = below.topk(24, dim=1).indices.sort(1).values
    world.runtime.end_prompt(113)
    world.runtime.attend(3, q, world.step(113))
    assert torch.equal(world.runtime.chosen_rows(3), best)
    if shape[0] == shape[1]:
        oracle = World(OracleTopK(tokens=24, granularity="kv_head"), shape, 131)
        for mine, theirs in zip(oracle.bank.kv(3), world.bank.kv(3)):
            mine.copy_(theirs)
        oracle.runtime.end_prompt(112)
        oracle.runtime.attend(3, q, oracle.step(112))
        assert torch.equal(oracle.runtime.chosen_rows(3), best)


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
# neighbours turn otherwise
CONFIG = replace(CONFIG, layer_ropes=(CONFIG.rope, replace(CONFIG.rope, theta=50.0)) * 2)
WEIGHTS = tiny_weights(CONFIG, seed=2)
SPARSE = InfiniGen(tokens=48, columns=3, alpha=0.2)


def model_of(**given):
    """An LLM whose sessions take the method under test."""
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50, **given)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_queries_are_what_the_layer_before_takes_through_this_layers_weights(backend, monkeypatch):
    """In float64, of every layer of a step; full attention hears nothing."""
    with model_of(backend=backend).session(SPARSE) as session:
        session.prefill(random_ids(90))
        halves, heard, taken = session.runner.halves, {}, {}
        before, foresee = type(halves).before, type(session.runtime).foresee

        def watched(self, number, x, *given):
            taken[number] = x.clone()
            return before(self, number, x, *given)

        def hears(self, layer, q, step):
            heard[layer] = q.clone()
            foresee(self, layer, q, step)

        monkeypatch.setattr(type(halves), "before", watched)
        monkeypatch.setattr(type(session.runtime), "foresee", hears)
        session.decode(7)
        model = session.runner.model
        assert sorted(heard) == [1, 2, 3] and not foreseeing([session.runner.dense_runtime])
        for layer, q in heard.items():
            cos, sin = session.loaded.rotary.at(torch.tensor([90]), layer=layer)
            norm, x = model.layers[layer - 1].input_norm.double(), taken[layer - 1].double()
            normed = x * (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).rsqrt() * norm
            weight = WEIGHTS[f"model.layers.{layer}.self_attn.q_proj.weight"].double()
            wanted = apply_rope((normed @ weight.T).float().view(1, 1, 8, -1), cos, sin)
            torch.testing.assert_close(q, wanted, atol=2e-5, rtol=2e-5)


def test_in_a_batch_each_session_hears_its_own():
    """Beside full attention and another length: the bits of each alone."""
    llm = model_of(backend="reference")
    with llm.session(SPARSE) as a, llm.session(Full()) as b, llm.session(SPARSE) as c:
        sessions, alone = (a, b, c), []
        for session, n in zip(sessions, (120, 97, 64)):
            session.prefill(random_ids(n, seed=n))
            alone.append(session.decode(5))
            session.truncate(n)
            session.runner.feed(5, n + 1)
            session.bank.before_step(n + 1)
        parts = [session.runner.step_of(True).sequence_step() for session in sessions]
        with torch.inference_mode():
            together = step_together(a.runner.model, a.runner.halves, parts)[0]
        assert a.runtime.rows_read(121)[1] < 48  # it really was sparse
        for mine, expected in zip(together, alone):
            assert torch.equal(mine, expected)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    with everything_happened(model_of(), SPARSE, away=70, offload="host") as (one, other):
        assert all(1 < rows <= 48 for rows in one.runtime.rows_read(260)[1:])
        assert torch.equal(one.runtime.skew, other.runtime.skew)


def test_what_it_keeps_is_a_few_columns():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = InfiniGen(tokens=100)
    plan = method.plan(config)
    found = {n: b.nbytes(2) for n, b in method.buffers(plan, config, 1600).items()}
    assert found["held"] == 5 * 1600 * 2 * 19 * 2  # bfloat16: 30% of 64 columns
    assert found["skew"] == 5 * 2 * 64 * 19 * 4 and found["logits"] == 8 * 1600 * 4
    assert sum(found.values()) == method.needs(plan, config, 1600, 2).device_bytes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(columns=0), "columns: found 0, expected an int >= 1"),
        (dict(alpha=0), "alpha: found 0, expected a number above 0"),
        (dict(alpha=math.nan), "alpha: found nan"),
        (dict(dense_layers=0), "dense_layers: found 0, expected an int >= 1: nothing comes before"),
        (dict(gqa_reduce="none"), "max, mean"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        InfiniGen(**bad)


def test_more_columns_than_a_head_has_are_refused():
    with pytest.raises(SettingError, match=r"columns: found 9, expected at most 8, the head dim"):
        InfiniGen(columns=9).plan(tiny_config(layers=2, heads=8, kv_heads=2))
