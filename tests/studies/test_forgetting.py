"""What a process holds beside its plan: the study's table, its exit code and its bad input."""

import json

import pytest

from engine.base.errors import SettingError
from tools.studies import forgetting


def test_a_small_prompt_has_a_row_and_a_verdict(capsys):
    code = forgetting.main(["--shape", "tiny", "--tokens", "2048", "--methods", "streaming_llm"])
    out = capsys.readouterr().out
    assert "| `streaming_llm` |" in out and (code == 0) is ("1 of 1 within 5%" in out)


def test_what_is_planned_without_a_bank_is_less_than_with_one(capsys):
    given = ["--one", "snapkv", "--shape", "tiny", "--tokens", "4096"]
    assert forgetting.main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["store"] < found["bank"] and found["after"] <= found["peak"]
    found |= dict(peak=2_000_000, planned=1_000_000)
    assert forgetting.row(found).split("|")[5].strip() == "2.00"


def test_what_was_stored_is_not_measured_again(tmp_path, capsys, monkeypatch):
    found = dict(method="window", planned=100, peak=104, after=1, heap=0, store=1, bank=200)
    store = tmp_path / "found.jsonl"
    store.write_text(json.dumps(found) + "\n")
    given = ["--store", str(store), "--shape", "tiny", "--tokens", "2048", "--methods"]
    monkeypatch.setattr(forgetting, "alone", lambda args, name: 1 / 0)
    assert forgetting.main([*given, "window"]) == 0
    assert "1 of 1 within 5%" in capsys.readouterr().out
    store.write_text(json.dumps(found | dict(peak=106)) + "\n")
    assert forgetting.main([*given, "window"]) == 1
    assert "outside: window +6.0%" in capsys.readouterr().out
    assert forgetting.main([*given, "window", "snapkv", "--known"]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 within 5%" in out and "not measured: snapkv" in out


def test_the_last_prompt_is_a_chunk_or_all_that_wait():
    def ends(name):
        config = forgetting.shape_config("160m")
        return forgetting.ends(forgetting.method_of(name, "160m"), config, 10_000, 1024)

    late = 7952, 8976, 10_000
    assert ends("window") == ends("window_recompute") == late
    assert ends("snapkv") == (2049, 2050, 10_000)
    assert ends("h2o") == ends("random_eviction_all") == (1, 2, 10_000)
    # three stores of half of the tokens and more are more than the rows that wait
    assert ends("expected_attention") == ends("razor") == ends("random_eviction") == late


def test_methods_that_keep_everything_are_refused_by_name():
    with pytest.raises(SettingError, match="found omnikv, expected some of a2sf, ada_pyramid"):
        forgetting.arguments(["--methods", "omnikv"])
    assert {"h2o", "streaming_llm", "rkv"} <= set(forgetting.evicting())
