"""EM-LLM against its rule in float64: boundaries, what moves them, what stands for an event, and
what a step reads, index by index.

Stops: a threshold that knows the token itself or a window too long, an event that the next one's
boundary tears, neighbours of what was not chosen, a queue that keeps what has no room or forgets
between two steps, an index that depends on how a text came, a switch that reads blocks in silence.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.events.em_llm import EMLLM
from engine.plan.placement import part_bytes
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.events_simulation import Events, boundaries, refined
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.test_link_bytes import came, steps

NEAR = 1e-6  # of two scores: nearer ones may swap in float32
KINDS = (
    dict(sink=4, local=32, least=3, most=7, representatives=2, window=24, reach=1),
    dict(sink=0, local=34, least=1, most=17, representatives=1, window=5, gamma=0.2, reach=2),
    dict(sink=5, local=40, least=8, most=8, representatives=3, gamma=-1.0, contiguity=0.0),
    dict(sink=1, local=31, least=4, most=13, representatives=4, window=130, contiguity=0.6),
)
MEASURES = st.sampled_from(("modularity", "conductance", "none"))


def told(count, seed):
    """Surprises of a text: heavy-tailed, as a model's are."""
    draws = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return (-draws.log() * 2).tolist()


@given(
    st.sampled_from(KINDS),
    st.sampled_from((0, 1, 2, 7, 31, 32, 97, 300)),
    st.lists(st.integers(1, 90), max_size=6),
    st.integers(0, 99),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_boundaries_are_those_of_the_rule_however_a_text_comes(kind, n, parts, seed):
    """In parts of any length, and after a cut; and events partition the text."""
    method, each = EMLLM(**kind), told(n, seed)
    expected, gap = boundaries([float(torch.tensor(x)) for x in each], method)
    assume(gap > NEAR)
    text, at = method.boundaries(), 0
    for part in [*parts, n]:
        text.add(each[at : at + part])
        at = min(n, at + part)
        if part % 3 == 0:  # back, and on again
            text.cut(at := at // 2)
    text.add(each[text.known :])
    assert text.starts == expected and text.known == n
    sizes = [b - a for a, b in zip(text.starts, text.starts[1:])]
    assert all(method.least <= size <= method.most for size in sizes)
    assert n - text.starts[-1] < method.most


def test_a_huge_gamma_leaves_blocks_and_none_a_boundary_at_every_least():
    """Fixed blocks are InfLLM's and Quest's kin; what always surprises ends at the least size."""
    blocks = EMLLM(**KINDS[0], gamma=float("inf")).boundaries()
    blocks.add(told(60, 1))
    assert blocks.starts == list(range(4, 61, 7))
    shortest = EMLLM(**KINDS[0], gamma=float("-inf")).boundaries()
    shortest.add(told(60, 1))
    assert shortest.starts == list(range(4, 60, 3))


def filled(method, shape, n, seed, batch=1, backend="reference"):
    """A world of n tokens in layer 3, and the surprises that its runtime has heard."""
    world = World(method, shape, 331, batch=batch, backend=backend, seed=seed)
    world.fill(3, 0, n)
    return world, told(n, seed)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(st.sampled_from(GROUPS), st.sampled_from(KINDS), MEASURES, st.integers(0, 99))
@settings(max_examples=6, derandomize=True, deadline=None)
def test_steps_read_what_the_rule_says(backend, shape, kind, measure, seed):
    """Five steps of one answer, whose queue goes on; rows that are not read are NaN."""
    method = EMLLM(tokens=60, refine=measure, **kind)
    world, each = filled(method, shape, 260, seed, backend=backend)
    runtime, simulated = world.runtime, Events(method)
    group, (k, v) = world.plan.group_of[3], world.bank.kv(3)
    clean = [part.clone() for part in (k, v)]
    runtime.end_prompt(255)
    budget = runtime.k
    for n in range(255, 260):
        q = world.queries()
        rows = simulated.step(q[0, 0], clean[0][0, :, :n], each, n, budget)
        runtime.texts[0].add(each[runtime.texts[0].known : n - 1])
        runtime.learn(group, 3, world.bank, 0)
        gone = sorted({*range(n - method.local)} - {*rows})
        for part, whole in zip((k, v), clean):
            part.copy_(whole)
            part[:, :, gone] = float("nan")
        out = runtime.attend(3, q, world.step(n))
        assume(simulated.gap > NEAR)
        assert runtime.chosen_rows(3)[0].tolist() == rows
        assert len(rows) <= budget < n - method.local  # it really was sparse
        seen = [*rows, *range(n - method.local, n)]
        assert runtime.rows_read(n)[3] == len(seen) < n
        for head in range(shape[0]):
            kv = head * shape[1] // shape[0]
            own_k, own_v = (whole[0, kv, seen].double() for whole in clean)
            expected = (q[0, 0, head].double() @ own_k.T / 4).softmax(0) @ own_v
            torch.testing.assert_close(out[0, 0, head].double(), expected, atol=1e-5, rtol=1e-5)
        for part, whole in zip((k, v), clean):
            part.copy_(whole)
        runtime.commit(1)


@given(
    st.sampled_from(KINDS), MEASURES, st.lists(st.integers(1, 80), max_size=5), st.integers(0, 9)
)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_an_index_does_not_depend_on_how_it_is_made(kind, measure, parts, seed):
    """In parts, and of a sequence that is cut and goes on: the rule's boundaries, the same keys."""
    method, n = EMLLM(refine=measure, **kind), 250
    world, each = filled(method, (4, 2), n, seed, batch=2)
    runtime, fresh = world.runtime, method.runtime(world.runtime.setup)
    for at in [*parts, 120, n]:
        text = runtime.texts[1]
        text.add(each[text.known : text.known + at])
        runtime.learn(1, 3, world.bank, 1)
        if at == 120:
            runtime.truncate(max(0, text.known - 70))
    fresh.texts[1].add(each)
    fresh.learn(1, 3, world.bank, 1)
    count = fresh.made[1][1]
    assert count == runtime.made[1][1] == fresh.texts[1].whole > 5
    assert torch.equal(runtime.bounds[1, 1, : count + 1], fresh.bounds[1, 1, : count + 1])
    assert torch.equal(runtime.keys[1, 1, :count], fresh.keys[1, 1, :count])
    expected, gap = refined(world.bank.kv(3)[0][1, :, :n], fresh.texts[1].starts, method)
    assume(gap > NEAR)
    assert fresh.bounds[1, 1, : count + 1].tolist() == expected
    moved = sum(a != b for a, b in zip(expected, fresh.texts[1].starts))
    assert moved == 0 if measure == "none" or method.least == method.most else moved


def test_with_room_for_all_events_it_is_full_attention():
    method = EMLLM(tokens=331, **KINDS[0])
    for budget in (None, 331):
        world = World(replace(method, tokens=budget), (4, 2), 331, seed=1)
        world.fill(3, 0, 300)
        q = world.queries()
        world.runtime.end_prompt(300)
        out = world.runtime.attend(3, q, world.step(300))
        assert torch.equal(out, world.runtime.attend_dense(3, q, world.step(300)))


# ---------------------------------------------------------------- sessions

CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)
METHOD = EMLLM(tokens=60, sink=4, local=32, least=3, most=9, representatives=2, window=24)


def heard(llm, ids, answer):
    """-log p of a prompt's tokens 131 to 169, read one by one by full attention, and of the answer
    behind them.
    """
    with llm.session(Full()) as session:
        logits = [session.prefill(ids[:131]), *(session.decode(i) for i in ids[131:170])]
    logs = torch.stack([*logits, *answer]).log_softmax(-1)
    return [-logs[i, token].item() for i, token in enumerate(ids[131:190])]


@pytest.mark.parametrize("offload", ["device", "host"])
def test_a_session_hears_its_text_and_goes_back(tmp_path, offload):
    """A prompt in chunks and steps know the same surprises; cut, forked, saved and loaded sessions
    go on with the same bits as one that read it all in order.
    """
    llm, ids = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50), random_ids(230, seed=4)
    with llm.session(METHOD, offload=offload) as one, llm.session(METHOD, offload=offload) as other:
        for session in (one, other):
            session.prefill(ids[:170])
            answer = [session.decode(token) for token in ids[170:190]]
        for token in random_ids(9, seed=9):
            one.decode(token)
        one.truncate(181)  # in the answer: its queue, and the logits that score the next token
        for token, expected in zip(ids[181:190], answer[11:]):
            assert torch.equal(one.decode(token), expected)
        one.save(tmp_path / "session")
        (whole, _), (part, _) = (
            llm.restore(tmp_path / "session", offload=offload, tokens=n) for n in (190, 184)
        )
        assert one.runtime.queue.any() and torch.equal(whole.runtime.queue, one.runtime.queue)
        for token, expected in zip(ids[184:190], answer[14:]):
            assert torch.equal(part.decode(token), expected)
        with one.fork() as twin, whole, part:
            for token in ids[190:]:
                expected = other.decode(token)
                for session in (one, twin, whole, part):
                    assert torch.equal(session.decode(token), expected)
        assert one.stats.sparse_steps == one.stats.decode_steps > 0
        assert one.runtime.rows_read(230)[2] < 150
        mine, starts = one.runtime.texts[0].told.tolist(), one.runtime.texts[0].starts
        assert mine[0] == 0 and mine[131:190] == pytest.approx(heard(llm, ids, answer), abs=1e-4)
        assert starts == other.runtime.texts[0].starts
        assert len({b - a for a, b in zip(starts, starts[1:])}) > 3  # events, not blocks
        with pytest.raises(SettingError, match="found a session of 230 tokens that another"):
            one.set_method(Full())
            one.set_method(METHOD)


def test_the_link_brings_chosen_rows_once_and_a_prompt_no_more_than_planned():
    """Events are made while the prompt is read, the last ones by the first step. The window lies on
    the device, and so does what is not in host memory yet.
    """
    llm, ids, method = llm_of(SHAPES[0], backend="auto"), random_ids(301), METHOD
    plan = llm.plan(method, offload="host", max_context=320)
    layers, chunk, row = plan.placement.layers, 64, part_bytes(llm.config, 4)
    assert len(layers) == llm.config.num_layers
    with llm.session(method, offload="host") as session:
        session.prefill(ids)
        rows, past = came(session), sum(range(0, 301, chunk)) * len(layers)
        assert past < rows <= plan.prompt_link_bytes // row
        made = sum(each[0] for each in session.runtime.made)
        assert made > 20 * len(layers)
        for i, (there, rows) in enumerate(steps(session, 12)):
            chosen = [session.runtime.chosen_rows(layer)[0].tolist() for layer in layers]
            assert all(0 < len(own) <= 60 for own in chosen)  # it really was sparse
            wanted = sum(row < there for own in chosen for row in own)
            if i:
                assert rows == wanted <= plan.step_link_bytes // row
            else:
                assert wanted <= rows <= wanted + (chunk + 3 * method.most) * len(layers)
        assert sum(each[0] for each in session.runtime.made) > made


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(least=9, most=8), "most: found 8, expected an int >= 9"),
        (dict(least=2, representatives=3), "representatives: found 3, expected an int from 1 to 2"),
        (dict(local=255), "local: found 255, expected at least 256, two of the largest events"),
        (dict(gamma=float("nan")), "gamma: found nan"),
        (dict(contiguity=1.0), "contiguity: found 1.0, expected a number from 0 to below 1"),
        (dict(refine="cut"), "modularity, conductance, none"),
        (dict(reach=0), "reach: found 0"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        EMLLM(**bad)
