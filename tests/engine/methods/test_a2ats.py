"""A2ATS: keys without positions, codes by the error of logits and choices in float64, index by
index.

Stops: keys turned the wrong way or by another position, queries at their own distance, codes by
the distance of keys, a factor of another head or taken the wrong way round, a window that is coded.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.base import SAMPLED
from engine.methods.full import Full
from engine.methods.select.taught.a2ats import A2ATS, DAMPED
from tests.builders import GROUPS, World, random_sample, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened
from tests.engine.methods.test_pqcache import NEAR, assert_codes_choose, quantised

LENGTHS = st.sampled_from((1, 35, 36, 37, 64, 97, 127))


def turned(x, by):
    """x [n, D] of head_dim 16 turned by positions [n], in float64."""
    angles = by.double()[:, None] * 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    first, second = x.double().chunk(2, dim=1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


def simulate(q, k, factors, method):
    """(rows [Hkv, ..] that are read, gap) of one sequence. q [H, D]; k [Hkv, n, D]; factors [Hkv,
    D, D] float64.
    """
    n, budget, rows, gap = k.shape[1], method.budget(0), [], float("inf")
    if n < method.ready or n <= budget:
        return [[*range(n)]] * len(k), gap
    last, room = n - method.window, budget - method.window - method.sink
    for head, group in enumerate(q.view(k.shape[0], -1, q.shape[1])):
        keys = turned(k[head], -torch.arange(n))[method.sink :]
        coded, apart = quantised(keys @ factors[head], method.train, 2**method.bits, method.rounds)
        far = turned(group, torch.full((len(group),), method.distance - (n - 1)))
        logits = far @ (coded[: last - method.sink] @ factors[head].inverse()).T / 4
        score = logits.softmax(1).sum(0)
        order = score.argsort(descending=True, stable=True)
        gap = min(gap, apart)
        if len(order) > room:
            gap = min(gap, float(score[order[room - 1]] - score[order[room]]))
        best = (order[:room] + method.sink).sort().values.tolist()
        rows.append([*range(method.sink), *best, *range(last, n)])
    return rows, gap


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from(
        (
            dict(sink=4, bits=3, train=32, rounds=2, window=5, distance=300),
            dict(sink=0, bits=1, train=36, rounds=3, window=1, distance=0),
            dict(sink=3, bits=4, train=16, rounds=1, window=20, distance=2048),
        )
    ),
    st.sampled_from((9, 30)),
    st.integers(0, 99),
)
@settings(max_examples=8, derandomize=True, deadline=None)
def test_a_step_reads_what_codes_rank_first(backend, shape, lengths, how, budget, seed):
    """A ragged batch, of which one sequence may have no codebook yet; rows that are not read are
    NaN once they are in the index.
    """
    method = A2ATS(tokens=budget, dense_layers=0, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, k, runtime = world.queries(), world.bank.kv(3)[0], world.runtime
    runtime.begin_prompt(0, 1)
    factors = runtime.factors[3].double()
    found = [simulate(q[b, 0], k[b, :, :n], factors, method) for b, n in enumerate(lengths)]
    # a code of equal distance, as of centroids that are the same, may be either
    assume(min(gap for _, gap in found) > 10 * NEAR)
    assert_codes_choose(world, q, lengths, [rows for rows, _ in found])


@given(st.sampled_from(GROUPS), st.sampled_from((0, 77)), st.integers(0, 99))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_with_a_centroid_per_token_it_is_the_exact_top_k(shape, distance, seed):
    """Of logits at one distance, by the sum of their weights; of the tokens before the window."""
    how = dict(sink=0, bits=7, train=128, rounds=3, window=12, distance=distance)
    method = A2ATS(tokens=24, dense_layers=0, **how)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, 128)
    q, k = world.queries(), world.bank.kv(3)[0]
    far, sums = turned(q[0, 0], torch.full((shape[0],), distance - 127)), []
    for head, group in enumerate(far.view(shape[1], -1, 16)):
        keys = turned(k[0, head, :116], -torch.arange(116))
        sums.append((group @ keys.T / 4).softmax(1).sum(0))
    best = torch.stack(sums).topk(12, dim=1)
    assume(
        float((best.values[:, -1] - torch.stack(sums).topk(13, dim=1).values[:, -1]).min()) > 1e-5
    )
    world.runtime.end_prompt(128)
    world.runtime.attend(3, q, world.step(128))
    assert torch.equal(world.runtime.chosen_rows(3), best.indices[:, :12].sort(1).values)


@given(st.sampled_from(GROUPS), st.sampled_from((0, 300)))
@settings(max_examples=6, derandomize=True, deadline=None)
def test_the_factor_is_of_the_error_that_queries_see(shape, distance):
    """E (q k - q c)^2 over the sample, its queries turned to one distance, is |k L - c L|^2."""
    world = World(A2ATS(distance=distance, dense_layers=0), shape, 131)
    world.runtime.begin_prompt(0, 1)
    given = random_sample(world.config, "", lambda layer, q, k: q)[3]
    apart = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for head in range(shape[1]):
        asked = given.view(SAMPLED, shape[1], -1, 16)[:, head]
        errors = torch.stack(
            [turned(one, distance - torch.arange(SAMPLED)) @ apart.T for one in asked.unbind(1)]
        ).square()
        factor = world.runtime.factors[3, head].double()
        found = (apart @ factor).square().sum(1)
        size = asked.double().square().sum(2).mean() / 16
        wanted = errors.mean((0, 1)) + DAMPED * size * apart.square().sum(1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    method = A2ATS(tokens=60, bits=4, train=70, rounds=2, window=20)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, away=70, offload="device") as (one, _):
        assert one.runtime.rows_read(260) == [260, 60, 60, 60]


def test_what_it_keeps_is_a_byte_a_token_and_head():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = A2ATS(tokens=100)
    plan = method.plan(config)
    found = {n: b.nbytes(2) for n, b in method.buffers(plan, config, 1600).items()}
    assert found["codes"] == 5 * 2 * 1600 and found["factors"] == 5 * 2 * 64 * 64 * 4
    assert found["centroids"] == 5 * 2 * 256 * 64 * 4
    assert sum(found.values()) == method.needs(plan, config, 1600, 2).device_bytes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(bits=0), "bits: found 0"),
        (dict(window=0), "window: found 0"),
        (dict(distance=-1), "distance: found -1"),
        (dict(parts=2), "parts: found 2, expected an int from 1 to 1"),
        (dict(bits=5, train=20), "train: found 20"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        A2ATS(**bad)


def test_a_rotation_that_follows_the_length_is_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(SettingError, match="a2ats: this model.s rope is dynamic NTK"):
        A2ATS().plan(tiny_config(layers=2, heads=8, kv_heads=2, rope_scaling=scaling))
