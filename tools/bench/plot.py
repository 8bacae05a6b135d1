"""Three plots of a benchmark summary: ms per token by context with the floor, speed-up by context,
memory by context. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.common.page import pyplot, saved


def plots(summary: dict[str, Any], folder: Path | str) -> list[Path]:
    """Write latency.png, speedup.png and memory.png into a folder; returns their paths. Raises
    ImportError without matplotlib.
    """
    if pyplot() is None:
        raise ImportError("matplotlib")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    panels: list[tuple[str, str, Callable]] = [
        ("latency", "ms per token (median)", _latency),
        ("speedup", "times as fast as full attention", _speedup),
        ("memory", "GB beside the weights", _memory),
    ]
    return [_figure(summary, folder / f"{name}.png", label, draw) for name, label, draw in panels]


def _figure(summary: dict[str, Any], path: Path, label: str, draw: Callable) -> Path:
    model, hardware = summary["model"], summary["header"]["hardware"].split(",")[0]
    ticks = sorted({cell["n"] for cell in _cells(summary)})
    fig, ax = pyplot().subplots(figsize=(7.5, 4.8))
    draw(ax, summary)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=20)
    ax.set_xlabel("tokens of context")
    ax.set_ylabel(label)
    ax.set_title(f"{model['name']}, {model['dtype']}, {hardware}", fontsize=10)
    ax.grid(True, alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8)
    fig.tight_layout()
    return saved(fig, path, 130)


def _cells(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The decode cells that have a time."""
    return [c for c in summary["cells"] if c["test"] == "tg" and "ms_median" in c]


def _names(summary: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(c["name"] for c in _cells(summary)))


def _rows(summary: dict[str, Any], name: str, key: str) -> tuple[list[int], list[float]]:
    """(contexts, values) of one method."""
    found = sorted(
        (c["n"], c[key]) for c in _cells(summary) if c["name"] == name and c.get(key) is not None
    )
    return [n for n, _ in found], [value for _, value in found]


def _latency(ax: Any, summary: dict[str, Any]) -> None:
    for number, name in enumerate(_names(summary)):
        color = f"C{number}"
        ax.plot(*_rows(summary, name, "ms_median"), "o-", color=color, label=name)
        floor = _rows(summary, name, "floor_ms")
        if floor[0]:
            ax.plot(*floor, ":", color=color, label=f"{name}, floor")
    ax.set_yscale("log")
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}")


def _speedup(ax: Any, summary: dict[str, Any]) -> None:
    for number, name in enumerate(_names(summary)):
        found = _rows(summary, name, "vs_full")
        if found[0]:
            ax.plot(*found, "o-", color=f"C{number}", label=name)
    ax.axhline(1.0, color="black", linewidth=0.8, label="full attention")


def _memory(ax: Any, summary: dict[str, Any]) -> None:
    for number, name in enumerate(_names(summary)):
        found = sorted(
            (m["n"], m["planned"] / 1e9, m["measured"] / 1e9)
            for m in summary["memory"]
            if m["name"] == name and m["n"]
        )
        for column, line, what in ((2, "o-", "measured"), (1, ":", "planned")):
            if found:
                ax.plot(
                    [row[0] for row in found],
                    [row[column] for row in found],
                    line,
                    color=f"C{number}",
                    label=f"{name}, {what}",
                )
