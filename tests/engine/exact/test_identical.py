"""A sample of the long comparison (tests/programs/identical): exact mode's answers are full
attention's, and the judge finds one that is not.

Stops: a difference called a tie, an answer compared with itself, a run that repeats what it has.
"""

import json

import pytest

from engine.exact.runner import ExactRunner
from tests.programs.identical.__main__ import main, records, run, summary
from tests.programs.identical.cells import BUDGETS, DRAFTS, KINDS, Cell, cells, llm_of, prompt_of
from tests.programs.identical.judge import Difference, full_answer

TOKENS = 24


def sample(model, dtype):
    """Both tiers of one prompt of random token ids, which both dtypes answer."""
    return [Cell(model, dtype, 21, offload) for offload in ("device", "host")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["pocket", "random"])
def test_a_sample_of_the_answers(model, dtype):
    rows = list(run(sample(model, dtype), None, TOKENS))
    text, good = summary({row["cell"]: row for row in rows}, (model,))
    assert good, text
    for row in rows:
        assert row["tokens"] == TOKENS and row["least_read"] < row["length"]
        assert row["drafted"] > 8 and row["accepted"] > 0
        if model == "random":
            assert row["drafted"] > row["accepted"] + 7  # more than one open cycle leaves
        # to the bit where a CPU's kernels give a query the same sums in a window as alone
        assert row["logits_differ"] < (1e-3 if dtype == "float32" else 0.5)


def test_the_judge_finds_drafts_that_nobody_checked(monkeypatch):
    """Every draft is taken for right: its logits follow from another token than the one written."""
    ready = ExactRunner._ready

    def unjudged(self, n):
        if self._cycle is not None and self._cycle.accepted < len(self._cycle.drafts):
            self._cycle.drafts[self._cycle.accepted] = self._fed
        return ready(self, n)

    monkeypatch.setattr(ExactRunner, "_ready", unjudged)
    for dtype in ("float32", "bfloat16"):
        rows = list(run(sample("random", dtype)[:1], None, TOKENS))
        assert any(not Difference(**found).is_tie for found in rows[0]["differences"])
        assert not summary({row["cell"]: row for row in rows}, ("random",))[1]


def test_full_attention_writes_the_same_over_a_host_tier():
    """In float32; rows that stream from host memory are added up part by part, so that logits
    differ by rounding.
    """
    cell = Cell("random", "float32", 2, "host")
    llm = llm_of(cell, None)
    ids = prompt_of(cell, llm)
    here, there = (full_answer(llm, ids, 8, offload) for offload in ("device", "host"))
    assert here[0] == there[0]
    assert (here[1] - there[1]).abs().max() <= 1e-4 * here[1].abs().max()


def test_what_is_a_tie():
    assert Difference(3, gap=0.2, rank=1, rounding=0.1).is_tie
    assert Difference(3, gap=0.0, rank=0, rounding=0.0).is_tie
    assert not Difference(3, gap=0.21, rank=1, rounding=0.1).is_tie
    assert not Difference(3, gap=0.1, rank=2, rounding=0.1).is_tie


def test_cells_cover_every_combination_and_a_part_of_them_many():
    """Kinds of text, budgets and draft lengths, on each tier; no cell twice."""
    known = list(cells(("real", "pocket", "random")))
    assert len({cell.name for cell in known}) == len(known) == 3 * 2 * (40 + 10)
    for prompts, least in ((16, 16), (40, len(KINDS) * len(BUDGETS) * len(DRAFTS))):
        for offload in ("device", "host"):
            own = [cell for cell in cells(("real",), prompts) if cell.offload == offload]
            assert len({(cell.kind, cell.budget, cell.draft) for cell in own}) >= least


def test_a_run_goes_on_where_it_stopped_and_sums_up(tmp_path, capsys, monkeypatch):
    out = tmp_path / "identical.jsonl"
    monkeypatch.setattr("tests.programs.identical.__main__.MODELS", ("real", "random"))
    monkeypatch.setattr("tests.programs.identical.__main__.run", fake_run)
    for count in (1, 2):
        assert main(["--out", str(out), "--cpu-minutes", "0"]) == 0
        assert len(records(out)) == count
    assert main(["--out", str(out), "--summary"]) == 0
    assert "| random | float32 | device | 1 | 40 | 200 | 0 | 0 |" in capsys.readouterr().out
    row = json.loads(out.read_text().splitlines()[0])
    row["differences"] = [{"position": 1, "gap": 0.0, "rank": 0, "rounding": 1.0}]
    out.write_text(json.dumps(row) + "\n")
    assert main(["--out", str(out), "--summary"]) == 1  # float32 has no ties


def fake_run(todo, folder):
    """Records of cells without their answers."""
    for cell in todo:
        yield {
            "cell": cell.name,
            "draft": 4,
            "tokens": 200,
            "drafted": 8,
            "accepted": 2,
            "least_read": 72,
            "length": 600,
            "logits_differ": 1e-5,
            "differences": [],
        }
