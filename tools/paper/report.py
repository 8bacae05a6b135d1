"""The page of a table: ours and the paper's figures side by side with the difference, settings and
hardware of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tools.common import page
from tools.paper.table import Rows, Table
from tools.paper.values import Value

PLACES = {"share": 3, "seconds": 2}  # by the first word of a unit
NOT_AT_HAND, NOT_RUN = "not at hand", "not run"
NOTES = """Ours: the mean with its 95% interval and the number of answers, texts or timings behind
it. Beside full: less full attention's in the same column, ours and the paper's. These can be
compared between models; scores of two models cannot, and their difference is left out. Names
without figures of the paper are controls, or ours alone."""


def markdown(table: Table, model: str, figures: Rows, values: Sequence[Value], about: Any) -> str:
    """The page of one table on one model. figures: the paper's rows; about: {what: text} of this
    run, "same model" (whether `figures` are of this model) among them.
    """
    lines = [f"# {table.paper}, {table.place}: {table.about}", ""]
    lines += [f"- the paper: {table.settings}"]
    lines += [f"- the paper's figures: {table.source}" + ("" if figures else f"; {NOT_AT_HAND}")]
    if figures and not about["same model"]:
        lines += [f"- the paper's model is {about['paper model']}, ours another: see below"]
    lines += [f"- here: {model}, {about['settings']}", f"- {about['hardware']}"]
    lines += [f"- `{about['command']}`"]
    lines += [f"- not as in the paper: {table.differs}"] if table.differs else []
    rows = _rows(table, figures, values, about["same model"]) if figures else _plain(table, values)
    lines += ["", *rows]
    empty = [v.column for v in values if v.method == "full" and v.value == 0]
    if empty:
        lines += ["", f"Full attention has nothing in {', '.join(empty)}: nobody can lose there."]
    notes = {v.method: v.note for v in values if v.note}
    if notes:
        lines += ["", "A sparse layer reads: " + "; ".join(f"{k}: {v}" for k, v in notes.items())]
    return "\n".join([*lines, "", NOTES]) + "\n"


def _rows(table: Table, figures: Rows, values: Sequence[Value], same: bool) -> list[str]:
    places = PLACES.get(table.unit.split()[0], 1)
    ours = {(v.method, v.column): v for v in values}
    paper = {(m, c): value for m, row in figures.items() for c, value in row.items()}
    columns = dict.fromkeys(c for _, c in ours) or dict.fromkeys(c for _, c in paper)
    methods = dict.fromkeys(m for m, _ in [*ours, *paper])
    lines = []
    for column in columns:
        for method in methods:
            own, theirs = ours.get((method, column)), paper.get((method, column))
            if own is None and theirs is None:
                continue
            apart = own.value - theirs if own is not None and theirs is not None and same else None
            whole = ours.get((_whole(method, methods), column))
            mine = None if own is None or whole is None else own.value - whole.value
            base = paper.get((_whole(method, figures), column))
            theirs_beside = None if theirs is None or base is None else theirs - base
            beside = ("", "") if method == _whole(method, methods) else (mine, theirs_beside)
            shown = (
                column,
                method,
                NOT_RUN if own is None else _own(own, places),
                NOT_AT_HAND if theirs is None else f"{theirs:.{places}f}",
                _signed(apart, places),
                *(_signed(x, places) if not isinstance(x, str) else x for x in beside),
            )
            lines.append(shown)
    rest = [c for c in dict.fromkeys(c for _, c in paper) if c not in columns]
    head = f"{table.unit} | method | ours | paper | difference | beside full | paper beside full"
    found = page.table(head, lines, "---:")
    return found + (_not_run(figures, rest, places) if rest else [])


def _whole(method: str, methods: Iterable[str]) -> str:
    """Full attention's name beside a method: of the same command where several have their own."""
    own = [m for m in methods if m.endswith(" full") and method.startswith(m[: -len("full")])]
    return own[0] if own else "dense" if "dense" in methods else "full"


def _not_run(figures: Rows, columns: Sequence[str], places: int) -> list[str]:
    """The paper's columns that nothing here stands beside."""
    rows = [
        (method, *(f"{row[c]:.{places}f}" if c in row else "" for c in columns))
        for method, row in figures.items()
    ]
    return ["", "In the paper, not run here", "", *page.table(["method", *columns], rows, "---:")]


def _plain(table: Table, values: Sequence[Value]) -> list[str]:
    """Ours alone: a column for each method, or a row where there are many."""
    places = PLACES.get(table.unit.split()[0], 1)
    ours = {(v.method, v.column): _own(v, places) for v in values}
    methods, columns = (list(dict.fromkeys(key[i] for key in ours)) for i in (0, 1))
    across = len(methods) <= len(columns)
    down, over = (columns, methods) if across else (methods, columns)
    keys = {row: [(name, row) if across else (row, name) for name in over] for row in down}
    rows = [(row, *(ours.get(key, "") for key in found)) for row, found in keys.items()]
    return page.table([table.unit, *over], rows, "---:")


def _own(value: Value, places: int) -> str:
    spread = ""
    if value.low is not None and value.high is not None:
        spread = f" [{value.low:.{places}f}, {value.high:.{places}f}]"
    count = f" ({value.count})" if value.count else ""
    return f"{value.value:.{places}f}{spread}{count}"


def _signed(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:+.{places}f}"
