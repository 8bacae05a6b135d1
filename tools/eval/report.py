"""Tables, JSON and plots of an evaluation's answers (tools/eval/cli.py): exact match with Wilson
intervals, agreement with full attention.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

DEPTH_BINS = 5


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927): sound at 0 and 1 and for few answers. (0, 1)
    where nothing was asked.
    """
    if not asked:
        return 0.0, 1.0
    share = right / asked
    middle = (share + z * z / (2 * asked)) / (1 + z * z / asked)
    half = (
        z
        / (1 + z * z / asked)
        * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def summarise(records: list[dict]) -> list[dict]:
    """One row per (method, task, length), in order of first appearance: right, asked, accuracy,
    low, high, agree, depths.

    agree: share of answers with exactly the tokens of the method called "full", None where that was
    not run. depths: per bin of the document [right, asked].
    """
    full = {
        (r["task"], r["length"], r["seed"], r["question"]): r["tokens"]
        for r in records
        if r["method"] == "full"
    }
    cells: dict[tuple, list] = defaultdict(list)
    for record in records:
        cells[record["method"], record["task"], record["length"]].append(record)
    rows = []
    for (method, task, length), found in cells.items():
        right, asked = sum(r["right"] for r in found), len(found)
        low, high = wilson(right, asked)
        same = [
            full[key] == r["tokens"]
            for r in found
            if (key := (r["task"], r["length"], r["seed"], r["question"])) in full
        ]
        depths = [[0, 0] for _ in range(DEPTH_BINS)]
        for record in found:
            if record["depth"] is not None:
                cell = depths[min(DEPTH_BINS - 1, int(record["depth"] * DEPTH_BINS))]
                cell[0] += record["right"]
                cell[1] += 1
        rows.append(
            {
                "method": method,
                "task": task,
                "length": length,
                "right": right,
                "asked": asked,
                "accuracy": right / asked,
                "low": low,
                "high": high,
                "agree": sum(same) / len(same) if same else None,
                "depths": depths,
            }
        )
    return rows


def overall(rows: list[dict]) -> list[dict]:
    """Per (method, length): the mean accuracy over tasks, and the pooled agreement with full
    attention.
    """
    cells: dict[tuple, list] = defaultdict(list)
    for row in rows:
        cells[row["method"], row["length"]].append(row)
    out = []
    for (method, length), found in cells.items():
        agreed = [
            (row["agree"] * row["asked"], row["asked"]) for row in found if row["agree"] is not None
        ]
        out.append(
            {
                "method": method,
                "length": length,
                "accuracy": sum(r["accuracy"] for r in found) / len(found),
                "tasks": len(found),
                "agree": sum(a for a, _ in agreed) / sum(n for _, n in agreed) if agreed else None,
            }
        )
    return out


def markdown(rows: list[dict], about: dict) -> str:
    """The report as a page: settings, one table per length with a column per method, means,
    accuracy by depth.
    """
    lines = [
        "# Evaluation",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "Exact match of whole answers, greedy decoding; in brackets the 95% Wilson interval.",
    ]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by = {(r["method"], r["task"], r["length"]): r for r in rows}
    for length in sorted({row["length"] for row in rows}):
        lines += [
            "",
            f"## {length:,} tokens",
            "",
            "| task | answers | " + " | ".join(methods) + " |",
            "|---" * (len(methods) + 2) + "|",
        ]
        for task in dict.fromkeys(row["task"] for row in rows if row["length"] == length):
            found = [by.get((method, task, length)) for method in methods]
            shown = [
                f"{c['accuracy']:.3f} [{c['low']:.2f}, {c['high']:.2f}]" if c else "" for c in found
            ]
            asked = max(c["asked"] for c in found if c)
            lines.append(f"| {task} | {asked} | " + " | ".join(shown) + " |")
        means = {r["method"]: r for r in overall(rows) if r["length"] == length}
        shown = [f"**{means[m]['accuracy']:.3f}**" if m in means else "" for m in methods]
        lines.append("| **mean over tasks** | | " + " | ".join(shown) + " |")
        agree = [
            f"{means[m]['agree']:.3f}" if m in means and means[m]["agree"] is not None else ""
            for m in methods
        ]
        lines.append("| same tokens as full | | " + " | ".join(agree) + " |")
    bins = " | ".join(f"{i / DEPTH_BINS:.1f}-{(i + 1) / DEPTH_BINS:.1f}" for i in range(DEPTH_BINS))
    lines += [
        "",
        "## By depth of the evidence",
        "",
        f"| method | task | tokens | {bins} |",
        "|---" * (DEPTH_BINS + 3) + "|",
    ]
    for row in rows:
        cells = [f"{r / n:.2f} ({n})" if n else "" for r, n in row["depths"]]
        lines.append(
            f"| {row['method']} | {row['task']} | {row['length']:,} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines) + "\n"


def write(records: list[dict], about: dict, folder: Path) -> str:
    """report.md and report.json, and plots where matplotlib is installed; returns the page."""
    rows = summarise(records)
    page = markdown(rows, about)
    (folder / "report.md").write_text(page, encoding="utf-8")
    (folder / "report.json").write_text(
        json.dumps({"about": about, "cells": rows, "means": overall(rows)}, indent=1) + "\n",
        encoding="utf-8",
    )
    plots(rows, folder)
    return page


def plots(rows: list[dict], folder: Path) -> list[Path]:
    """accuracy.png (accuracy by length, a line per method, a panel per task) and depth-METHOD.png
    (heat map by depth and length).
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "task"))
    lengths = sorted({row["length"] for row in rows})
    across = min(4, len(tasks))
    down = -(-len(tasks) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(3.2 * across, 2.6 * down), squeeze=False, sharey=True
    )
    for axis, task in zip(axes.flat, tasks):
        for method in methods:
            found = sorted(
                (r for r in rows if r["task"] == task and r["method"] == method),
                key=lambda r: r["length"],
            )
            axis.errorbar(
                [r["length"] for r in found],
                [r["accuracy"] for r in found],
                marker="o",
                markersize=3,
                capsize=2,
                label=method,
                yerr=[
                    [max(0.0, r["accuracy"] - r["low"]) for r in found],
                    [max(0.0, r["high"] - r["accuracy"]) for r in found],
                ],
            )
        axis.set(title=task, ylim=(-0.03, 1.05), xscale="log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=7)
        # a log axis writes 2 x 10^3 between the lengths
        axis.minorticks_off()
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    paths = [_saved(figure, folder / "accuracy.png")]
    for method in methods:
        figure, axis = pyplot.subplots(figsize=(1.2 + 0.9 * len(lengths), 3))
        grid = [
            [_depth_share(rows, method, length, depth) for length in lengths]
            for depth in range(DEPTH_BINS)
        ]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axis.set_yticks(range(DEPTH_BINS), [f"{100 * i // DEPTH_BINS}%" for i in range(DEPTH_BINS)])
        axis.set(title=method, xlabel="tokens", ylabel="depth")
        figure.colorbar(image)
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in method)
        paths.append(_saved(figure, folder / f"depth-{safe}.png"))
    return paths


def _depth_share(rows: list[dict], method: str, length: int, depth: int) -> float:
    cells = [r["depths"][depth] for r in rows if r["method"] == method and r["length"] == length]
    asked = sum(n for _, n in cells)
    return sum(r for r, _ in cells) / asked if asked else math.nan


def _saved(figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
