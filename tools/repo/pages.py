"""What pages say of the code's structure, made from the same tables that tests hold the code to:
the floors in docs/architecture.svg, the rooms of docs/ARCHITECTURE.md, the core's size.

`python -m tools.repo.house --picture` writes it between markers; tests/test_house.py compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

SESSION = {"engine.llm", "engine.batch", "engine.session", "engine.runner", "engine.forward"}
LEFT, TOP, WIDE, HIGH, STEP = 24, 52, 404, 20, 25  # of a floor's boxes, in the drawing's units
COLOURS = {"tools": "top", "engine": "meth", "kernels": "wait", "weights": "wait"}
LOW = {"engine.plan", "engine.model", "engine.base", "engine.bank"}


def put(page: str, mark: str, content: str) -> str:
    """A page with `content` between the two comments that name `mark`. Raises ValueError where the
    page has no such place.
    """
    place = re.compile(rf"(<!-- {mark}: [^>]*-->\n)(.*?)( *<!-- /{mark} -->)", re.DOTALL)
    changed, count = place.subn(lambda found: found[1] + content + found[3], page)
    if count != 1:
        raise ValueError(f"{mark}: found {count} marked places, expected 1")
    return changed


def drawn(floors: Sequence[Sequence[str]]) -> str:
    """The floors as boxes, the top of the house first; all of tools is one floor."""
    rows: list[Sequence[str]] = [["tools"]]
    rows += [names for names in floors if not any(n.split(".")[0] == "tools" for n in names)]
    lines = []
    for number, names in enumerate(rows):
        y, wide = TOP + number * STEP, (WIDE - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            x = LEFT + place * (wide + 8)
            kind = COLOURS[name.split(".")[0]]
            kind = "step" if name in SESSION else "base" if name in LOW else kind
            lines.append(
                f'    <rect class="{kind}" x="{x:.0f}" y="{y}" width="{wide:.0f}" '
                f'height="{HIGH}" rx="4"/>\n'
                f'    <text class="note" x="{x + 10:.0f}" y="{y + 14}">'
                f"{escape(name.replace('.', '/'))}</text>\n"
            )
    return "".join(lines)


def rooms_table(said: Mapping[str, str], core: Mapping[str, int]) -> str:
    """A row for every room: {room: what it is for}, {file of the core: lines}."""
    rows = ["| room | what it is for | of the core |", "|---|---|---|"]
    for room, text in said.items():
        path = room.replace(".", "/")
        inside = [name for name in core if name.startswith(f"{path}/") or name == f"{path}.py"]
        files = f"{len(inside)} file{'s' * (len(inside) != 1)}" if inside else "skip"
        rows.append(f"| `{path}` | {text} | {files} |")
    return "\n".join(rows) + "\n"


def core_sentence(core: Mapping[str, int], whole: int) -> str:
    """How large the core is, in hundreds of lines."""
    size, whole = round(sum(core.values()), -2), round(whole, -2)
    return (
        f"The core, what one answer of one model on one device goes through, is {len(core)} files\n"
        f"with {size:,} of {whole:,} lines of Python. `python -m tools.repo.core` lists it.\n"
    )
