"""Re-computation: every logits are full attention's to the newest tokens as a text of their own.

Stops: a row that outlives its step, a position that is not counted from the window's beginning, a
token too many or too few, a way of a session (back, fork, file, stream, switch) that loses tokens.
"""

from dataclasses import replace

import pytest
import torch

from engine import Full, WindowRecompute
from engine.bank.device import DeviceBank
from engine.base.errors import SettingError
from engine.methods.evict.streaming_llm import StreamingLLM
from tests.builders import GROUPS, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.test_windowed_evicting import sliding_config

W = 24
METHOD = WindowRecompute(tokens=W)


def made(heads=(4, 2), config=None, **settings):
    """An LLM of three layers, chunks shorter than the window."""
    config = config or tiny_config(layers=3, heads=heads[0], kv_heads=heads[1])
    given = dict(max_context=256, backend="reference", chunk=16) | settings
    return tiny_llm(Full(), config, tiny_weights(config, seed=sum(heads)), **given)


def dense(llm, ids):
    """Full attention's logits behind a text."""
    with llm.session(Full()) as session:
        return session.prefill(ids)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("heads", GROUPS)
def test_it_is_a_dense_model_run_on_the_newest_tokens(heads, backend):
    """To the bit, in prompts and answers: lengths 1, the window and one beside it, primes."""
    llm, ids = made(heads, backend=backend), []
    with llm.session(METHOD) as session:
        for turn, (prompt, answer) in enumerate(((1, 2), (W - 4, 3), (1, 1), (53, 3), (W + 1, 2))):
            new = random_ids(prompt + answer, seed=turn)
            ids += new[:prompt]
            assert torch.equal(session.prefill(new[:prompt]), dense(llm, ids[-W:]))
            for token in new[prompt:]:
                ids.append(token)
                assert torch.equal(session.decode(token), dense(llm, ids[-W:]))
        n = len(ids)
        assert session.runtime.rows_read(n) == [W] * 3 and n > 4 * W
        assert session.stats.sparse_steps == session.stats.decode_steps == 11


def test_one_token_more_is_noticed():
    """The control of the test above."""
    llm, ids = made(), random_ids(90)
    with llm.session(METHOD) as session:
        assert not torch.equal(session.prefill(ids), dense(llm, ids[-W - 1 :]))


@pytest.mark.parametrize("kind", ["slides", "cap", "sinks"])
def test_windows_of_the_models_own_caps_and_sinks_are_the_dense_models(kind):
    config = sliding_config((0, 8, 8, 0))
    more = dict(cap=dict(score_cap=3.0), sinks=dict(sinks=True)).get(kind, {})
    llm = made(config=replace(config, block=replace(config.block, **more)))
    ids = random_ids(60)
    with llm.session(METHOD) as session:
        assert torch.equal(session.prefill(ids), dense(llm, ids[-W:]))
        for token in random_ids(3, seed=1):
            ids.append(token)
            assert torch.equal(session.decode(token), dense(llm, ids[-W:]))
        session.truncate(40)
        assert torch.equal(session.decode(7), dense(llm, [*ids[40 - W + 1 : 40], 7]))


def test_no_row_survives_a_step(monkeypatch):
    """A bank lives as long as its step, and has the window's rows; the session's has none. The plan
    says so, to the byte, and has no cut and no store to go back to.
    """
    made_banks, init = [], DeviceBank.__init__

    def counted(self, config, plan, capacity, *rest, **more):
        init(self, config, plan, capacity, *rest, **more)
        made_banks.append((capacity, self.nbytes))

    llm, method = made(), WindowRecompute(tokens=64)  # a whole number of a bank's blocks
    each = 3 * llm.config.kv_bytes(4)
    with llm.session(method) as session:
        monkeypatch.setattr(DeviceBank, "__init__", counted)
        before = session.bank.nbytes
        session.prefill(random_ids(100))
        assert made_banks == [(64, 64 * each)]  # a prompt of seven chunks is encoded once
        session.decode(5)
        assert len(made_banks) == 2 and len(set(made_banks)) == 1
        assert session.bank.nbytes == before == 2 * each  # a step's row of each layer, held twice
    plan = llm.plan(method)
    assert "O(w^2) a step" in str(plan)
    assert (plan.bytes_of("context bank"), plan.bytes_of("retained rows")) == (before, 64 * each)
    assert not {"cut of a layer", "savepoints"} & {name for name, *_ in plan.items}


def test_going_back_forks_and_files(tmp_path):
    llm, ids = made(), random_ids(80)
    answer = random_ids(6, seed=1)
    with llm.session(METHOD) as session:
        session.prefill(ids)
        session.save(tmp_path / "one")
        copies = [session.fork(), llm.restore(tmp_path / "one")[0]]
        expected = torch.stack([session.decode(token) for token in answer])
        session.truncate(80)
        for one in (session, *copies):
            assert torch.equal(torch.stack([one.decode(token) for token in answer]), expected)
        session.truncate(83)
        session.refresh_logits()
        assert torch.equal(session.last_logits, expected[2])
        session.truncate(37)  # in the middle of the prompt
        assert session.tokens_again(37) == 0 and session.ids == ids[:37]
        assert torch.equal(session.decode(3), dense(llm, [*ids[37 - W + 1 : 37], 3]))
        session.prefill(ids[:5], more=True)
        assert torch.equal(session.prefill(ids[5:9]), dense(llm, session.ids[-W:]))


def test_an_interrupted_step_leaves_the_session_as_it_was(monkeypatch):
    llm = made()
    with llm.session(METHOD) as session, llm.session(METHOD) as other:
        for one in (session, other):
            one.prefill(random_ids(60))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def stop(*_, **__):
                raise KeyboardInterrupt

            patch.setattr("engine.runner.recompute.runner.run_chunk", stop)
            session.decode(5)
        assert len(session) == 60
        assert torch.equal(session.decode(5), other.decode(5))


def test_other_methods_read_the_tokens_again_and_it_takes_over_from_them():
    llm, ids = made(), random_ids(60)
    with llm.session(METHOD) as session, llm.session(Full()) as full:
        session.prefill(ids)
        expected = full.prefill(ids)
        assert session.reads_again(Full()) == 60
        session.set_method(Full())
        assert torch.equal(session.last_logits, expected)
        assert torch.equal(session.decode(3), full.decode(3))
        session.set_method(METHOD)
        assert torch.equal(session.decode(4), dense(llm, [*ids, 3, 4][-W:]))


def test_a_stream_goes_on_past_the_models_positions():
    config = tiny_config(layers=3, heads=4, kv_heads=2, max_positions=32)
    given = dict(max_context=None, chunk=16, backend="reference", forever=True)
    llm = tiny_llm(METHOD, config, tiny_weights(config, seed=6), **given)
    near = made(config=config, max_context=32)
    with llm.session() as session:
        for turn in range(4):
            ids = random_ids(45, seed=turn)
            session.prefill(ids)
            token = random_ids(1, seed=turn + 9)
            found = session.decode(token[0])
            expected = dense(near, [*ids, *token][-W:])
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert len(session) == 184 and "newest 24" in METHOD.forgotten(184)
    with pytest.raises(SettingError, match="forever: found window_recompute, which encodes 70,000"):
        tiny_llm(WindowRecompute(tokens=70_000), config, tiny_weights(config, seed=6), **given)


def test_it_is_the_oracle_that_streaming_rows_come_near():
    """Of a text within the window all are full attention's; beyond it StreamingLLM is another."""
    llm, ids = made(), random_ids(60)
    with llm.session(METHOD) as one, llm.session(StreamingLLM(tokens=W)) as other:
        torch.testing.assert_close(
            one.prefill(ids[:20]), other.prefill(ids[:20]), atol=2e-5, rtol=0
        )
        assert not torch.allclose(one.prefill(ids[20:]), other.prefill(ids[20:]), atol=1e-3)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, None])
def test_bad_settings_are_one_line(tokens):
    with pytest.raises(SettingError, match="tokens: found"):
        WindowRecompute(tokens=tokens)
