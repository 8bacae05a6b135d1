"""The search for DuoAttention's gates: what it trains is the model, its file is taken by a session,
and a run that was stopped ends as one that was not.

Stops: a forward pass that is not the engine's, gates that all close or none, a state that is lost.
"""

import json

import pytest
import torch

from engine import LLM, Duo, Full
from engine.base.errors import UsageError
from engine.model.rope import Rotary
from tests.builders import POCKET
from tools.studies import duo_gates
from tools.studies.duo_gates import State, arguments, hidden, lambda_mask, main, rate_at, text_of

FLAGS = ["--length", "120", "--passkeys", "2", "--sinks", "4", "--recent", "24", "--rate", "0.1"]


@pytest.fixture(scope="module")
def llm():
    return LLM(str(POCKET), device="cpu", dtype="float32", threads=1, method=Full())


def test_a_pass_of_whole_heads_is_the_engines_and_one_of_streaming_heads_duos(llm):
    """Gates of 1, gates of 0, and both kinds at once."""
    ids, first = text_of(llm, 120, 2, seed=1)
    layers, heads = llm.config.num_layers, llm.config.num_kv_heads
    model, rotary = llm.model.on_torch(), Rotary(llm.config, torch.device("cpu"))
    tokens, mask = torch.tensor(ids), lambda_mask(len(ids), 4, 24)
    with torch.no_grad():
        whole = lambda_mask(len(ids), len(ids), 0)
        states, full = hidden(model, rotary, tokens, first, whole)
        # a layer of whole heads before any that streams: its outputs are those of full attention
        mixed = torch.zeros(layers, heads)
        mixed[0] = 1
        cases = [
            (torch.ones(layers, heads), 1.0),
            (torch.zeros(layers, heads), 0.0),
            (mixed, 0.125),
        ]
        for gates, share in cases:
            found, _ = hidden(model, rotary, tokens, first, mask, gates, full)
            table = tuple(tuple(row) for row in gates.tolist())
            with llm.session(Duo(gates=table, share=share, sinks=4, recent=24)) as session:
                expected = session.prefill(ids)
            logits = model.lm_head(found[-1:])[0]
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
            assert torch.equal(found, states) == (share == 1.0)
    assert 0 < first < len(ids)
    document, rest = llm.tokenizer.decode(ids[:first]), llm.tokenizer.decode(ids[first:])
    assert "pass key of" in document and rest.count("The pass key of") == 2


def test_adam_closes_what_nothing_holds_open_and_the_rate_rises_and_falls():
    state, other = State.fresh(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    torches = torch.optim.Adam([other], lr=0.01)
    for step in range(5):
        gradient = torch.tensor([[0.1, 0.2], [0.0, 0.05 * step]])
        state.update(gradient, 0.01)
        other.grad = gradient
        torches.step()
    torch.testing.assert_close(state.gates, other.detach(), atol=1e-6, rtol=0)
    state.update(torch.full((2, 2), -1.0), 5.0)
    assert state.gates.max() == 1
    rates = [rate_at(step, 50, 2.0) for step in range(50)]
    assert rates[0] == rates[-1] == 0.2 and max(rates) == rates[9] == rates[40] == 2.0


def test_a_stopped_run_ends_as_one_that_was_not(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(duo_gates, "EVERY", 1)
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    assert main([*FLAGS, "--steps", "4", "--out", str(whole)]) == 0
    plain = duo_gates.text_of

    def text(model, length, passkeys, seed):
        if seed == 3:  # of the third step
            raise KeyboardInterrupt
        return plain(model, length, passkeys, seed)

    monkeypatch.setattr(duo_gates, "text_of", text)
    with pytest.raises(KeyboardInterrupt):
        main([*FLAGS, "--steps", "4", "--out", str(cut)])
    assert not cut.exists() and json.loads((tmp_path / "cut.json.part").read_text())["step"] == 2
    with pytest.raises(UsageError, match="of other settings or weights"):
        main([*FLAGS, "--steps", "5", "--out", str(cut)])
    monkeypatch.setattr(duo_gates, "text_of", plain)
    assert main([*FLAGS, "--steps", "4", "--out", str(cut)]) == 0
    assert "going on from step 2" in capsys.readouterr().err
    assert cut.read_text() == whole.read_text() and not (tmp_path / "cut.json.part").exists()
    method = Duo(gates=cut)
    assert min(map(min, method.gates)) < 0.7 < 0.9 < max(map(max, method.gates))
    with llm.session(method) as session:
        session.prefill(list(range(5, 405)))
        assert session.runtime.rows_read(400)[0] <= 400
    (tmp_path / "cut.json.part").write_text('{"key": 1}')
    with pytest.raises(UsageError, match="delete it"):
        main([*FLAGS, "--steps", "4", "--out", str(cut)])


@pytest.mark.parametrize(
    "flags", [["--length", "300"], ["--steps", "0"], ["--reg", "-1"], ["--rate", "0"]]
)
def test_settings_that_train_nothing_are_refused(flags):
    with pytest.raises(UsageError, match="expected a length above sinks"):
        arguments(flags)
