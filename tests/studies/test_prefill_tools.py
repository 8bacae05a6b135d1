"""prefill_table and prefill_quality: their arithmetic, and a run of each on a tiny model."""

import json

import pytest

from tools.studies.prefill import block_recall, quality, table
from tools.studies.prefill.speed import integrate


def test_integrate_is_exact_where_time_is_affine_in_depth():
    points = [(first, 3.0 + 0.5 * first) for first in (0, 128, 896)]
    assert integrate(points, 1024, 128) == pytest.approx(
        sum(3.0 + 0.5 * first for first in range(0, 1024, 128))
    )


def test_table_of_a_tiny_shape(tmp_path, capsys):
    arguments = [
        "--shape",
        "tiny",
        "--lengths",
        "1K",
        "2K",
        "--ratios",
        "1",
        "--chunk",
        "256",
        "--block",
        "64",
        "--repeats",
        "1",
        "--eta",
        "1K",
        "--parts",
        "speed",
        "eta",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert table.main(arguments) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    records = report["speed"]["records"]
    assert [(r["length"], r["method"]) for r in records] == [
        (n, m) for n in (1024, 2048) for m in ("dense", "r=1")
    ]
    assert records[0]["allowed"] == 1.0 and all(r["seconds"] > 0 for r in records)
    assert [r["method"] for r in report["eta"]] == ["dense"] * 3 + ["r=1"] * 3
    page = capsys.readouterr().out
    assert "## Time and operations" in page and page == (tmp_path / "report.md").read_text() + "\n"


def test_quality_table_and_pairs():
    found = [("dense", None, 0, 0, 0, None), ("r=1", 1, 64, 1, 0, None)]
    records = [
        {
            "setting": name,
            "task": task,
            "seed": 0,
            "question": q,
            "right": right,
            "nats": nats,
            "rows": 0,
        }
        for name, rights, nats in (("dense", (1, 0, 1), 1.0), ("r=1", (1, 1, 0), 2.0))
        for task, q, right in zip(("kv", "kv", "chains"), (0, 1, 0), rights)
    ]
    rows = quality.table(found, records, ["kv", "chains"])
    assert rows[0] == ("dense", {"kv": (1, 2, 1.0), "chains": (1, 1, 1.0)}, 0.75, 1.0)
    assert rows[1][2:] == (0.5, 2.0) and quality.paired(records, "r=1") == (1, 1)
    assert "| r=1 | 100 (2.00) | 0 (2.00) | 50.0 (2.000) | 1 / 1 |" in quality.markdown(
        {}, found, records, ["kv", "chains"]
    )


def test_wrong_task_is_refused(capsys):
    with pytest.raises(SystemExit):
        quality.main(["--tasks", "nothing"])
    assert "found 'nothing'" in capsys.readouterr().err


def test_block_recall_finds_layers_in_the_shipped_model(capsys):
    """Its calibration has no wait layer, and the study ended in StopIteration."""
    arguments = ["--length", "900", "--thresholds", "0.9", "--threads", "1"]
    assert block_recall.main(arguments) == 0
    said = capsys.readouterr().out
    assert "layers [1, 3]" in said
    recalls = [float(line.split("|")[4]) for line in said.splitlines() if "| 0.9 |" in line]
    assert len(recalls) == 3 and recalls[0] >= 0.9, "the oracle keeps what was wanted"
