"""A calibration while a document is read: the choice of tools.calibrate on the same texts, found
again at the next start, and nothing lost where it is broken off.

Stops: a passage at another place than the search was told, a window's rows of another moment, a
choice that is used for other weights, a question in a pipe.
"""

import io
import json
import os

import pytest
import torch

from engine import LLM, Full, OmniKV, SamplingParams
from engine.base.errors import UsageError
from engine.calibration import keep as keeping
from engine.calibration.passages import MaxOverHeads, Passage
from engine.calibration.score import Passages, worth
from engine.calibration.search import Search, filters_of, seeing
from engine.chat.cli import main
from engine.chat.talk.chat import Chat
from engine.chat.talk.while_reading import (
    COUNT,
    POSITIONS,
    SHARE,
    TAIL,
    WhileReading,
    ends,
    most_full,
    seconds,
    unable,
)
from engine.plan.filter_layers import LONG, filter_layers, weights_file
from engine.plan.layers import layer_plan
from engine.terminal.display import Display
from tests.builders import random_ids, session_config, tiny_llm
from tests.engine.chat.chat_model import chat_model
from tools.calibrate.by_loss import passage_of

N = 700
SLIDING = dict(
    architectures=["MinistralForCausalLM"],
    model_type="ministral",
    sliding_window=90,
    layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"] * 2,
)
SCALED = dict(architectures=["GraniteForCausalLM"], model_type="granite", attention_multiplier=0.08)
MODELS = {"llama": {}, "windows": SLIDING, "granite": SCALED}


def read(session, ids, notes):
    session.prefill(ids, progress=notes.note)
    return notes


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_the_choice_is_that_of_tools_calibrate_on_the_same_texts(name):
    """The texts are the document up to each passage's end."""
    llm, ids = tiny_llm(Full(), session_config(**MODELS[name])), random_ids(N)
    local, total = llm.config.local_layers, llm.config.num_layers
    with llm.session() as session:
        notes = read(session, ids, WhileReading(session))
        assert notes.ready and [p.stop for p in notes.passages] == [N // 2, N]
        chosen = notes.choose()
    theirs = [passage_of(llm, ids[:end], POSITIONS, SHARE, TAIL) for end in ends(N)]
    layers = total - len(local)
    search = Search(layers, Passages(lambda: theirs, layers, local), COUNT, lambda *_: None)
    search.down(most_full(layers))
    found = search.known(most_full(layers)).values()
    best = min(found, key=lambda f: worth(f.cost, len(f.full), layers, SHARE))
    numbers = seeing(total, local)
    assert chosen.filters == tuple(numbers[i] for i in filters_of(best.full))
    assert chosen.kl == pytest.approx(best.cost, rel=1e-3) and chosen.kl > 1e-4
    assert not set(chosen.filters) & set(local) and chosen.full < layers


@pytest.mark.parametrize("name", ["windows", "granite"])
def test_a_passage_is_the_decode_steps_of_the_family(name):
    """Under full attention and under OmniKV, where layers slide and where scores have a factor."""
    llm, ids = tiny_llm(Full(), session_config(**MODELS[name])), random_ids(300)
    start = len(ids) - 40
    logits = {}
    omni = OmniKV(filter_layers=(0,), tokens=24, tail=64, dense_below=0)
    for method in (Full(), omni):
        with llm.session(method) as session:
            session.prefill(ids[:start])
            logits[method.name] = torch.stack([session.decode(token) for token in ids[start:]])
    with llm.session() as session:
        session.prefill(ids)
        bank, choose = session.bank, MaxOverHeads(24)
        found = Passage(llm.model, llm.rotary, bank, ids, start, len(ids), 64, choose)
        trace = found.run(layer_plan(8, (0,), 0, local_layers=llm.config.local_layers))
    full, sparse = (torch.log_softmax(rows, -1) for rows in logits.values())
    torch.testing.assert_close(found.reference, full, atol=2e-4, rtol=0)
    kl = (full.exp() * (full - sparse)).sum(-1)
    torch.testing.assert_close(trace.kl, kl.float(), atol=2e-4, rtol=1e-2)
    assert trace.kl.mean() > 1e-3


def test_a_search_that_is_broken_off_leaves_the_session_as_it_was():
    llm, ids = tiny_llm(Full()), random_ids(N)
    with llm.session() as plain, llm.session() as session:
        plain.prefill(ids)
        notes = read(session, ids, WhileReading(session))
        left = []

        def stop(seconds_left):
            left.append(seconds_left)
            if len(left) == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            notes.choose(stop)
        assert len(left) == 5 and left[-1] > 0 and session.ids == ids
        for token in random_ids(5, seed=1):
            assert torch.equal(session.decode(token), plain.decode(token))


def test_what_cannot_be_calibrated_says_why():
    llm = tiny_llm(Full())
    assert unable(llm, 511) == "found 511 tokens, expected at least 512"
    assert "fewer than 4" in unable(tiny_llm(Full(), session_config(layers=3)), 5000)
    assert "offloaded" in unable(tiny_llm(OmniKV(filter_layers=(1,)), offload="host"), 5000)
    assert unable(llm, 512) == "" and 0 < seconds(llm, 512) < seconds(llm, 2000)
    with llm.session() as session:
        notes = WhileReading(session)
        session.prefill(random_ids(100), progress=notes.note)
        assert not notes.ready  # the middle of 100 tokens has no 64 before it


# ---------------------------------------------------------------- on disk


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return chat_model(tmp_path / "model", num_hidden_layers=6)


def known(model):
    llm = LLM(model, device="cpu", load=False)
    return filter_layers(llm.folder, llm.resolved, llm.config)


def test_it_is_kept_beside_the_model_and_found_again(model):
    assert known(model).source == "spread"
    path = keeping.keep(model, keeping.calibration(model, (1, 3), 40))
    assert path == model / "omnikv.json" and known(model).layers == (1, 3)
    llm = LLM(model, device="cpu", load=False)
    assert isinstance(llm.method, OmniKV) and f"filter layers (1, 3): from {path}" in str(
        llm.plan()
    )


def test_a_folder_that_cannot_be_written_leaves_it_in_the_cache(model, monkeypatch):
    """By the weights' digest: another training of the same shape is not served."""
    replace, tried = keeping._replace, []

    def read_only(path, text):
        tried.append(path)
        if path.parent == model:
            raise PermissionError(13, "Permission denied", str(path))
        replace(path, text)

    monkeypatch.setattr(keeping, "_replace", read_only)
    data = keeping.calibration(model, (2,), 40)
    path = keeping.keep(model, data)
    assert path == weights_file(data["weights"]) and tried == [model / "omnikv.json", path]
    assert known(model).layers == (2,) and str(path) in known(model).hint
    weights = (model / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(weights[:8], "little")
    (model / "model.safetensors").write_bytes(weights[:head] + bytes(len(weights) - head))
    assert known(model).source == "spread"
    monkeypatch.setattr(keeping, "_replace", lambda path, text: (_ for _ in ()).throw(OSError(28)))
    with pytest.raises(UsageError, match="cannot be kept"):
        keeping.keep(model, data)
    assert not [name for name in os.listdir(model) if name.endswith(".part")]


def test_a_file_for_other_weights_is_ignored(model):
    data = keeping.calibration(model, (1,), 40) | {"weights": "0" * 64}
    (model / "omnikv.json").write_text(json.dumps(data))
    assert known(model).source == "spread" and "digest 000000000000" in known(model).hint


# ---------------------------------------------------------------- in the chat


class Person(io.StringIO):
    def isatty(self):
        return True


DOCUMENT = "The sun was warm and Lily liked to play outside. " * 60


def talk(model, monkeypatch, wish, typed="", person=True, method=None):
    """Read the document in a chat; (chat, what was shown)."""
    monkeypatch.setattr("sys.stdin", Person(typed) if person else io.StringIO(typed))
    stream = Person() if person else io.StringIO()
    llm = LLM(model, device="cpu", max_context=4096, chunk=256, method=method)
    chat = Chat(llm, SamplingParams(max_tokens=4), Display(stream), calibrate=wish)
    assert chat.read(DOCUMENT, "sun.txt")
    return chat, stream.getvalue()


def test_a_person_is_asked_once_and_the_choice_is_used(model, monkeypatch):
    chat, shown = talk(model, monkeypatch, None, "y\n")
    assert "this model is uncalibrated" in shown and "calibrate? [y/N]" in shown
    session = chat.conversation.session
    if "not kept" in shown:  # random weights may prefer the spread
        assert not (model / "omnikv.json").exists() and session.method == Full()
    else:
        assert isinstance(session.method, OmniKV) and (model / "omnikv.json").is_file()
        assert session.method.filter_layers == known(model).layers
    assert chat.read(DOCUMENT[:100], "more.txt") and chat.calibrating.wish is False


def test_no_is_no(model, monkeypatch):
    for typed in ("n\n", "\n", ""):
        chat, shown = talk(model, monkeypatch, None, typed)
        assert "calibrate? [y/N]" in shown and "filter layers (" not in shown
        assert chat.conversation.session.method == Full()
    assert not (model / "omnikv.json").exists()


@pytest.mark.parametrize("wish, person", [(None, False), (False, True), (False, False)])
def test_nobody_is_asked_in_a_pipe_or_against_the_flag(model, monkeypatch, wish, person):
    _, shown = talk(model, monkeypatch, wish, "y\n", person)
    assert "calibrat" not in shown and not (model / "omnikv.json").exists()


def test_who_chose_a_method_is_not_asked(model, monkeypatch):
    _, shown = talk(model, monkeypatch, None, "y\n", method=Full())
    assert "calibrat" not in shown


def test_the_flag_does_it_in_a_pipe_and_not_twice(model, monkeypatch):
    _, shown = talk(model, monkeypatch, True, person=False)
    assert "calibrating while reading: about" in shown and "filter layers (" in shown
    keeping.keep(model, keeping.calibration(model, (1,), 40))
    _, shown = talk(model, monkeypatch, True, person=False)
    assert "not calibrated: this model is" in shown and known(model).layers == (1,)


def test_the_flag_wants_a_document(capsys):
    assert main(["--calibrate", "-p", "Who?"]) == 2
    assert "--calibrate: found no document" in capsys.readouterr().err


def test_a_program_that_reads_much_gets_one_hint(model, recwarn):
    """The library: through warnings, where the prompt is long and the method was left to it."""
    llm = LLM(model, device="cpu", max_context=6000)
    assert "this model is uncalibrated" in str(llm.plan())
    for method, tokens, hints in ((None, LONG, 1), (None, LONG - 1, 0), (Full(), LONG, 0)):
        recwarn.clear()
        llm = LLM(model, device="cpu", max_context=6000, method=method)
        llm.generate([5] * tokens, SamplingParams(max_tokens=1))
        assert len([w for w in recwarn if "tools.calibrate" in str(w.message)]) == hints


def test_ctrl_c_in_the_search_keeps_the_reading(model, monkeypatch):
    def stopped(self, tell):
        raise KeyboardInterrupt

    monkeypatch.setattr(WhileReading, "choose", stopped)
    chat, shown = talk(model, monkeypatch, True, person=False)
    assert "calibration stopped; what was read stays" in shown
    assert len(chat.conversation.session) > 512 and not (model / "omnikv.json").exists()
    assert chat.ask("What was warm?") in ("length", "stop")
