"""The parts of a report: Markdown tables, and figures where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(
    columns: str | Sequence[str], rows: Iterable[Sequence[object]], align: str = "---"
) -> list[str]:
    """Lines of a Markdown table. columns: their names, or a text with " | " between them; align: of
    every column but the first, "---:" to the right.
    """
    names = columns.split(" | ") if isinstance(columns, str) else list(columns)
    return [line(names), "|---|" + f"{align}|" * (len(names) - 1), *map(line, rows)]


def line(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def saved(figure: Any, path: Path, dpi: int = 110, **more: Any) -> Path:
    """Write a figure and let it go."""
    figure.savefig(path, dpi=dpi, **more)
    pyplot().close(figure)
    return path
