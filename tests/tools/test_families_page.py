"""docs/MODELS.md says what the engine does: two variants are tried again and everything that is
known without running is written again (`--whole-grid` tries all).

Stops: a family, a field or a refusal that changes and leaves the page behind; a probe that cannot
fail.
"""

import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from engine import LLM, Full
from engine.base.errors import SettingError
from tools.families import cli, probes
from tools.families.facts import known
from tools.families.models import VARIANTS, make
from tools.families.page import NOTES, letter_of, page

KNOWN = "## The families"


def test_the_page_is_current(request, monkeypatch):
    shipped = {k: v for k, v in probes.methods().items() if v.__module__.startswith("engine.")}
    # other tests define methods of their own
    monkeypatch.setattr(probes, "methods", lambda: shipped)
    whole = request.config.getoption("--whole-grid")
    names = VARIANTS if whole else ("smollm3", "gemma3")
    text = cli.PAGE.read_text(encoding="utf-8")
    made = page(cli.tried(names))
    assert made.partition(KNOWN)[2] == text.partition(KNOWN)[2], "run python -m tools.families"
    for line in made.partition(KNOWN)[0].splitlines():
        if line.startswith("| `"):
            assert line in text.splitlines(), (line, "run python -m tools.families")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows][: len(VARIANTS)] == list(VARIANTS)


def test_every_family_has_a_variant():
    facts, common = known()
    assert all(fact.variants and fact.fields and fact.lines <= 80 for fact in facts)
    assert {"hidden_size", "vocab_size"} <= common


def test_a_sentence_without_a_note_is_noticed():
    assert {letter_of(f"x: {part} y") for part in NOTES} == set(NOTES.values())
    with pytest.raises(AssertionError, match="no note for 'something else'"):
        letter_of("something else")


def test_a_probe_notices_wrong_logits_and_passes_on_refusals(tmp_path, monkeypatch):
    make(tmp_path, "llama")
    found = probes.LLM.session

    def wrong(self, method=None, *rest, **more):
        session = found(self, method, *rest, **more)
        if method is not None and method.name == "window":
            raise SettingError("window: not today")
        if method is not None and method.name == "quest":
            decode = session.decode
            session.decode = lambda token: decode(token) + 0.01
        return session

    monkeypatch.setattr(probes.LLM, "session", wrong)
    config = LLM(tmp_path, device="cpu", method=Full(), load=False).config
    with tempfile.TemporaryDirectory() as work:
        with pytest.raises(AssertionError, match="Quest.*logits 0.01"):
            probes.attempts(tmp_path, config, Path(work))
        monkeypatch.setattr(probes, "AGREES", 1.0)
        by_name = {a.name: a.why for a in probes.attempts(tmp_path, config, Path(work))}
    assert by_name.pop("window") == "window: not today"
    assert not any(by_name.values()) and torch.is_inference_mode_enabled() is False
