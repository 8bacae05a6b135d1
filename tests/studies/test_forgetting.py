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


def test_methods_that_keep_everything_are_refused_by_name():
    with pytest.raises(SettingError, match="found omnikv, expected some of a2sf, ada_pyramid"):
        forgetting.arguments(["--methods", "omnikv"])
    assert {"h2o", "streaming_llm", "rkv"} <= set(forgetting.evicting())
