"""The GPU table of docs/PERFORMANCE.md is what its program makes of the results that are kept.

Stops: a figure on the page that no file holds, a rehearsal on a CPU taken for a card.
"""

import json

import pytest

from tools.gpu import depth
from tools.repo import gpu_table

MARKED = "before\n<!-- gpu: python -m tools.repo.gpu_table -->\nold\n<!-- /gpu -->\nafter\n"


def results(tmp_path, hardware="NVIDIA H200, 141 GiB, 132 SMs, CUDA 13.0", name="results.json"):
    cells = [
        dict(name="full", n=131072, test="tg", ms_median=8.51, share_of_floor=0.88),
        dict(name="omnikv-host w1 reuse 0.9", n=1048576, test="tg", ms_median=13.2),
        dict(name="omnikv w1", n=131072, test="tg", why="no memory"),
    ]
    prompt = dict(name="full", n=131072, test="pp131072", ms_median=13300.0)
    found = {
        "facts": {"hardware": hardware},
        "step": {"cells": cells},
        "prefill": {"cells": [prompt]},
        "mixtures": {
            "cells": [dict(name="gpt-oss-20b, 4 layers", n=8192, test="tg", ms_median=1.9)]
        },
        "start": {
            "ahead": {"load": 4.12, "answer": 5.2},
            "at the first launch": {"fault": "ended"},
        },
    }
    path = tmp_path / name
    path.write_text(json.dumps({"sections": found}))
    return path


def line(text, start):
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_page_holds_what_the_program_writes():
    page = gpu_table.PAGE.read_text(encoding="utf-8")
    kept = [gpu_table.KEPT] * gpu_table.KEPT.is_file()
    made = gpu_table.put(page, "gpu", gpu_table.table(gpu_table.sections(kept)))
    assert made == page, "stale: run `python -m tools.repo.gpu_table`"


def test_without_results_every_figure_is_not_measured():
    text = gpu_table.table({})
    measured = [row for row in text.splitlines() if "measured**" in row]
    assert len(measured) == len(gpu_table.ROWS)
    assert all(set(row.split("|")[2:-1]) <= {" not measured ", "  "} for row in measured)
    assert "Measured: nothing." in text and text.count("| not measured |\n") >= 3


def test_figures_come_from_the_files(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    assert gpu_table.main([str(results(tmp_path)), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "Measured on NVIDIA H200" in text
    assert line(text, "**full: measured")[2] == "8.51 (88%)"
    assert line(text, "**full: measured")[3] == "not measured"
    assert line(text, "while weights are read")[1:] == ["4.1", "5.2"]
    assert line(text, "at their first launch")[1:] == ["not measured"] * 2
    assert line(text, "**gpt-oss-20b, 4 layers: measured")[1] == "1.90"
    assert line(text, "**omnikv w1: measured")[2] == "not measured", (
        "a cell that failed has no time"
    )
    assert line(text, "**omnikv w1, host tier: measured")[5] == "13.20"
    assert line(text, "full, 131072 tokens")[1:] == ["<= 12", "13.3"]


@pytest.mark.parametrize("hardware", ["AMD EPYC, 2 cores, instruction set avx2", None])
def test_a_rehearsal_is_refused(tmp_path, hardware, capsys):
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    path = results(tmp_path, hardware)
    assert gpu_table.main([str(path), "--page", str(page)]) == 2
    assert "without the facts of a GPU" in capsys.readouterr().err and page.read_text() == MARKED
    assert gpu_table.main([str(tmp_path / "none.json"), "--page", str(page)]) == 2


def test_the_rows_of_mixtures_are_those_that_are_timed():
    assert gpu_table.MIXTURES == depth.MIXTURES
