"""The columns at a share of the bytes that a step reads, budget by budget: what each really read,
how far it is in both set-ups, and how far from its oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.common.intervals import Interval
from tools.common.page import table
from tools.compare.methods import CONTROLS, REGISTRY, entry_of
from tools.fidelity import stats
from tools.fidelity.follow import Record

SETUPS = {"question": "sparse", "text": "dense"}  # {stream: who read the question}
READ = " Read "  # in the label of such a column
NOTE = """The budget of each method is the largest at which a step reads no more than that share of
full attention's bytes of K and V, layers that read everything and what is read to choose included;
"read" is what its steps then counted. Bounds are told what to read: their choosing is not counted.
Question sparse: after full attention has read the text's head, the method's own steps read the
question and the scored tokens; dense: full attention reads the question too, and has then looked up
what the question asks for. Above its oracle: KL less that of the best lists of the same
granularity, as many tokens in the same layers, on the same texts, question sparse. In brackets 95%
intervals of a bootstrap over texts."""


@dataclass(frozen=True)
class Point:
    """One method at one budget. read: the mean share of full attention's bytes that a step read; kl
    and top1: {"sparse" | "dense": Interval}; above: KL above its oracle, None where that was not
    run. family: "omnikv", "bound", "control" or "other".
    """

    shown: str
    family: str
    budget: float
    read: float
    kl: Mapping[str, Interval]
    top1: Mapping[str, Interval]
    above: Interval | None

    @property
    def order(self) -> float:
        """What a table is sorted by: the honest set-up's KL where there is one."""
        return self.kl["sparse" if "sparse" in self.kl else "dense"].mean


def points(records: Sequence[Record], length: int) -> list[Point]:
    """The columns of a length that were asked for by bytes read, but for oracles of one method,
    budget by budget, nearest first.
    """
    here = [r for r in records if r["length"] == length and r["stream"] in SETUPS]
    columns: dict[str, list[Record]] = {}
    for record in here:
        columns.setdefault(record["column"], []).append(record)
    full = {stats.place(r): r["bytes"] for r in columns.get("full", [])}
    found = []
    for label, some in columns.items():
        if READ in label and not of_one(some[0]["name"]):
            found.append(_point(some, columns, full))
    return sorted(found, key=lambda point: (point.budget, point.order))


def of_one(name: str) -> bool:
    """Whether an entry bounds one method of the table."""
    return name in REGISTRY and REGISTRY[name].of is not None


def _point(
    some: Sequence[Record], columns: Mapping[str, Sequence[Record]], full: Mapping[Any, int]
) -> Point:
    one, kl, top1 = some[0], {}, {}
    for stream, setup in SETUPS.items():
        own = [record for record in some if record["stream"] == stream]
        far, same = stats.mean(own, stats.kl_of), stats.mean(own, stats.same_of)
        if far is not None and same is not None:
            kl[setup], top1[setup] = far, same
    entry = entry_of(one["name"])
    told = entry.group == "bounds"
    shares = [
        (r["bytes"] + (0 if told else r["choosing"])) / full[stats.place(r)]
        for r in some
        if stats.place(r) in full
    ]
    stream = next(name for name, setup in SETUPS.items() if setup in kl)
    oracle = columns.get(f"{entry.oracle}{READ}{one['budget']:g}%", []) if entry.oracle else []
    beside = [[r for r in side if r["stream"] == stream] for side in (some, oracle)]
    # an oracle's layers are those of the first filter set
    first = not one["filters"] or one["filters"] == _first_set(columns)
    return Point(
        shown=" ".join(filter(None, (one["name"], one["filters"]))),
        family=_family(one["name"]),
        budget=one["budget"],
        read=sum(shares) / len(shares) if shares else float("nan"),
        kl=kl,
        top1=top1,
        above=stats.difference(*beside) if oracle and first else None,
    )


def _first_set(columns: Mapping[str, Sequence[Record]]) -> str:
    """The filter set that all kinds of OmniKV ran on."""
    kinds = [r[0]["filters"] for r in columns.values() if r[0]["filters"]]
    return str(kinds[0]) if kinds else ""


def _family(name: str) -> str:
    if name in CONTROLS or name.startswith("random"):
        return "control"
    if entry_of(name).group == "bounds":
        return "bound"
    return "omnikv" if name.startswith("omnikv") else "other"


def lines_of(records: Sequence[Record], length: int) -> list[str]:
    """Markdown: a table per budget; none without such columns."""
    found = points(records, length)
    if not found:
        return []
    lines = ["", f"## At equal bytes read, {length:,} tokens", "", NOTE]
    for budget in sorted({point.budget for point in found}):
        here = [point for point in found if point.budget == budget]
        lines += [
            "",
            f"### {budget:g}% of full attention's bytes",
            "",
            *table(
                "method | texts | read | KL, question sparse | KL, question dense | "
                "top-1, sparse | dense | KL above its oracle",
                map(_cells, here),
            ),
        ]
    return lines


def _cells(point: Point) -> list[str]:
    def shown(figures: Mapping[str, Interval], setup: str, form: str) -> str:
        return figures[setup].shown(form) if setup in figures else ""

    role = f" ({point.family})" if point.family in ("bound", "control") else ""
    return [
        point.shown + role,
        f"{next(iter(point.kl.values())).texts}",
        f"{100 * point.read:.1f}%",
        *(shown(point.kl, setup, ".3f") for setup in ("sparse", "dense")),
        *(shown(point.top1, setup, ".2f") for setup in ("sparse", "dense")),
        "" if point.above is None else point.above.shown("+.3f"),
    ]
