"""RocketKV: what a prompt's end keeps and which pages a step reads, in float64, index by index.

Stops: scores of another window or head, pooling beside a prompt's end, pages of rows that do not
follow each other in what was kept, a channel of another head, an exact token that competes, a
choice that does not follow the session back, onto a file or into a fork.
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.quest import Quest
from engine.methods.select.rocket import rocketkv
from engine.methods.select.rocket.rocketkv import RocketKV
from engine.plan.placement import part_bytes
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import SHAPES, everything_happened, llm_of
from tests.engine.methods.method_table import rows_by_head

LENGTHS = st.sampled_from((1, 8, 9, 31, 32, 33, 64, 97, 127, 131))
NEAR = 1e-6  # of two scores, relative: nearer ones may swap in float32


def first_stage(q, k, count, kernel, first):
    """(positions [Hkv, count], least gap) that stage 1 keeps of the `first` tokens. q [W, H, D]
    float64, the window at the end of k [Hkv, n, D].
    """
    window, heads, dim = q.shape
    n, kept, gap = k.shape[1], [], 1.0
    for head, rows in enumerate(k.double()):
        group = heads // len(k)
        sums = torch.zeros(n, dtype=torch.float64)
        for i in range(window):
            seen = n - window + i + 1
            for own in q[i, head * group : (head + 1) * group]:
                sums[:seen] += (rows[:seen] @ own / dim**0.5).softmax(0)
        past, side = n - window, kernel // 2
        pooled = [
            float(sums[max(0, i - side) : min(past, i + side + 1)].max()) for i in range(first)
        ]
        order = sorted(range(first), key=lambda i: (-pooled[i], i))
        edge = [pooled[i] for i in order[count - 1 : count + 1]]
        if len(edge) == 2 and edge[0] != edge[1]:
            gap = min(gap, (edge[0] - edge[1]) / edge[0])
        kept.append(sorted(order[:count]))
    return kept, gap


def second_stage(q, k, kept, method, channels, tail):
    """(positions of each head that a step chooses, least gap): q [H, D]; k [Hkv, n, D]; kept: of
    each head, ascending; positions behind them and below `tail` are in pages too.
    """
    chosen, gap = [], 1.0
    for head, own in enumerate(q.double().view(k.shape[0], -1, q.shape[1])):
        sizes = own.abs().sum(0).sort(descending=True)
        gap = min([gap, *(-sizes.values[channels - 1 : channels + 1].diff()).tolist()])
        best, scores = sizes.indices[:channels], []
        pages = [kept[head][i : i + method.page] for i in range(0, len(kept[head]), method.page)]
        for page in pages:
            rows = k[head, page].double()[:, best]
            bound = [
                sum(max(x * lo, x * hi) for x, lo, hi in zip(one[best], rows.amin(0), rows.amax(0)))
                for one in own
            ]
            bound = torch.tensor([float(x) for x in bound], dtype=torch.float64)
            how = {"max": bound.max(), "mean": bound.mean(), "sum": bound.sum()}
            scores.append(float(how[method.gqa_reduce]))
        order = sorted(range(len(pages)), key=lambda i: (-scores[i], i))
        count = method.budget(0) // method.page
        edge = [scores[i] for i in order[count - 1 : count + 1]]
        if len(edge) == 2:
            gap = min(gap, (edge[0] - edge[1]) / max(1e-9, abs(edge[0])))
        chosen.append(sorted(row for i in order[:count] for row in pages[i]))
    return chosen, gap


def with_queries(world, n):
    """Random queries of every layer in the ring, at the end of n tokens."""
    heads = world.config.num_heads
    ring = world.random(world.config.num_layers, world.batch, min(64, n), heads, 16)
    world.ring.write_chunk(ring, n)
    world.ring.set_valid(max(0, n - 64), n)


@given(
    st.sampled_from(GROUPS),
    st.integers(20, 131),
    st.sampled_from(
        (
            dict(window=8, kernel=1, page=4, keep=24),
            dict(window=1, kernel=5, page=7),
            dict(window=16, kernel=63, page=8),
        )
    ),
    st.integers(0, 99),
)
@settings(max_examples=12, derandomize=True, deadline=None)
def test_a_prompts_end_keeps_what_the_window_looks_at(shape, n, how, seed):
    method = RocketKV(tokens=8, **how)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, n)
    with_queries(world, n)
    step, k = world.step(n), world.bank.kv(3)[0][0, :, :n]
    world.runtime.end_prompt(n, step)
    first, count = method.candidates(n), method.kept(n, 8)
    assert count % method.page == first % method.page == 0 and 0 <= n - method.window - first
    if method.keep is None and count < first:
        assert (count - method.page) ** 2 < max(64, 8 * n) <= (count + 1) ** 2
    q = step.window_queries(3, min(method.window, n))[0].double()
    if count == first:
        assert world.runtime.counts == [first]
        return
    expected, gap = first_stage(q, k, count, method.kernel, first)
    assume(gap > NEAR)
    assert world.runtime.stayed[world.plan.group_of[3], 0, :, :count].tolist() == expected


@pytest.mark.parametrize(("backend", "at_once"), [("reference", 4096), ("auto", 8)])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from(
        (
            dict(window=8, page=4, keep=24, answer=3),
            dict(window=5, page=7, channels=16, answer=20, gqa_reduce="max"),
            dict(window=16, page=8, keep=999, channels=3, answer=1, gqa_reduce="mean"),
        )
    ),
    st.floats(0, 1),
    st.integers(0, 99),
)
@settings(max_examples=10, derandomize=True, deadline=None)
def test_a_step_reads_the_best_pages_of_what_was_kept(
    backend, at_once, shape, lengths, how, end, seed
):
    """A ragged batch of which some read everything; rows that are not read are NaN once they are in
    the pages.
    """
    method = RocketKV(tokens=16, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    runtime, group, found = world.runtime, world.plan.group_of[3], []
    q, (k, v) = world.queries(), world.bank.kv(3)
    budget, channels = method.budget(0), method.scored_channels(world.config)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
        ended = max(1, round(end * n))
        first, count = method.candidates(ended), method.kept(ended, budget)
        order = [torch.randperm(first, generator=world.generator)[:count] for _ in range(shape[1])]
        kept = torch.stack([own.sort().values for own in order]).int()
        stayed = kept[:, : count if count < first else 0].expand(4, -1, -1)
        runtime._take((budget, ended, stayed), b)
        tail = method.paged(ended, n)
        every = [own.tolist() + [*range(first, tail)] for own in kept]
        if count == first and len(every[0]) <= budget:
            found.append(([[*range(n)]] * shape[1], 1.0, 0))
            continue
        chosen, gap = second_stage(q[b, 0], k[b, :, :n], every, method, channels, tail)
        found.append(([own + [*range(tail, n)] for own in chosen], gap, tail))
    assume(min(gap for _, gap, _ in found) > NEAR)
    with patch.object(rocketkv, "AT_ONCE", at_once):
        runtime.learn(group, 3, world.bank, list(lengths))
    for b, (rows, _, _) in enumerate(found):
        for head, own in enumerate(rows):
            unread = sorted({*range(131)} - {*own})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    assert runtime.rows_read(lengths[0])[3] == len(found[0][0][0])
    chosen = runtime.chosen[group]
    for b, (rows, _, tail) in enumerate(found):
        if chosen.index is not None:
            for head, own in enumerate(rows):
                listed = chosen.index[b, head, : int(chosen.counts[b])].tolist()
                assert listed == [row for row in own if row < tail]
        for head in range(shape[0]):
            kv = head * shape[1] // shape[0]
            weights = (q[b, 0, head].double() @ k[b, kv, rows[kv]].double().T / 4).softmax(0)
            expected = weights @ v[b, kv, rows[kv]].double()
            torch.testing.assert_close(out[b, 0, head].double(), expected, atol=1e-5, rtol=1e-5)


@given(st.sampled_from(GROUPS), st.integers(50, 131), st.integers(0, 99))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_where_stage_1_keeps_all_and_every_channel_counts_it_is_quest(shape, n, seed):
    """Pages of the text by the bounds of all channels, the newest one beside them."""
    method = RocketKV(tokens=24, keep=999, page=8, window=1, channels=16, answer=1)
    quest = Quest(tokens=32, page=8, dense_layers=0, gqa_reduce="sum")
    one, two = (World(kind, shape, 131, seed=seed) for kind in (method, quest))
    for world in (one, two):
        world.fill(3, 0, n)
        world.runtime.end_prompt(n)
        world.runtime.attend(3, world.queries(), world.step(n))
    assert torch.equal(one.runtime.chosen_rows(3), two.runtime.chosen_rows(3))
    assert one.runtime.rows_read(n)[3] == two.runtime.rows_read(n)[3] < n


def test_buffers_are_declared_to_the_byte():
    """An eighth of K for the extremes of 16 tokens, and the geometric mean of budget and text."""
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    method = RocketKV(tokens=100)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1616).items()}
    assert found["low"] == found["high"] == 6 * 101 * 2 * 64 * 2
    assert found["stayed"] == 6 * 2 * 400 * 4  # sqrt(1616 * 96) = 393.9
    assert sum(found.values()) == method.needs(method.plan(config), config, 1616, 2).device_bytes


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)
METHOD = RocketKV(tokens=24, page=4, window=16, kernel=5, answer=24)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; over host memory, whose bits are the device's.
    """
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, METHOD, offload="host") as (one, _):
        assert one.runtime.counts[0] < METHOD.candidates(200)
        assert one.runtime.rows_read(260)[3] == 24 + 260 - METHOD.paged(200, 260)


def test_a_file_has_what_stage_1_kept(tmp_path):
    """The steps of a restored session have the bits of the one that was saved, far behind the
    window that chose.
    """
    llm = tiny_llm(METHOD, CONFIG, WEIGHTS, max_context=320, chunk=50)
    with llm.session(offload="host") as one:
        one.prefill(random_ids(150))
        for token in random_ids(90, seed=1):
            one.decode(token)
        one.save(tmp_path / "session")
        with llm.restore(tmp_path / "session", offload="host")[0] as other:
            for token in random_ids(3, seed=2):
                assert torch.equal(one.decode(token), other.decode(token))
            assert other.runtime.counts == one.runtime.counts != [METHOD.candidates(150)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda k, end, kept: (k, end, kept.flip(2)),
        lambda k, end, kept: (k, end, kept[:, :, 1:]),
        lambda k, end, kept: (k, end, kept[:1]),
        lambda k, end, kept: (k, end, kept.long()),
        lambda k, end, kept: (k, end, kept + end),
        lambda k, end, kept: (k, 10**6, kept),
        lambda k, end, kept: (-1, end, kept),
        lambda k, end, kept: (k, end, None),
    ],
)
def test_a_state_that_cannot_be_one_is_refused(spoil):
    world = World(METHOD, (4, 2), 131)
    for layer in range(4):
        world.fill(layer, 0, 120)
    with_queries(world, 120)
    world.runtime.end_prompt(120, world.step(120))
    state = world.runtime.state()
    assert torch.equal(world.runtime.restored(state, 125)[2], state[2]) and state[2].numel()
    with pytest.raises(ValueError, match="state"):
        world.runtime.restored(spoil(*state), 125)


@pytest.mark.parametrize(
    ("shape", "backend"), [(SHAPES[0], "reference"), (SHAPES[1], "auto"), (SHAPES[2], "auto")]
)
def test_a_step_brings_what_any_head_chose_once(shape, backend):
    """And no more than the plan promised; a prompt's end every layer once, to choose from."""
    llm = llm_of(shape, backend=backend)
    plan = llm.plan(METHOD, offload="host")
    part, layers = part_bytes(llm.config, 4), plan.placement.layers
    with llm.session(METHOD, offload="host") as session:
        session.prefill(random_ids(301))
        came = (len(layers) - 1) * (sum(range(0, 301, 64)) + 301) + 256 + 301
        assert session.stats.bytes_streamed == part * came or backend == "reference"
        whole = llm.plan(METHOD, offload="host", max_context=301)
        assert whole.prompt_link_bytes == part * came
        session.decode(5)  # has begun with the tails of the rings
        for token in random_ids(24, seed=1):
            there, came = session.bank.host_length, session.stats.bytes_streamed
            session.decode(token)
            declared, rows = rows_by_head(session.runtime, len(session)), 0
            for layer in layers:
                chosen = {row for own in declared[layer] for row in own}
                assert len(chosen) < len(session)  # it really was sparse
                rows += sum(row < there for row in chosen)
            assert session.stats.bytes_streamed - came == rows * part <= plan.step_link_bytes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=100, share=0.5), "at most one"),
        (dict(tokens=15), "tokens: found 15, expected at least a page of 16 tokens"),
        (dict(tokens=64, keep=63), "keep: found 63, expected at least the 64 tokens of a step"),
        (dict(keep=0), "keep: found 0"),
        (dict(window=65), "window: found 65"),
        (dict(kernel=4), "kernel: found 4, expected an odd number"),
        (dict(page=0), "page: found 0"),
        (dict(channels=0), "channels: found 0"),
        (dict(answer=0), "answer: found 0"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        RocketKV(**bad)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(channels=17), "channels: found 17, expected at most 16"),
        (dict(tokens=10**8), "tokens: found 100,000,000, expected at most"),
    ],
)
def test_settings_that_a_model_cannot_have_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        llm_of().plan(RocketKV(**bad))
