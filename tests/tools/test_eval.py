"""tools/eval/cli.py: intervals, tables, resuming, sparse steps asserted, bad input. The model is
random, the tokenizer the shipped one.
"""

import json
import shutil

import pytest

from engine import LLM
from tools.eval import cli as evaluation
from tools.eval.prompts import answer_text, split_prompts
from tools.eval.report import overall, summarise, wilson, write
from tools.tasks import make_sample


def record(method, task, seed, right, tokens, depth=0.5, length=1000):
    return {
        "method": method,
        "task": task,
        "length": length,
        "seed": seed,
        "question": 0,
        "depth": depth,
        "right": right,
        "tokens": tokens,
        "text": "",
        "expected": "",
    }


def test_wilson_intervals():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert abs(low - 0.8882) < 1e-3 and abs(high - 0.9785) < 1e-3  # published example values
    assert wilson(100, 100)[1] > 0.9999 and wilson(100, 100)[0] > 0.96
    assert wilson(0, 100)[0] == 0.0


def test_summary_agreement_and_depths(tmp_path):
    records = [record("full", "kv", s, s != 3, [s], s / 10) for s in range(10)]
    records += [
        record("omnikv 3%", "kv", s, s > 5, [s if s != 7 else 99], s / 10) for s in range(10)
    ]
    rows = summarise(records)
    assert [(r["method"], r["right"], r["asked"]) for r in rows] == [
        ("full", 9, 10),
        ("omnikv 3%", 4, 10),
    ]
    assert (
        rows[1]["agree"] == 0.9
        and rows[0]["depths"][0] == [2, 2]
        and rows[0]["depths"][1] == [1, 2]
    )
    assert overall(rows)[1]["accuracy"] == 0.4
    page = write(records, {"model": "x"}, tmp_path)
    assert "| kv | 10 | 0.900" in page and (tmp_path / "report.json").exists()
    assert json.loads((tmp_path / "report.json").read_text())["cells"][0]["asked"] == 10


def run(tiny, out, *more):
    return evaluation.main(
        [
            "--model",
            str(tiny),
            "--out",
            str(out),
            "--tasks",
            "passkey",
            "kv",
            "--lengths",
            "400",
            "--answers",
            "3",
            "--questions",
            "2",
            "--filters",
            "2",
            "--threads",
            "1",
            "--max-tokens",
            "4",
            *more,
        ]
    )


def test_runs_resumes_and_refuses_other_settings(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path) == 0
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 3
    keys = [(r["method"], r["task"], r["seed"], r["question"]) for r in map(json.loads, lines[1:])]
    assert len(set(keys)) == len(keys)
    # killed in the middle of a line
    (tmp_path / "answers.jsonl").write_text("\n".join(lines[:6]) + '\n{"method": "fu')
    assert run(tiny, tmp_path) == 0
    again = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert sorted(again) == sorted(lines)
    assert run(tiny, tmp_path, "--seed", "5") == 2
    assert "--fresh" in capsys.readouterr().err
    header = json.loads(again[0])
    # another training of the same shape in the same folder
    header["settings"]["weights"] = "0" * 64
    (tmp_path / "answers.jsonl").write_text("\n".join([json.dumps(header), *again[1:]]))
    assert run(tiny, tmp_path) == 2
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, said",
    [
        (("--tasks", "nothing"), "unknown task"),
        (("--lengths", "100000"), "do not fit"),
        (("--lengths", "30"), "needs at least"),
        (("--answers", "0"), "at least 1"),
        (("--model", "/nowhere/at/all"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(tiny, tmp_path, capsys, more, said):
    assert run(tiny, tmp_path, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_a_step_that_was_not_sparse_is_an_error():
    class Stats:
        decode_steps, sparse_steps = 3, 2

    class Session:
        loaded = type("L", (), {"end_token_ids": ()})()
        seen = 0

        @property
        def stats(self):
            self.seen += 1
            return Stats if self.seen > 1 else type("S", (), {"decode_steps": 0, "sparse_steps": 0})

        def prefill(self, ids):
            import torch

            return torch.zeros(5)

        decode = prefill

    with pytest.raises(AssertionError, match="not sparse"):
        evaluation.answer(Session(), [1], 3, True)


def test_a_base_model_is_asked_in_plain_text(tiny, tmp_path):
    """Without a chat template: the text, "Question:" and "Answer:" behind the start tokens, and the
    first line of what it writes; a second question about a document is read from the same bank.
    """
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    assert run(base, tmp_path / "out") == 0
    lines = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    assert len(records) == 2 * 2 * 3 and all("\n" not in r["text"].strip() for r in records)
    llm = LLM(base, load=False, max_context=512)
    llm.load()
    sample = make_sample("kv", 200, lambda text: len(text.split()), 0, 2)
    shared, own = split_prompts(llm, sample)
    for question, ids in zip(sample.questions, own, strict=True):
        text = f"{sample.document.rstrip()}\n\nQuestion: {question}\nAnswer:"
        assert shared + ids == llm.encode(text)
    ids = llm.tokenizer.encode("four\nQuestion: five", special=False)
    assert answer_text(llm.tokenizer, ids) == "four"
