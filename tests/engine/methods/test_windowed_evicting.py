"""Methods that evict, on models some of whose layers slide: those layers stay as they are, and the
others evict.

Stops: a budget or a store of a layer that slides, a window that a cut, a way back, a copy or a file
has spoilt, queries run again over windows that are gone, bytes that the plan does not count.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine import LLM, Full
from engine.base.errors import SettingError
from engine.methods.evict.h2o import H2O
from engine.methods.evict.h2o_plus import H2OPlus
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.model.tensors import random_stream
from engine.plan.layers import Role
from engine.plan.needs import RING
from tests.builders import GROUPS, VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import allocated
from tests.engine.methods.method_table import CAPACITY, every, with_bank
from tests.engine.methods.official_simulation import Model, Shape
from tests.engine.methods.test_evicting_simulation import METHODS
from tests.engine.methods.test_forgetting import turns
from tests.engine.methods.test_newer_evicting import RULES
from tests.engine.methods.windowed_simulation import NewWindowedConversation, WindowedConversation

WINDOW, CHUNK = 24, 37
SLIDES = (0, WINDOW, WINDOW, 0)  # first and last see everything
FAR = 1e6  # base of their rope in the simulations
KINDS = (
    SnapKV(tokens=40, window=8),
    H2O(tokens=40),
    H2OPlus(tokens=40, segment=50),
    StreamingLLM(tokens=40),
)
# in which a gate or a score of every layer is needed
NOT_HERE = ("duo", "kvzip", "pod_snapkv", "razor")
# one of each method's settings in the table
ROWS = [
    (row, method)
    for name, row, method in every(lambda row: row.evicts and row.name not in NOT_HERE)
    if name.endswith("-0")
]
EACH = pytest.mark.parametrize("method", KINDS, ids=lambda method: method.name)


def sliding_config(windows=SLIDES, **changes):
    """A Llama some of whose layers slide."""
    given = dict(
        architectures=["MinistralForCausalLM"],
        model_type="ministral",
        sliding_window=max(windows),
        layer_types=["sliding_attention" if w else "full_attention" for w in windows],
    )
    return tiny_config(len(windows), **given | changes)


def two_ropes(config):
    """The model with a rope of another base where it sees everything, as Gemma 3 has."""
    far = replace(config.rope, theta=FAR)
    return replace(config, layer_ropes=tuple(config.rope if w else far for w in config.windows))


@pytest.fixture(scope="module")
def llm():
    """On the reference launchers, with rings that are shorter than its sessions."""
    stream = partial(random_stream, seed=3, sharpness=2.5)
    given = dict(device="cpu", backend="reference", max_context=2048, chunk=CHUNK)
    return LLM.from_stream(sliding_config(), stream, method=Full(), **given)


LONG, SECOND = 640, 736  # where the prompts of `turns` end, if the first is long


def assert_evicted(session):
    """Layers that see everything hold less than that, and those that slide their window."""
    n, read = len(session), session.runtime.rows_read(len(session))
    for layer, role in enumerate(session.plan.roles):
        heads = session.runtime.positions(layer)
        if role is Role.LOCAL:
            assert heads == [list(range(n - WINDOW, n))] * len(heads) and read[layer] == WINDOW
        else:
            assert role is Role.RETAINED and read[layer] < n
            assert all(len(head) < n for head in heads)


# ---------------------------------------------------------------- what is attended to

OLDER = ("h2o", "scissorhands", "streaming_llm", "lm_infinite", "snapkv", "ada_snapkv")
NEWER = ("rkv", "vase", "random_eviction", "random_eviction_all", "roco", "expected_attention")


SETTINGS = list(zip(GROUPS, ("reference", "auto", "auto"), (0, 0, 1)))


@pytest.mark.parametrize(
    ("name", "heads", "backend", "forget"),
    [(name, *given) for name in OLDER for given in SETTINGS]
    + [(name, *SETTINGS[at % 3]) for at, name in enumerate(NEWER)],
)
def test_rows_and_logits_are_the_simulations(name, heads, backend, forget):
    """Two turns: groups of 1, 4 and 8 query heads, and a window that both turns outgrow."""
    compare(name, sliding_config(heads=heads[0], kv_heads=heads[1]), backend, forget)


CAPPED = (*OLDER, "keyformer", "roco", "rkv", "vase")


@pytest.mark.parametrize(
    ("kind", "heads", "backend", "forget"),
    [("cap", GROUPS[0], "reference", 0), ("sinks", GROUPS[1], "auto", 1)],
)
@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_and_sinks_are_in_attention_and_in_scores(name, kind, heads, backend, forget):
    """A cap on logits as Gemma 2 has, and the sinks of gpt-oss."""
    config = sliding_config(heads=heads[0], kv_heads=heads[1])
    given = dict(score_cap=3.0) if kind == "cap" else dict(sinks=True)
    config = replace(config, block=replace(config.block, **given))
    compare(name, config, backend, forget)


def compare(name, config, backend, forget):
    """Hold two turns of a session to the simulation of that name."""
    newer, heads, block = name in NEWER, (config.num_heads, config.num_kv_heads), config.block
    method, rule = (RULES if newer else METHODS)[name]
    config = two_ropes(config)
    weights = tiny_weights(config, seed=sum(heads))
    sinks = [10 * w for key, w in weights.items() if key.endswith("sinks")]
    for number, one in enumerate(sinks):
        weights[f"model.layers.{number}.self_attn.sinks"] = one
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=CHUNK)
    model = Model(Shape(len(SLIDES), *heads, 64 // heads[0], 1e-5, FAR), weights)
    kind = NewWindowedConversation if newer else WindowedConversation
    sinks = [one.double().numpy() for one in sinks]
    assert len(sinks) == (len(SLIDES) if block.sinks else 0)
    oracle = kind(model, rule, SLIDES, config.rope.theta, block.score_cap, sinks)
    with llm.session(replace(method, forget=bool(forget))) as session:
        # each token once: values of one token are alike to float32, and only then a tie
        each = random.Random(1).sample(range(VOCAB), VOCAB)
        for turn, (prompt, answer) in enumerate(((57, 17), (13, 9))):
            ids, each = each[: prompt + answer], each[prompt + answer :]
            found = session.prefill(ids[:prompt]).numpy()
            np.testing.assert_allclose(found, oracle.prompt(ids[:prompt]), atol=1e-4)
            for token in ids[prompt:]:
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.step(token), atol=1e-4)
                for layer in range(len(SLIDES)):
                    assert session.runtime.positions(layer) == oracle.kept(layer), (turn, layer)
        assert session.bank.forgets == bool(forget) and session.stats.sparse_steps == 26
        assert_evicted(session)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row, _ in ROWS])
def test_a_budget_that_holds_everything_is_full_attention(llm, row):
    """To the bit but where the table says why not."""
    ids = random_ids(300)
    equal = partial(torch.testing.assert_close, atol=row.tolerance, rtol=row.tolerance)
    with llm.session(Full()) as full, llm.session(row.neutral) as session:
        equal(full.prefill(ids[:290]), session.prefill(ids[:290]))
        for token in ids[290:]:
            equal(full.decode(token), session.decode(token))
        assert session.plan.count(Role.RETAINED) == 2 and session.runtime.rows_read(300)[0] == 300
        assert 1.0 <= session.stats.resident < 1.05  # with room for tokens to come


@EACH
def test_a_bank_in_host_memory_answers_to_the_bit(llm, method):
    ids = random_ids(402, seed=5)
    method = with_bank(method)
    with llm.session(method) as session, llm.session(method, offload="host") as host:
        assert torch.equal(torch.stack(turns(session, ids)), torch.stack(turns(host, ids)))
        assert host.bank.tiered and host.bank.on_host(0) and not host.bank.on_host(1)
        assert_evicted(host)


def shared_llm():
    """Layers that read the rows of others, and windows with heads of their own, as Gemma 4 has."""
    config = replace(sliding_config(), row_layers=(0, 1, 1, 0), local_heads=(1, 24))
    weights = tiny_weights(config)
    return tiny_llm(Full(), config, weights, max_context=CAPACITY, backend="reference", chunk=64)


@EACH
def test_a_layer_that_reads_anothers_rows_has_a_store_of_its_own(method):
    llm, ids = shared_llm(), random_ids(402, seed=5)
    whole = replace(method, tokens=CAPACITY)
    with llm.session(Full()) as full, llm.session(whole) as session:
        assert torch.equal(torch.stack(turns(full, ids)), torch.stack(turns(session, ids)))
    with (
        llm.session(with_bank(method)) as kept,
        llm.session(replace(method, forget=True)) as session,
    ):
        assert torch.equal(torch.stack(turns(kept, ids)), torch.stack(turns(session, ids)))
        assert_evicted(session)
        first, last = (session.runtime.positions(layer) for layer in (0, 3))
        assert first != last or method.name == "streaming_llm"
        row = session.loaded.config.kv_bytes(4)
        assert session.bank.nbytes == session.bank.ring_bytes + 2 * row  # one layer writes rows
        assert held(session) <= planned(llm.plan(replace(method, forget=True)))


# ---------------------------------------------------------------- what is held


def held(session):
    """Bytes of every tensor of K, V, scores and queries to go back to, each counted once."""
    points = [session.history.savepoints, session.query_ring.kept]
    return allocated([session.bank, session.runtime, points])


ITEMS = ("context bank", "sliding windows", "retained rows", "savepoints")


def planned(plan, *names):
    """What the plan says of them."""
    names = names or ITEMS
    return sum(size for name, size, _ in plan.items if name in names)


@pytest.mark.parametrize("method", [pytest.param(method, id=row.name) for row, method in ROWS])
def test_a_session_that_forgets_answers_as_with_a_bank(llm, method):
    ids = random_ids(402, seed=5)
    with (
        llm.session(with_bank(method)) as kept,
        llm.session(replace(method, forget=True)) as session,
    ):
        expected, found = turns(kept, ids), turns(session, ids)
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=0)
        for one in (kept, session):
            assert_evicted(one)
            sizes = [one.bank.window_ring(layer) is None for layer in range(len(SLIDES))]
            assert sizes == [True, False, False, True]
        rings, row = session.bank.ring_bytes, session.loaded.config.kv_bytes(4)
        assert session.bank.nbytes == rings + 2 * 2 * row  # and a step's row, twice
        assert rings == kept.bank.ring_bytes == planned(llm.plan(method), "sliding windows")
        stores = sum(
            rows.kv_bytes for layer in session.runtime.sequences[0].layers for rows in layer
        )
        both = stores + 2 * WINDOW * row, 2 * (402 + WINDOW) * row
        assert session.stats.resident == kept.stats.resident == both[0] / both[1] < 0.6


@EACH
def test_the_plan_is_within_five_percent_of_what_a_full_session_holds(method):
    """Every tensor, before each commit, where most is held."""
    config = sliding_config()
    llm = tiny_llm(Full(), config, tiny_weights(config), max_context=CAPACITY, chunk=64)
    ids, sizes, method = random_ids(CAPACITY, seed=5), [], replace(method, forget=True)
    with llm.session(method) as session:
        commit = session.runtime.commit

        def look(count):
            sizes.append(held(session))
            commit(count)

        session.runtime.commit = look
        for first, stop in ((0, 64), (64, 65), (65, CAPACITY - 4)):
            session.prefill(ids[first:stop])
        for token in ids[-4:]:
            session.decode(token)
        most, due = max(sizes), planned(llm.plan(method))
    assert 0.95 * due <= most <= due + 128, (most, due)


# ---------------------------------------------------------------- ways back


@pytest.mark.parametrize("forget", [False, True])
@EACH
def test_going_back_is_exact_and_says_how_many_tokens_it_reads_again(llm, method, forget):
    """To places before and behind both prompts' ends, whose windows the rings still have."""
    method, ids = replace(method, forget=forget), random_ids(SECOND + 6, seed=5)
    with llm.session(method) as session:
        turns(session, ids, first=LONG)
        low = session.bank.window_ring(1).low
        assert 0 < low < LONG - WINDOW - RING
        for n in (SECOND + 5, SECOND - 3, LONG + 3):
            with session.fork() as copy, llm.session(method) as fresh:
                again = copy.tokens_again(n)
                copy.truncate(n)
                turns(fresh, ids, n, LONG)
                for token in (7, 8, 9):
                    found, expected = copy.decode(token), fresh.decode(token)
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                assert copy.runtime.positions(0) == fresh.runtime.positions(0)
                assert_evicted(copy)
            kept = max(point for point in (0, LONG, SECOND) if point <= n)
            if forget and method.name == "h2o":
                kept = 0  # no store before the first step
            assert again == n - kept, n


@pytest.mark.parametrize("forget", [False, True])
@EACH
def test_going_back_beyond_the_rings_reads_prompts_again(llm, method, forget):
    """A prompt's end is kept, but a second prompt has overwritten the windows before it."""
    method, ids, more = replace(method, forget=forget), random_ids(200), random_ids(5, seed=1)
    with llm.session(method) as session, llm.session(method) as fresh:
        session.prefill(ids)
        for token in more:
            session.decode(token)
        session.prefill(random_ids(LONG, seed=2))
        assert not session.bank.holds(200)
        assert session.tokens_again(203) == 203
        session.truncate(203)
        fresh.prefill(ids)
        for token in more[:3]:
            fresh.decode(token)
        for token in (7, 8, 9):
            torch.testing.assert_close(
                session.decode(token), fresh.decode(token), atol=1e-5, rtol=0
            )
        assert session.runtime.positions(3) == fresh.runtime.positions(3)
        assert session.tokens_again(203) == (203 if forget and method.name == "h2o" else 3)


def test_a_way_back_that_is_interrupted_begins_again(llm):
    """The rings are empty then, or hold a part of the text: no savepoint is to be trusted."""
    method, ids, more = SnapKV(tokens=40, window=8), random_ids(200), random_ids(5, seed=1)
    with llm.session(method) as session, llm.session(method) as fresh:
        session.prefill(ids)
        for token in more:
            session.decode(token)
        session.prefill(random_ids(LONG, seed=2))
        session.truncate(203, later=True)
        write, calls = session.bank.write_chunk, []

        def stop(*given):
            calls.append(given)
            if len(calls) == 6:
                raise KeyboardInterrupt
            write(*given)

        session.bank.write_chunk = stop
        with pytest.raises(KeyboardInterrupt):
            session.decode(7)
        del session.bank.write_chunk
        fresh.prefill(ids)
        for token in more[:3]:
            fresh.decode(token)
        for token in (7, 8, 9):
            torch.testing.assert_close(
                session.decode(token), fresh.decode(token), atol=1e-5, rtol=0
            )


@EACH
def test_a_store_is_saved_with_its_windows(llm, method, tmp_path):
    method, ids = replace(method, forget=True), random_ids(402, seed=5)
    with llm.session(method) as session:
        turns(session, ids)
        session.save(tmp_path / "s")
        wanted = [session.decode(token) for token in range(30)]
    restored, _ = llm.restore(tmp_path / "s")
    with restored:
        assert_evicted(restored)
        assert all(torch.equal(restored.decode(token), one) for token, one in enumerate(wanted))
        restored.truncate(399)
        assert restored.ids == ids[:399]


def test_a_switch_reads_again_only_what_the_windows_have_lost(llm):
    """SnapKV wants the newest queries, which the rings can compute again; H2O wants them all."""
    ids = random_ids(900, seed=5)
    for method, again in ((SnapKV(tokens=40, window=8), 0), (H2O(tokens=40), 900)):
        for forget in (False, True):
            method = replace(method, forget=forget)
            with llm.session(Full()) as session, llm.session(method) as fresh:
                session.prefill(ids)
                fresh.prefill(ids)
                assert session.reads_again(method) == again
                session.set_method(method)
                assert session.bank.forgets == forget
                for token in (7, 8, 9):
                    found, expected = session.decode(token), fresh.decode(token)
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
                assert session.runtime.positions(3) == fresh.runtime.positions(3)
                assert_evicted(session)
                session.truncate(300)
                fresh.truncate(300)
                found, expected = session.decode(7), fresh.decode(7)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@EACH
def test_sessions_of_a_batch_answer_as_alone(method):
    config, prompts = sliding_config(), [random_ids(n, seed=n) for n in (90, 131)]
    llm = tiny_llm(method, config, tiny_weights(config), max_context=CAPACITY, chunk=64)
    alone = [llm.session() for _ in prompts]
    with llm.batch(slots=2) as batch:
        both = [batch.session() for _ in prompts]
        for one, ids in zip((*alone, *both), 2 * prompts):
            one.prefill(ids)
        for token in (7, 8, 9):
            for one in both:
                batch.feed(one, token)
            found = batch.step()
            for one, other in zip(both, alone):
                torch.testing.assert_close(found[one], other.decode(token), atol=1e-5, rtol=0)
        for one in both:
            assert_evicted(one)


# ---------------------------------------------------------------- refusals


def test_a_model_that_slides_in_every_layer_has_nothing_to_evict():
    config = sliding_config((WINDOW,) * 4)
    llm = tiny_llm(Full(), config, max_context=CAPACITY)
    line = "snapkv: evicts in layers that see every token, found none: every layer of this model"
    with pytest.raises(SettingError, match=line):
        llm.session(SnapKV())


def test_distances_are_not_clipped_where_layers_that_evict_have_different_ropes():
    config = sliding_config()
    far = replace(config.rope, theta=FAR)
    config = replace(config, layer_ropes=(config.rope, far, far, far))
    llm = tiny_llm(Full(), config, tiny_weights(config), max_context=CAPACITY)
    for method in (StreamingLLM(), LMInfinite()):
        with pytest.raises(SettingError, match="clips distances, found layers with different rop"):
            llm.session(method)
    with llm.session(SnapKV()) as session:
        assert session.plan.count(Role.RETAINED) == 2


def test_streams_are_for_models_without_windows():
    config = sliding_config()
    with pytest.raises(SettingError, match="forever: found streaming_llm, which has no stream"):
        tiny_llm(StreamingLLM(tokens=40), config, tiny_weights(config), forever=True)
