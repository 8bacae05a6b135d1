"""Where filter layers come from, and calibration files that are corrupt, stale or edited by hand.

Stops: a file made for other weights used silently, a traceback from broken JSON, a guess that does
not say that it is one.
"""

import json
import os
from pathlib import Path

import pytest

from engine import LLM, OmniKV
from engine.errors import BadCheckpoint
from engine.plan.filter_layers import cache_file, filter_layers, read
from tests.builders import session_config
from tests.tiny_model import sound
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint
from weights.resolve import Resolved


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
