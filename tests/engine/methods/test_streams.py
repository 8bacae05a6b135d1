"""Streams without end: sinks and a window by position, in constant memory, past every limit.

The oracle is the float64 simulation of the papers' rules (evicting_simulation.py), which has all
tokens; the control a session with a large max_context. Stops: a distance that is off far from the
beginning, a row, a savepoint or a token id that stays for ever, a limit that still ends a stream, a
way back over what is gone.
"""

import gc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import LLM, Full, SamplingParams
from engine.base import newest_tokens
from engine.base.errors import ContextTooLong, SavedFileError, SettingError
from engine.base.newest_tokens import NewestTokens
from engine.load.planner import ENDLESS
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window
from engine.methods.registry import methods
from engine.model import rope
from engine.model.rope import Rotary, apply_rope
from tests.builders import GROUPS, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.method_checks import allocated
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
KINDS = {
    "streaming_llm": (StreamingLLM(tokens=24), Rule("streaming_llm", 24, sink=4)),
    "lm_infinite": (LMInfinite(tokens=24, sink=5), Rule("lm_infinite", 24, sink=5)),
    "window": (Window(tokens=24), Rule("lm_infinite", 24)),
}
each = pytest.mark.parametrize("name", KINDS)


def stream_llm(method, heads=(4, 2), chunk=16, positions=32, backend="reference", **settings):
    """An LLM of streams on a model that is made for few positions."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1], max_positions=positions)
    weights = tiny_weights(config, seed=sum(heads))
    given = dict(max_context=None, chunk=chunk, backend=backend, forever=True)
    return tiny_llm(method, config, weights, **{**given, **settings})


def turns(seed=0):
    """(prompt, answer) ids: lengths 1, a chunk and one beside it, primes, and several chunks."""
    sizes = ((1, 1), (15, 3), (16, 2), (17, 5), (53, 7), (1, 4), (3, 3))
    for turn, (prompt, answer) in enumerate(sizes):
        yield random_ids(prompt, seed=seed + turn), random_ids(answer, seed=seed - turn - 1 + 99)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("heads", GROUPS)
@each
def test_a_stream_is_the_papers_simulation_at_every_step(name, heads, backend):
    """Over three times what it holds (24 tokens and chunks of 16), and four times the positions
    that the model is made for.
    """
    method, rule = KINDS[name]
    llm = stream_llm(method, heads, backend=backend)
    weights = tiny_weights(llm.config, seed=sum(heads))
    oracle = Conversation(Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule)
    assert llm.planner.max_context == 40
    with llm.session() as session:
        for prompt, answer in turns():
            found = session.prefill(prompt).numpy()
            np.testing.assert_allclose(found, oracle.prompt(prompt), atol=1e-4)
            for token in answer:
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.step(token), atol=1e-4)
                for layer in range(LAYERS):
                    assert session.runtime.positions(layer) == oracle.kept(layer)
        assert len(session) == 131 > 3 * 40
        assert session.forgotten == 131 - 24
        assert session.runtime.rows_read(131) == [24] * LAYERS


def test_an_llm_of_streams_shares_its_weights():
    llm = stream_llm(StreamingLLM(tokens=24))
    again, finite = LLM.sharing(llm), LLM.sharing(llm, forever=False)
    assert again.max_context == ENDLESS and finite.max_context == 32 == llm.config.max_positions
    with again.session() as one, llm.session() as other:
        assert torch.equal(one.prefill(random_ids(90)), other.prefill(random_ids(90)))


@each
def test_a_stream_is_a_session_with_room_for_all(name):
    """Whose angles are products in float32: within its rounding at these positions."""
    method, _ = KINDS[name]
    llm = stream_llm(method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        large = LLM.sharing(llm, forever=False, max_context=4096, beyond=True)
    with llm.session() as stream, large.session(replace(method, forget=False)) as session:
        assert session.bank.nbytes > 20 * stream.bank.nbytes
        for turn in range(3):
            for prompt, answer in turns(turn):
                for ids in (prompt, *([token] for token in answer)):
                    mine, theirs = (
                        one.prefill(ids) if ids is prompt else one.decode(ids[0])
                        for one in (stream, session)
                    )
                    torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)


# ---------------------------------------------------------------- far away


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_two_tokens_are_turned_by_their_distance_wherever_they_stand(kind):
    """At the last positions of a stream too; float32 is a control that must fail there."""
    more = {
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
    }.get(kind, {})
    scaling = {"rope_type": kind, "original_max_position_embeddings": 64, **more}
    config = tiny_config(rope_scaling=scaling if more else ...)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64).float()

    def products(far, at):
        table, distances = Rotary(config, far=far), torch.tensor([0, 1, 7, 500])
        turned = [apply_rope(k, *table.at(torch.tensor([at])))]
        turned += [apply_rope(q, *table.at(at + d.view(1))) for d in distances]
        return torch.stack([(turned[0] * one).sum() for one in turned[1:]])

    near = products(True, 0)
    for at in (1000, 10**6, 16_777_217, ENDLESS - 600):
        torch.testing.assert_close(products(True, at), near, atol=2e-5, rtol=0)
    assert (products(False, 10**8) - products(False, 0)).abs().max() > 0.05


def moved(session, by):
    """Have a session stand `by` tokens further on, as if it had come there: all but the sinks have
    other positions, and keys turned to them.
    """
    rotary, sequence = Rotary(session.loaded.config, far=True), session.runtime.sequences[0]
    for (rows,) in sequence.layers:
        positions = rows.positions[0, : rows.held]
        newer = (positions >= getattr(session.method, "sink", 0)).nonzero().flatten()
        steps = torch.full((len(newer),), by)
        turned = rotary.rotate_by(rows.k[:, newer].transpose(0, 1), steps).transpose(0, 1)
        with torch.inference_mode():
            rows.k[:, newer] = turned
            rows.positions[:, newer] += by
    sequence.length, sequence.since = sequence.length + by, sequence.since + by
    session.committed = NewestTokens.of(by, b"others", session.ids)
    session.history.keep([])
    session.query_ring.set_valid(len(session), len(session))


@pytest.mark.parametrize("by", [1_048_576, ENDLESS // 4096 * 4096 - 4096])
@each
def test_a_stream_far_away_is_a_stream_at_its_beginning(name, by, monkeypatch):
    """Prompts and steps, near the last of all positions; angles in float32 must fail."""
    llm, ids = stream_llm(KINDS[name][0]), random_ids(60, seed=1)

    def logits(by):
        with llm.session() as session:
            session.prefill(ids)
            if by:
                moved(session, by)
            found = [session.decode(token) for token in random_ids(30, seed=2)]
            found.append(session.prefill(random_ids(40, seed=3)))
            return torch.stack([*found, session.decode(5)])

    near = logits(0)
    torch.testing.assert_close(logits(by), near, atol=1e-4, rtol=0)

    def rounded(positions, freq):
        angle = positions.unsqueeze(-1).float() * freq
        return angle.cos(), angle.sin()

    monkeypatch.setattr(rope, "_far_turns", rounded)
    assert (logits(by) - near).abs().max() > 1e-2


def test_a_stream_ends_where_positions_do():
    llm = stream_llm(StreamingLLM(tokens=24))
    assert llm.max_context == ENDLESS == 2**31 - 2**16
    with llm.session() as session:
        session.prefill(random_ids(60))
        moved(session, ENDLESS // 4096 * 4096 - 4096)
        session.prefill(random_ids(ENDLESS - len(session)))
        with pytest.raises(ContextTooLong, match="2147418113 tokens do not fit"):
            session.decode(1)


# ---------------------------------------------------------------- constant


def every_tensor():
    """Bytes of every tensor that is alive."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor)


@each
def test_a_stream_takes_as_much_at_4_000_tokens_as_at_1_000(name, monkeypatch):
    """Every tensor, the token ids and the notes of turns; within what the plan says."""
    monkeypatch.setattr(newest_tokens, "KEPT", 256)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    llm, sizes, seed = stream_llm(KINDS[name][0]), [], 0
    planned = {item: size for item, size, _ in llm.plan().items}
    names = ("context bank", "retained rows", "savepoints", "query ring")
    with llm.session() as session:
        for stop in (1000, 2000, 4000):
            while len(session) < stop:
                seed += 1
                session.prefill(random_ids(min(41, stop - len(session)), seed=seed))
                for token in random_ids(min(9, stop - len(session)), seed=seed):
                    session.decode(token)
            parts = [session.bank, session.runtime, session.history.savepoints, session.query_ring]
            held = allocated(parts)
            assert held <= sum(planned[name] for name in names) + 2048
            kept = len(session.history.savepoints), len(session.origins.of(0, stop))
            sizes.append((every_tensor(), held, kept[1]))
            assert kept[0] <= 12 and len(session.ids._held.ids) <= 256 + 64
        assert session.forgotten == 4000 - 24
    assert len(set(sizes)) == 1, sizes


def test_the_plan_of_a_stream_is_constant_and_says_so():
    llm = LLM("llama-3-8b-262k", forever=True, load=False, dtype="bfloat16", device="cpu")
    plan = llm.plan()
    assert plan.method == StreamingLLM(tokens=2048, forget=True)
    assert "without end, in constant memory: 2048 tokens of each layer stay" in str(plan)
    assert "reads     2048 rows of each layer in a step, at any length" in str(plan)
    assert "largest context" not in str(plan)
    beside = plan.total - plan.bytes_of("weights")
    long = LLM(
        "llama-3-8b-262k",
        method=plan.method,
        max_context=131072,
        load=False,
        dtype="bfloat16",
        device="cpu",
    ).plan()
    token_ids = plan.bytes_of("token ids")
    # scratch for a long bank: a part of attention for every 1,024 of its rows
    assert 0 <= long.total - plan.total + token_ids < 2**21
    assert beside < 1.4e9


# ---------------------------------------------------------------- ways back, files, copies, batches


@each
def test_going_back_is_exact_as_far_as_the_tokens_reach(name, monkeypatch):
    monkeypatch.setattr(newest_tokens, "KEPT", 128)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    llm, every = stream_llm(KINDS[name][0]), []
    with llm.session() as session:
        for prompt, answer in (*turns(), *turns(7)):
            session.prefill(prompt)
            every += prompt
            for token in answer:
                session.decode(token)
                every.append(token)
        assert session.ids == every and session.ids.first > 64
        reached = [p.length for p in session.history.savepoints if p.state is not None]
        assert len(reached) == 2 and reached[-1] == len(session) - 3
        with session.fork() as copy:
            assert copy.forgotten == session.forgotten
            for n in (len(every) - 1, reached[1], reached[0] + 1, reached[0]):
                copy.truncate(n)
                assert copy.ids == every[:n]
                with llm.session() as fresh:
                    at = 0
                    for prompt, answer in (*turns(), *turns(7)):
                        if at < n:
                            fresh.prefill(prompt[: n - at])
                        at += len(prompt)
                        for token in answer:
                            if at < n:
                                fresh.decode(token)
                            at += 1
                    expected = fresh.decode(7)
                with copy.fork() as again:
                    torch.testing.assert_close(again.decode(7), expected, atol=1e-5, rtol=0)
        for n in (1, session.ids.first - 1, reached[0] - 1):
            with pytest.raises(SettingError, match=f"expected {reached[0]:,} to 262, or 0"):
                session.truncate(n)
        assert session.ids == every
        last = session.decode(9)
        session.truncate(0)
        assert len(session) == 0 == session.ids.first
        with llm.session() as fresh:
            assert torch.equal(session.prefill([5, 6, 7]), fresh.prefill([5, 6, 7]))
        assert last is not None


def test_a_long_answer_leaves_no_way_back_and_says_so(monkeypatch):
    monkeypatch.setattr(newest_tokens, "KEPT", 128)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    llm = stream_llm(StreamingLLM(tokens=24))
    with llm.session() as session:
        session.prefill(random_ids(10))
        for token in random_ids(400):
            session.decode(token)
        with pytest.raises(SettingError, match="found 300, expected 410, or 0: this stream has"):
            session.truncate(300)
        (point,) = session.history.savepoints
        assert point.state is None and session.answer_length == 400
        before = session.decode(3)
        with session.fork() as copy:
            assert torch.equal(copy.decode(4), session.decode(4))
        assert before.shape == (97,)


def test_a_stream_is_saved_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(newest_tokens, "KEPT", 4096)
    llm, path = stream_llm(StreamingLLM(tokens=24), chunk=512), tmp_path / "stream"
    with llm.session() as session:
        for turn in range(12):
            session.prefill(random_ids(1000, seed=turn))
            session.decode(turn)
        assert session.ids.first == 4096
        session.save(path)
        assert path.stat().st_size < 400_000
        back, _ = llm.restore(path)
        with back:
            assert back.ids == session.ids and back.forgotten == session.forgotten
            assert torch.equal(back.fork().decode(7), session.fork().decode(7))
            back.truncate(len(back) - 1), session.truncate(len(back))
            assert torch.equal(back.decode(7), session.decode(7))
    large = LLM.sharing(llm, forever=False, max_context=20000, beyond=True)
    with pytest.raises(SavedFileError, match="has forgotten 4,096 of 12,012 tokens; load it with"):
        large.restore(path)


def test_a_saved_session_becomes_a_stream(tmp_path):
    llm, path = stream_llm(StreamingLLM(tokens=24)), tmp_path / "session"
    large = LLM.sharing(llm, forever=False, max_context=200, beyond=True)
    with large.session(StreamingLLM(tokens=24, forget=True)) as session:
        session.prefill(random_ids(150))
        session.decode(3)
        session.save(path)
        back, _ = llm.restore(path)
        with back:
            torch.testing.assert_close(back.decode(7), session.decode(7), atol=2e-4, rtol=0)
            assert isinstance(back.ids, NewestTokens)
            back.prefill(random_ids(400))


def test_streams_of_a_batch_go_on_past_what_they_hold():
    llm = stream_llm(StreamingLLM(tokens=24), backend="auto")
    batch, prompts = llm.batch(slots=2), [random_ids(n, seed=n) for n in (100, 37)]
    together, alone = [batch.session() for _ in prompts], [llm.session() for _ in prompts]
    for session, one, ids in zip(together, alone, prompts):
        session.prefill(ids), one.prefill(ids)
    for token in random_ids(60, seed=4):
        for session in together:
            batch.feed(session, token)
        found = batch.step()
        for session, one in zip(together, alone):
            torch.testing.assert_close(found[session], one.decode(token), atol=1e-4, rtol=0)


@each
def test_a_prompt_of_a_stream_may_be_read_in_parts(name, tmp_path):
    """As a server reads it beside the answers of others."""
    llm, ids = stream_llm(KINDS[name][0]), random_ids(150, seed=9)
    with llm.session() as parts, llm.session() as whole:
        for first, stop in ((0, 1), (1, 48), (48, 101)):
            parts.prefill(ids[first:stop], more=True)
            assert parts.bank.nbytes < whole.bank.nbytes + 16 * 256 * LAYERS
        with pytest.raises(SettingError, match=f"a prompt of {name} that goes on, expected its"):
            parts.save(tmp_path / "open")
        parts.prefill(ids[101:])
        torch.testing.assert_close(parts.last_logits, whole.prefill(ids), atol=1e-5, rtol=0)
        torch.testing.assert_close(parts.decode(4), whole.decode(4), atol=1e-5, rtol=0)
        assert parts.runtime.positions(1) == whole.runtime.positions(1)


def test_an_answer_does_not_end_at_what_is_held():
    llm = stream_llm(StreamingLLM(tokens=24))
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    done = llm.generate(random_ids(20), params)
    assert len(done.token_ids) == 300 and done.finish_reason == "length"


# ---------------------------------------------------------------- what cannot stream


@pytest.mark.parametrize(
    "name",
    sorted(set(methods()) - {*KINDS, "sirllm", "longformer", "window_recompute", "infllm"}),
)
def test_a_method_that_cannot_stream_is_refused_with_the_way_out(name):
    with pytest.raises(
        SettingError, match=f"forever: found {name}, which .*; use streaming_llm, lm_infinite or"
    ):
        stream_llm(methods()[name]())


def test_settings_that_grow_or_end_are_refused(tmp_path):
    with pytest.raises(SettingError, match="forever: found window, which has share=0.3, a budget"):
        stream_llm(Window(share=0.3))
    with pytest.raises(SettingError, match="forever: found streaming_llm, which holds a prompt"):
        stream_llm(StreamingLLM(official=True))
    with pytest.raises(SettingError, match="max_context: found 512 beside forever"):
        stream_llm(Window(tokens=24), max_context=512)
    with pytest.raises(SettingError, match="forever: found 'yes', expected True or False"):
        LLM(forever="yes", load=False)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(SettingError, match="meets dynamic rope here"):
        model = tiny_config(rope_scaling=dynamic)
        tiny_llm(Window(tokens=24), model, tiny_weights(model), forever=True)
    llm = stream_llm(StreamingLLM(tokens=24))
    with pytest.raises(SettingError, match="max_context: found 64 for a session that has no end"):
        llm.session(max_context=64)
    with pytest.raises(SettingError, match="forever: found snapkv"):
        llm.session(SnapKV(tokens=40))
    with llm.session() as session:
        session.prefill(random_ids(50))
        session.set_method(StreamingLLM(tokens=24))  # it is that already
        with pytest.raises(SettingError, match="method: found window in a stream of streaming_llm"):
            session.set_method(Window(tokens=24))
        with pytest.raises(SettingError, match="forever: found full"):
            session.set_method(Full())
    with llm.session(Window(tokens=200)) as session:  # holds more than the LLM's own
        session.prefill(random_ids(500))
        assert session.forgotten == 300


def test_a_store_beyond_the_models_positions_warns():
    with pytest.warns(UserWarning, match="further away than the 32 positions"):
        stream_llm(Window(tokens=40))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream_llm(Window(tokens=32))
