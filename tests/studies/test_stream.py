"""tools/studies/stream.py: losses by steps and by prompts, restarts, and the report of rows."""

import json

import pytest
import torch

from engine import LLM, StreamingLLM
from engine.base.errors import UsageError
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tools.studies import stream


@pytest.fixture(scope="module")
def llm():
    config = tiny_config(layers=2, max_positions=64)
    method = StreamingLLM(tokens=24)
    return tiny_llm(method, config, tiny_weights(config), max_context=None, chunk=16, forever=True)


def test_steps_and_prompts_give_the_same_losses_and_they_are_the_next_tokens(llm):
    ids = random_ids(151)
    with llm.session() as one, llm.session() as other, llm.session() as third:
        for first in range(0, 150, 50):
            expected = 0.0
            for at in range(first, first + 50):
                expected -= float(torch.log_softmax(third.decode(ids[at]), -1)[ids[at + 1]])
            found = stream.by_steps(one, ids, first, first + 50)
            assert found == pytest.approx(expected, abs=1e-4)
            found = stream.by_prompts(other, ids, first, first + 50)
            assert found == pytest.approx(expected, abs=1e-2)
        assert len(one) == len(other) == 150


def test_fresh_streams_begin_two_windows_before_and_score_the_same_text(llm):
    args = stream.arguments(["--out", "x", "--keep", "24", "--restart", "100"])
    args.line, ids = "fresh", random_ids(400)
    go_on = stream.sessions(args, llm, ids)
    session = llm.session()
    assert go_on(0, session) is session and go_on(50, session) is session
    begun = go_on(200, session)
    assert begun is not session and session.closed and list(begun.ids) == ids[152:200]
    with llm.session() as whole:
        whole.prefill(ids[:200])
        # 24 tokens are held of either, of which the sinks differ
        mine, theirs = (stream.by_prompts(s, ids, 200, 300) for s in (begun, whole))
        assert mine == pytest.approx(theirs, rel=0.05) and mine != theirs
    args.line = "window"
    assert stream.sessions(args, llm, ids)(200, begun) is begun


def test_the_report_compares_early_with_late_and_lines_with_a_stream(tmp_path, capsys):
    facts = {
        "line": "streaming_llm", "by": "prompts", "model": "m", "positions": 100, "keep": 200,
        "hardware": "cpu", "threads": 1, "commit": "abc",
    }  # fmt: skip
    for name, level in (("streaming_llm", 2.2), ("fresh", 2.0)):
        rows = [
            {"tokens": 100 * i, "loss": 9.0 if i < 5 else level, "ms": 1.5, "rows": 24,
             "resident": 5_000_000, "load": 0.5}
            for i in range(1, 41)
        ]  # fmt: skip
        lines = [facts | {"line": name}, *rows]
        path = tmp_path / f"{name}-prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert stream.report(tmp_path) == 0
    text = (tmp_path / "stream.md").read_text()
    assert text in capsys.readouterr().out + "\n"
    tail = "24, 24 | 5.0, 5.0 | 1.50, 1.50 | 0.5 | abc |"
    assert f"| streaming_llm | prompts | 4,000 | 2.200, 2.200 | 1.000 | {tail}" in text
    assert f"| fresh | prompts | 4,000 | 2.000, 2.000 | 0.909 | {tail}" in text
    with pytest.raises(UsageError, match="found no rows"):
        stream.report(tmp_path / "none")


@pytest.mark.parametrize("keep", [512, 2048])
def test_infllm_reads_no_more_rows_than_the_others_keep(keep):
    method = stream.infllm(keep)
    rows = method.init + method.local + method.topk * method.block + method.block - 1
    assert keep - method.block < rows <= keep
    assert method.blocks * method.block == 4 * keep


def test_a_text_that_is_too_short_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_text("a b c")
    args = stream.arguments(["--out", "x", "--text", str(path), "--tokens", "100"])
    llm = LLM(threads=1)
    with pytest.raises(UsageError, match="--tokens: found 100, expected fewer than the text's"):
        stream.text_of(args, llm)
    args = stream.arguments(["--out", "x", "--tokens", "5000"])
    ids = stream.text_of(args, llm)
    assert len(ids) == 5001 and ids == stream.text_of(args, llm)
