"""Fill the GPU table of docs/PERFORMANCE.md from what check_gpu found on a card.

    python -m tools.repo.gpu_table [FILE ...]

FILE: results.json of its commands; without any, benchmarks/results/check-gpu/results.json where it
is there. A figure that no file holds is "not measured". Results of a rehearsal are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from tools.common.page import line
from tools.common.program import guarded, replace_text
from tools.repo.pages import put

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "PERFORMANCE.md"
KEPT = ROOT / "benchmarks" / "results" / "check-gpu" / "results.json"
NONE = "not measured"
MIXTURES = ("gpt-oss-20b", "qwen3-30b-a3b-2507")  # tools/gpu/depth.py times four layers of each
DEPTHS = (8192, 131072, 262144, 450000, 1048576)
# (row, names of cells in the order they are looked for, floor at 4.3 TB/s or "", goal) by depth
ROWS: tuple[tuple[str, tuple[str, ...], dict[int, str], dict[int, str]], ...] = (
    (
        "full",
        ("full",),
        {8192: "3.74", 131072: "7.49", 262144: "11.5", 450000: "17.2"},
        {131072: "<= 8.8", 262144: "85%", 450000: "85%"},
    ),
    (
        "omnikv w1",
        ("omnikv w1",),
        {8192: "3.61", 131072: "4.54", 262144: "5.54", 450000: "6.97"},
        {131072: "<= 5.7", 450000: "<= 8.2"},
    ),
    (
        "omnikv w1, host tier",
        ("omnikv-host w1 reuse 0.9", "omnikv-host w1 reuse 0.7"),
        {1048576: "11.5"},
        {131072: "1.10x", 450000: "1.05x", 1048576: "<= 14.3"},
    ),
    ("full, int4 weights", ("full, int4 weights",), {8192: "1.4"}, {8192: "75%"}),
    ("full, int8 weights", ("full, int8 weights",), {8192: "2.1"}, {8192: "75%"}),
    ("full, int8 bank", ("full, int8 bank",), {131072: "5.6"}, {}),
    ("omnikv w1, int8 bank", ("omnikv w1, int8 bank",), {131072: "4.0"}, {}),
    ("full, batch of 8 (a step)", ("full, batch of 8",), {}, {}),
    *((name, (name,), {}, {}) for name in (f"{alias}, 4 layers" for alias in MIXTURES)),
)
# (row, name of check_gpu's figure)
STARTS = (("while weights are read", "ahead"), ("at their first launch", "at the first launch"))
PROMPTS = (("full", 131072, "<= 12"), ("omnikv r=2", 131072, ""), ("omnikv r=2", 262144, ""))


def sections(paths: Sequence[Path]) -> dict[str, Any]:
    """The sections of several results files, a later file's before an earlier one's. Raises
    UsageError for a file that holds none, or none of a GPU.
    """
    found: dict[str, Any] = {}
    for path in paths:
        try:
            found |= json.loads(path.read_text(encoding="utf-8"))["sections"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"found no results in {path}, expected check_gpu's results.json"
            ) from error
    if found and "CUDA" not in str((found.get("facts") or {}).get("hardware")):
        raise UsageError(
            "found results without the facts of a GPU, expected those of check_gpu's first command"
        )
    return found


def cell(found: dict[str, Any], names: Sequence[str], test: str, n: int) -> dict[str, Any] | None:
    """The first cell with a time of that name, test and depth."""
    for name in names:
        for section in found.values():
            for one in section.get("cells", ()) if isinstance(section, dict) else ():
                if (one["name"], one["test"], one["n"]) == (name, test, n) and "ms_median" in one:
                    return one
    return None


def table(found: dict[str, Any]) -> str:
    """The part of the page between its marks."""
    facts = found.get("facts")
    where = "Measured: nothing." if not facts else f"Measured on {facts['hardware']}."
    lines = [
        where,
        "",
        line(["ms a token at", *map(str, DEPTHS)]),
        line(["---", *["---:"] * len(DEPTHS)]),
    ]
    for label, names, floors, goals in ROWS:
        for kind, known in (("floor", floors), ("goal", goals)):
            if known:
                lines.append(line([f"{label}: {kind}", *(known.get(n, "") for n in DEPTHS)]))
        asked = {*floors, *goals} or {8192}
        lines.append(
            line([f"**{label}: measured**", *(_time(found, names, n, n in asked) for n in DEPTHS)])
        )
    lines += ["", line(["prompt, s", "goal", "measured"]), line(["---", "---:", "---:"])]
    for name, n, goal in PROMPTS:
        one = cell(found, (name,), f"pp{n}", n)
        seconds = NONE if one is None else f"{one['ms_median'] / 1e3:.1f}"
        lines.append(line([f"{name}, {n} tokens", goal, seconds]))
    lines += [
        "",
        line(["first answer of a fresh machine, kernels compiled", "load, s", "token, s"]),
    ]
    lines.append(line(["---", "---:", "---:"]))
    for label, name in STARTS:
        facts = (found.get("start") or {}).get(name, {})
        lines.append(line([label, *(_seconds(facts, key) for key in ("load", "answer"))]))
    return "\n".join(lines) + "\n"


def _seconds(facts: dict[str, Any], key: str) -> str:
    return f"{facts[key]:.1f}" if key in facts else NONE


def _time(found: dict[str, Any], names: Sequence[str], n: int, asked: bool) -> str:
    one = cell(found, names, "tg", n)
    if one is None:
        return NONE if asked else ""
    share = f" ({one['share_of_floor']:.0%})" if "share_of_floor" in one else ""
    return f"{one['ms_median']:.2f}{share}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page. Exit code 0, or 2 for a file without results of a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.repo.gpu_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def work() -> None:
        files = args.files or [KEPT] * KEPT.is_file()
        page = args.page.read_text(encoding="utf-8")
        replace_text(args.page, put(page, "gpu", table(sections(files))))

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
