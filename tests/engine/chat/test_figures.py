"""The figures of /stats, /memory and the banner: a person's dozen, and nothing that is not used.

Stops: a zero that means "not used here", a counter that is missing from /stats all, a path twice.
"""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cli.figures import all_stats_text, memory_text, model_name, stats_text
from engine.cli.introduce import introduce
from engine.llm import LLM
from engine.runner.state import SessionStats
from engine.session.results import GenerationStats
from engine.terminal.display import Display
from tests.engine.chat.fake_llm import FakeLLM, FakeSession

COUNTED = SessionStats(
    tokens=1000,
    prefill_tokens=900,
    prefill_seconds=3.0,
    decode_steps=100,
    decode_seconds=2.0,
    bytes_read_dense=3_000_000,
    bank_bytes=64_000,
)
SPARSE = dict(bytes_read_sparse=1_000_000, sparse_steps=90, dense_steps=10, mem=0.3)
HOST = dict(
    host_bytes=5_000_000,
    pin_seconds=0.31,
    hits=900,
    misses=100,
    hit_rate=0.9,
    bytes_fetched=9_000_000,
    bytes_streamed=2_000_000,
)
LAST = GenerationStats(800, 100, 0.5, 50, 1.0, 50, 0)


@pytest.fixture
def llm():
    backend = SimpleNamespace(token_to_id=lambda token: 0)
    return FakeLLM(SimpleNamespace(backend=backend), max_context=2000)


def session_of(llm, **changes):
    session = FakeSession(llm)
    session.ids = list(range(1000))
    session.stats = SessionStats(**{**COUNTED.__dict__, **changes})
    return session


def test_a_new_session_shows_its_context_and_memory_only(llm):
    text = stats_text(llm.planner, FakeSession(llm), None)
    assert "context       0 of 2,000 tokens (0%)" in text and "640 B on the device" in text
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        "tokens and speed",
        "memory",
    ]


def test_full_attention_says_nothing_of_sparse_steps_or_the_host(llm):
    text = stats_text(llm.planner, session_of(llm), LAST)
    assert "read          900 tokens in all, of documents and questions, in 3.0 s of the " in text
    assert "in 3.0 s of the model's own time, 300 tok/s" in text
    # a step more than an answer shows tokens where an end token was run
    said = "written       100 steps in all, those of end tokens among them, in 2.0 s, 50.0 steps/s"
    assert f"{said}, 20.0 ms each" in text
    assert "last answer   800 tokens cached, 100 read, 50 written at 50.0 tok/s" in text
    assert "K and V       30.00 kB on average; full attention reads 64.00 kB now" in text
    assert "sparse" not in text and "host" not in text and "Mem%" not in text
    assert " 0 B" not in text and "0.0%" not in text


def test_sparse_attention_says_what_it_read(llm):
    text = stats_text(llm.planner, session_of(llm, **SPARSE), LAST)
    assert "10.00 kB in sparse layers, 30.00 kB in the others" in text
    assert "90 of 100" in text and "30.0% of the bank" in text and "host tier" not in text


def test_the_host_tier_says_what_travelled(llm):
    text = stats_text(llm.planner, session_of(llm, **SPARSE, **HOST), LAST)
    assert "5.00 MB, page-locked in 0.3 s" in text
    assert "90.0% of the chosen tokens were on the device" in text
    assert "9.00 MB by selection, 100.00 kB a sparse step" in text
    assert "2.00 MB in whole layers or blocks" in text and "stalls" not in text


def test_what_an_evicting_method_keeps(llm):
    text = stats_text(llm.planner, session_of(llm, store_bytes=20_000, resident=0.25), LAST)
    assert "20.00 kB beside the bank; their K and V are 25.0% of all tokens'" in text
    assert "on the device, whole: answers do not read it" in text
    text = memory_text(llm.planner, session_of(llm, store_bytes=20_000, resident=0.25))
    assert "the whole context bank stands beside them" in text
    assert "beside them" not in memory_text(llm.planner, session_of(llm))


def test_all_of_stats_is_every_counter(llm):
    text = all_stats_text(session_of(llm), LAST)
    for name in (*COUNTED.to_dict(), *(f"last answer: {name}" for name in LAST.to_dict())):
        assert f"{name.replace('_', ' ')} " in text
    assert "decode seconds                2.000 s" in text


def test_memory_sets_what_is_held_beside_what_was_planned(llm):
    lines = memory_text(llm.planner, session_of(llm, host_bytes=5_000_000)).splitlines()
    assert lines[0].split() == ["planned", "held", "now"]
    assert [line.split() for line in lines[1:5]] == [
        ["weights", "1.00", "kB"],
        ["context", "bank", "640", "B", "64.00", "kB"],
        ["total", "at", "the", "peak", "1.64", "kB", "of", "1.00", "GB", "free", "RAM"],
        ["host", "tier", "0", "B", "5.00", "MB"],
    ]


@pytest.mark.parametrize(
    "budget, bound", [(None, r"of \d+\.\d\d GB free RAM$"), (10**9, "of a budget of 1.00 GB$")]
)
def test_what_a_plan_is_measured_against_goes_by_its_name(budget, bound):
    """A budget of 1 GB was called free, with its figure: 1.05 GB free."""
    llm = LLM("pocket", max_context=1024, ram_budget=budget, device="cpu", load=False)
    screen = io.StringIO()
    introduce(llm.planner, Display(screen))
    assert re.search(f"at the peak, {bound}", screen.getvalue(), re.MULTILINE)
    text = memory_text(llm.planner, session_of(llm))
    assert re.search(f"^total at the peak .* {bound}", text, re.MULTILINE)
    assert "free" not in text.replace("free RAM", "")


@pytest.mark.parametrize(
    "name, source, shown",
    [
        ("/models/tiny-llama", "folder", "tiny-llama"),
        ("llama-3-8b-262k", "cache", "llama-3-8b-262k"),
        ("someone/model", "hub", "someone/model"),
    ],
)
def test_a_local_model_goes_by_its_folder(name, source, shown):
    found = SimpleNamespace(folder=Path("/models/tiny-llama"), source=source)
    assert model_name(SimpleNamespace(name=name, resolved=found)) == shown
