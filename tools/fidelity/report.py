"""The report of a measurement: report.md, summary.json and a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.common import page
from tools.common.documents import KINDS
from tools.common.intervals import Interval
from tools.common.program import replace_json, replace_text
from tools.compare.methods import REGISTRY
from tools.fidelity import stats
from tools.fidelity.equal import plot as equal_plot
from tools.fidelity.equal.tables import lines_of, points
from tools.fidelity.follow import Record
from tools.fidelity.plot import plot

Groups = dict[str, list[Record]]
HEAD = """KL is of full attention's next-token distribution to the method's, in nats, mean over
positions; top-1 the share of positions at which both say the same token. In brackets 95% intervals
of a bootstrap over texts. chosen: tokens that a layer which reads a part chooses or keeps; rows:
what it reads in a step, recent tokens included; MB: keys and values read per step by all layers,
what is read to choose included (but for bounds, which are told), and their share of full
attention's. Mass kept: the share of a sparse layer's attention on the rows that it reads, mean over
heads, layers and positions; its oracle's: the most that as many rows by as many lists could have
had of the same attention."""
CONTROLS = """`random` chooses uniformly, `newest` the tokens before the recent ones, `one` the
single best token; filter layers, wait layers and recent tokens are OmniKV's. Figures are KL of the
control less KL of OmniKV on the same texts, all lengths and streams together. Where a control is
not clearly worse, the model and these texts say nothing about OmniKV's choice."""
ANSWER = """Full attention answers greedily after the same head; each method follows that answer.
same: tokens after the first that a method's own greedy answer has in common with it before they
differ."""
NEEDLES = """A sentence at a random depth of a real text, asked for through the chat template.
askable: the questions that full attention answers; in brackets the 95% Wilson interval, which takes
the questions about one text for independent."""


def grouped(records: Sequence[Record], stream: str, length: int | None = None) -> Groups:
    """{column: its records} of one stream, at one length or at all."""
    found: Groups = defaultdict(list)
    for record in records:
        if record["stream"] == stream and length in (None, record["length"]):
            found[record["column"]].append(record)
    return dict(sorted(found.items(), key=lambda item: item[1][0]["column"] != "full"))


def row(found: Sequence[Record], full: Sequence[Record]) -> dict[str, Any]:
    """One column's figures at one length and stream. full: full attention's records there."""
    of_full = {stats.place(record): record["bytes"] for record in full}
    read = [_read(record) for record in found]
    shares = [b / of_full[stats.place(r)] for b, r in zip(read, found) if stats.place(r) in of_full]
    masses = [sum(r["mass"].values()) / len(r["mass"]) for r in found if r["mass"]]
    kinds = {}
    for kind in KINDS:
        some = stats.mean([r for r in found if r["kind"] == kind], stats.kl_of)
        if some is not None:
            kinds[kind] = some.mean
    rows = [r["rows"] for r in found if r["rows"] is not None]
    return {
        **{name: found[0][name] for name in ("column", "name", "budget", "filters", "wait")},
        "length": found[0]["length"],
        "stream": found[0]["stream"],
        "texts": len(found),
        "chosen": _mean([r["chosen"] for r in found]),
        "rows": _mean(rows),
        "bytes": _mean(read),
        "share": _mean(shares),
        "kl": stats.mean(found, stats.kl_of),
        "top1": stats.mean(found, stats.same_of),
        "until": stats.mean(found, stats.until_of),
        "kinds": kinds,
        "mass": _mean(masses),
        "most": _mean([sum(r["most"].values()) / len(r["most"]) for r in found if r.get("most")]),
    }


def _read(record: Record) -> int:
    """Bytes of a step, with those that are read to choose; an oracle is told."""
    told = record["name"] in REGISTRY and REGISTRY[record["name"]].group == "bounds"
    return record["bytes"] + (0 if told else record.get("choosing", 0))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """`row` of every column, length and stream."""
    found = []
    for stream in ("text", "answer"):
        lengths = sorted({r["length"] for r in records if r["stream"] == stream})
        for length in lengths:
            groups = grouped(records, stream, length)
            found += [row(some, groups.get("full", [])) for some in groups.values()]
    return found


def verdicts(records: Sequence[Record]) -> list[stats.Verdict]:
    """What the controls say about every OmniKV column, over all lengths and both streams."""
    groups: Groups = defaultdict(list)
    for record in records:
        if record["stream"] not in ("needle", "asked"):
            groups[record["column"]].append(record)
    return [
        stats.verdict(groups, column)
        for column, found in groups.items()
        if found[0]["name"] == "omnikv"
    ]


# -------------------------------------------------------------------- Markdown


def _number(value: float | None, form: str = ".0f") -> str:
    return "" if value is None else f"{value:{form}}"


def _cost(found: Mapping[str, Any]) -> list[str]:
    share = "" if found["share"] is None else f" ({100 * found['share']:.0f}%)"
    return [
        found["column"],
        _number(found["chosen"]),
        _number(found["rows"]),
        f"{found['bytes'] / 1e6:.1f}{share}",
        str(found["texts"]),
    ]


def _kept(found: Mapping[str, Any]) -> list[str]:
    """The attention mass that a choice keeps, what as many rows could, and the difference."""
    mass, most = found["mass"], found["most"]
    lost = None if mass is None or most is None else most - mass
    return [_number(value, ".3f") for value in (mass, most, lost)]


def _text_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds = [kind for kind in KINDS if any(kind in found["kinds"] for found in rows)]
    mass = any(found["mass"] is not None for found in rows)
    lines = []
    for found in rows:
        line = [*_cost(found), found["kl"].shown(), found["top1"].shown(".2f")]
        line += [_number(found["kinds"].get(kind), ".3f") for kind in kinds]
        lines.append(line + (_kept(found) if mass else []))
    head = ["column", "chosen", "rows", "MB a step", "texts", "KL", "top-1"]
    head += [f"KL {kind}" for kind in kinds]
    head += ["mass kept", "its oracle's", "its choice loses"] if mass else []
    return page.table(head, lines)


def _answer_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return page.table(
        ["column", "MB a step", "texts", "KL", "top-1", "same"],
        [
            [
                found["column"],
                _cost(found)[3],
                str(found["texts"]),
                found["kl"].shown(),
                found["top1"].shown(".2f"),
                found["until"].shown(".1f"),
            ]
            for found in rows
        ],
    )


def _verdict_table(found: Sequence[stats.Verdict]) -> list[str]:
    names = [name.removeprefix("omnikv_") for name in stats.CONTROLS]
    return page.table(
        ["column", *names, "verdict"],
        [
            [
                v.column,
                *(v.differences[n].shown("+.3f") if n in v.differences else "" for n in names),
                v.words,
            ]
            for v in found
        ],
    )


def _needle_table(groups: Groups) -> list[str]:
    askable = {stats.question_of(r) for r in groups.get("full", []) if r["right"]}
    lines = []
    for column, found in groups.items():
        line = [column]
        for right, asked, low, high in stats.answered(found, askable).values():
            share = f"{right / asked:.2f} [{low:.2f}, {high:.2f}]" if asked else ""
            line.append(f"{right} of {asked}: {share}")
        lines.append(line)
    return page.table(["column", "askable", "all"], lines)


def markdown(
    records: Sequence[Record], about: Mapping[str, str], skipped: Mapping[str, str]
) -> str:
    """The page."""
    rows, judged = rows_of(records), verdicts(records)
    lines = ["# Fidelity on real text", "", *(f"- {name}: {text}" for name, text in about.items())]
    lines += ["", HEAD]
    if judged:
        lines += ["", "## Controls", "", CONTROLS, "", *_verdict_table(judged)]
    for stream, title, words, table in (
        ("text", "The last tokens of a text", "", _text_table),
        ("answer", "Full attention's own answer", ANSWER, _answer_table),
    ):
        some = [found for found in rows if found["stream"] == stream]
        for length in sorted({found["length"] for found in some}):
            lines += ["", f"## {title}, {length:,} tokens", ""]
            lines += [words, ""] if words else []
            lines += table([found for found in some if found["length"] == length])
    for length in sorted({r["length"] for r in records}):
        lines += lines_of(records, length)
    for stream, who in (("needle", ""), ("asked", ", questions read by the method's own steps")):
        for length in sorted({r["length"] for r in records if r["stream"] == stream}):
            lines += ["", f"## Facts in real text, {length:,} tokens{who}", "", NEEDLES, ""]
            lines += _needle_table(grouped(records, stream, length))
    if skipped:
        lines += ["", "Not measured:", "", *(f"- {n}: {why}" for n, why in skipped.items())]
    return "\n".join(lines) + "\n"


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """A row for JSON."""
    return {
        name: [round(v, 5) for v in (value.mean, value.low, value.high)]
        if isinstance(value, Interval)
        else round(value, 4)
        if isinstance(value, float)
        else value
        for name, value in found.items()
    }


def write(
    records: Sequence[Record],
    about: Mapping[str, str],
    skipped: Mapping[str, str],
    folder: Path,
) -> str:
    """Write report.md, summary.json and kl.png (where matplotlib is there); returns the page."""
    said, rows = markdown(records, about, skipped), rows_of(records)
    summary = {
        "about": dict(about),
        "rows": [_plain(found) for found in rows],
        "verdicts": [
            {
                "column": v.column,
                "verdict": v.words,
                "differences": {n: [d.mean, d.low, d.high] for n, d in v.differences.items()},
            }
            for v in verdicts(records)
        ],
    }
    if plot([found for found in rows if found["stream"] == "text"], folder / "kl.png"):
        said += "\n![KL against bytes read per step](kl.png)\n"
    for length in sorted({r["length"] for r in records}):
        path = folder / f"equal-{length}.png"
        if equal_plot.plot(points(records, length), length, path):
            said += f"\n![KL at equal bytes read, {length:,} tokens]({path.name})\n"
    replace_json(folder / "summary.json", summary)
    replace_text(folder / "report.md", said)
    return said
