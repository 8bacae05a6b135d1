"""Where filter layers come from, and calibration files that are corrupt, stale or edited by hand.

Stops: a file made for other weights used silently, a traceback from broken JSON, a guess that does
not say that it is one.
"""

import json
import os
from pathlib import Path

import pytest

from engine import LLM, Full, OmniKV, chat
from engine.base.errors import BadCheckpoint, SettingError
from engine.cli.figures import start_note
from engine.plan.filter_layers import cache_file, filter_layers, read
from engine.serve import cli as serve
from tests.builders import session_config
from tests.tiny_model import sound
from tools.real_model import real_model_folder
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint, weights_digest
from weights.published_filters import PublishedFilters
from weights.resolve import Resolved

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    sound(folder, num_hidden_layers=6)
    return folder


def calibration(folder, **changes):
    return {
        "format": 1,
        "fingerprint": fingerprint(folder),
        "filter_layers": [1],
        "wait_layers": 0,
        "k": 64,
        "scores": "softmax",
        "made_by": "a test",
    } | changes


def test_a_file_beside_the_model_wins_over_the_cache(model):
    config = LLM(model, device="cpu", load=False).config
    cached = cache_file(fingerprint(model))
    cached.parent.mkdir(parents=True)
    cached.write_text(json.dumps(calibration(model, filter_layers=[0])))
    assert (
        filter_layers(model, None, config).layers == (0,)
        and filter_layers(model, None, config).source == "file"
    )
    (model / "omnikv.json").write_text(json.dumps(calibration(model)))
    assert filter_layers(model, None, config).layers == (1,)


def test_wait_layers_come_with_the_filter_layers(model):
    """A calibration for one wait layer that runs without has other sparse layers than it wanted."""

    def roles(**settings):
        return LLM(model, device="cpu", load=False).resolve_method(OmniKV(**settings))[1].roles

    waiting = calibration(model, filter_layers=[1, 3], wait_layers=1)
    (model / "omnikv.json").write_text(json.dumps(waiting))
    assert roles() == roles(filter_layers=(1, 3), wait_layers=1) != roles(filter_layers=(1, 3))
    assert (
        roles(wait_layers=0)
        == roles(filter_layers=(1, 3))
        == roles(filter_layers=(1, 3), wait_layers=0)
    )
    without = calibration(model, filter_layers=[1, 3])
    del without["wait_layers"]
    (model / "omnikv.json").write_text(json.dumps(without))
    assert roles() == roles(filter_layers=(1, 3))


def test_a_published_set_comes_with_the_wait_layer_it_was_published_with():
    alias = ALIASES["llama-3-8b-262k"]
    config = session_config(layers=32)
    known = filter_layers(None, Resolved(Path(), "hub", "any", alias.hub_id), config)
    assert known.source == "published" and known.layers == alias.filter_layers and known.wait == 1
    assert filter_layers(None, None, config).wait == 0


def test_a_published_set_says_its_source_and_that_nobody_checked_it(monkeypatch, capsys):
    """In the plan, and as one line at the start of the chat and the server."""
    llm = LLM("qwen3-4b-2507", device="cpu", dtype="bfloat16", max_context=8192, load=False)
    assert llm.method == OmniKV(filter_layers=(0, 1, 3, 9, 13, 16, 21, 28), wait_layers=0)
    said = start_note(llm.planner)
    assert said in str(llm.plan()) and "\n" not in said
    assert "published in CURRENTF/Sparse-vLLM, not checked here; --calibrate finds" in said
    # a set that the flags name is nobody else's to speak of
    given = OmniKV(filter_layers=(2, 8))
    assert start_note(LLM("qwen3-4b-2507", max_context=8192, method=given, load=False)) == ""


def test_a_set_that_was_found_here_comes_with_its_weights_only(model, monkeypatch):
    """By fingerprint and digest: another training of the same shape does not get it."""
    config = LLM(model, device="cpu", load=False).config
    found = PublishedFilters((1, 4), 0, "on these weights (a test)", found_here=True)
    table = {fingerprint(model): {weights_digest(model): found}}
    monkeypatch.setattr("engine.plan.filter_layers.FOUND", table)
    known = filter_layers(model, None, config)
    assert (known.layers, known.source, known.wait) == ((1, 4), "found", 0)
    llm = LLM(model, device="cpu", load=False)
    assert llm.method == OmniKV(filter_layers=(1, 4), wait_layers=0)
    said = "found by the search of python -m tools.calibrate, on these weights (a test)"
    assert start_note(llm.planner) == f"filter layers (1, 4): {said}"
    # a calibration of one's own comes first
    (model / "omnikv.json").write_text(json.dumps(calibration(model)))
    assert filter_layers(model, None, config).layers == (1,)
    assert start_note(LLM(model, device="cpu", load=False)) == ""
    (model / "omnikv.json").unlink()
    table[fingerprint(model)] = {"0" * 64: found}
    assert filter_layers(model, None, config).source == "spread"
    assert isinstance(LLM(model, device="cpu", load=False).method, Full)


def test_without_filter_layers_one_line_at_the_start_says_that_all_attention_is_full(
    model, capsys, monkeypatch
):
    """In the chat and in the server, and how to find them; not where full attention was asked
    for.
    """
    given = ["--model", str(model), "--device", "cpu"]
    chat.main([*given, "-p", "a", "-n", "2"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "OmniKV is off" in line]
    assert len(lines) == 1 and "--calibrate -f FILE while it reads" in lines[0]
    chat.main([*given, "-p", "a", "-n", "2", "--method", "full"])
    assert "OmniKV is off" not in capsys.readouterr().err

    def stop(*rest):
        raise SettingError("stopped before it loads")

    monkeypatch.setattr(serve, "listen", lambda host, port: [])
    monkeypatch.setattr(serve, "BlockCache", stop)
    serve.main([*given, "--cache", "none"])
    assert capsys.readouterr().err.count("OmniKV is off") == 1


def test_the_real_model_has_the_set_that_was_found_for_it():
    """Shipped by digest: what `make real-model` converts starts with OmniKV."""
    folder = real_model_folder()
    if folder is None:
        pytest.skip("no real model on this machine (make real-model)")
    llm = LLM(folder, device="cpu", load=False)
    if filter_layers(llm.folder, llm.resolved, llm.config).source != "file":
        assert llm.method == OmniKV(filter_layers=(0, 3, 5, 7, 14, 17, 20, 24), wait_layers=0)


def test_a_stale_file_is_ignored_with_one_line(model):
    config = LLM(model, device="cpu", load=False).config
    (model / "omnikv.json").write_text(json.dumps(calibration(model, fingerprint="0" * 64)))
    known = filter_layers(model, None, config)
    assert (
        known.source == "spread"
        and "ignored, it was made for other weights" in known.hint
        and "\n" not in known.hint
    )
    assert "ignored" in str(LLM(model, device="cpu", load=False, method=OmniKV()).plan())


@pytest.mark.parametrize(
    "text, field",
    [
        ("", "readable JSON"),
        ("{", "readable JSON"),
        ("[]", "format"),
        ('{"format": 2}', "format"),
        ({"filter_layers": []}, "filter_layers"),
        ({"filter_layers": [99]}, "filter_layers"),
        ({"filter_layers": [1, 0]}, "filter_layers"),
        ({"filter_layers": [-1]}, "filter_layers"),
        ({"filter_layers": ["1"]}, "filter_layers"),
        ({"filter_layers": [True]}, "filter_layers"),
        ({"wait_layers": -1}, "wait_layers"),
        ({"wait_layers": True}, "wait_layers"),
        ({"fingerprint": "abc"}, "fingerprint"),
        ({"fingerprint": 5}, "fingerprint"),
        ({"fingerprint": "\x1b" * 64}, "fingerprint"),
        ({"format": True}, "format"),
        ({"format": 1.0}, "format"),
        ('{"format": 1, "format": 1}', "given twice"),
        ("[" * 100_000, "readable JSON"),
        ("[" + "0," * 400_000 + "0]", "format"),
        (" " * 2_000_000, "expected at most"),
    ],
)
def test_a_damaged_file_is_refused_with_one_line(model, text, field):
    path = model / "omnikv.json"
    path.write_text(text if isinstance(text, str) else json.dumps(calibration(model, **text)))
    with pytest.raises(BadCheckpoint) as error:
        LLM(model, device="cpu", load=False, method=OmniKV())
    assert (
        field in str(error.value)
        and "omnikv.json" in str(error.value)
        and "calibrate again" in str(error.value)
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "sparse"])
def test_what_is_no_small_regular_file_is_refused_before_it_is_read(model, kind):
    path = model / "omnikv.json"
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 3 * 10**9)
    with pytest.raises(BadCheckpoint, match="omnikv.json: found no readable JSON"):
        LLM(model, device="cpu", load=False, method=OmniKV())


def test_a_guess_says_so():
    known = filter_layers(None, None, session_config())
    assert known.source == "spread" and "guess" in known.hint and "tools.calibrate" in known.hint


def test_reading_keeps_every_field(model, tmp_path):
    path = tmp_path / "omnikv.json"
    path.write_text(json.dumps(calibration(model)))
    assert read(path, session_config())["k"] == 64
