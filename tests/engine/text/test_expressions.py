"""Expressions of a tokenizer.json that never end, from strangers.

Stops: a stack trace of the native library on the user's terminal, and a refusal of expressions that
real tokenizers have.
"""

import json
import subprocess

import pytest

from engine.base.errors import BadCheckpoint
from engine.text.sandbox.expressions import repeats_what_repeats, require_endings
from engine.text.tokenizer import Tokenizer
from tests.engine.chat.chat_model import chat_model

# of GPT-2, Llama 3, Qwen2, o200k (GPT-4o, Llama 4), DeepSeek V3, Bloom, and groups of digits
REAL = [
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]
ENDLESS = ["(a+)+$", r"(?:a|aa)+$", r"([\p{L}]+\s?)+$", "(a*)*b", "((?:a+)b?)+$"]
ENDING = [r"(?: ?\p{L}+)+", "(?:a|b)+", r"(?:\d{3})+(?!\d)", "(?:ab+)*c?"]


def tokenizer_json(expression):
    split = {"Regex": expression}
    return json.dumps(
        {
            "version": "1.0",
            "pre_tokenizer": {
                "type": "Split",
                "pattern": split,
                "behavior": "Isolated",
                "invert": False,
            },
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
            "added_tokens": [],
        }
    )


@pytest.mark.parametrize("expression", REAL)
def test_the_expressions_of_real_tokenizers_need_no_trial(expression):
    assert not repeats_what_repeats(expression)


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_endless_expression_is_one_line(expression, tmp_path, capfd):
    path = tmp_path / "tokenizer.json"
    path.write_text(text := tokenizer_json(expression), encoding="utf-8")
    with pytest.raises(BadCheckpoint, match="expression .*expected one that ends") as caught:
        require_endings(path, text)
    assert expression in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("expression", ENDING)
def test_an_expression_that_ends_is_taken_whatever_its_form(expression, tmp_path):
    assert repeats_what_repeats(expression) or "{3}" in expression
    path = tmp_path / "tokenizer.json"
    path.write_text(text := tokenizer_json(expression), encoding="utf-8")
    require_endings(path, text)


def test_a_model_folder_with_one_is_refused_before_the_library_has_its_text(tmp_path, capfd):
    model = chat_model(tmp_path / "m")
    file = model / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x"}
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"tokenizer.json: found the expression \(a\*\)\*b"):
        Tokenizer(model)
    assert "panicked" not in capfd.readouterr().err


def test_a_trial_cannot_take_the_parents_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen = {}

    def run(command, **settings):
        seen.update(settings["env"])
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr("engine.text.sandbox.expressions.subprocess.run", run)
    require_endings(tmp_path / "tokenizer.json", tokenizer_json("(a+)+$"))
    assert seen and "HF_TOKEN" not in seen
