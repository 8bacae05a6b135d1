"""What a comparison says first: accuracy at equal bytes, and OmniKV beside its controls."""

from collections import defaultdict

from engine.base.figures import human
from tools.common.page import table
from tools.compare.claims import variant_of
from tools.compare.distance import distances, shown
from tools.compare.methods import CONTROLS
from tools.compare.stats import (
    against,
    by_question,
    paired,
    pooled,
    question_of,
    ratio,
    reads,
    rows_per_step,
)


def points_of(records, rows, config, length):
    """One dict per method and budget at a length, by bytes read: label, control, kept, evicts,
    reads (text), read and resident (bytes per step and held, each with its share of full
    attention's), first and second (Differences: accuracy with its interval, None where not asked),
    top1, kl, kl_text (with its interval), distance (from its oracle, in words). kind, budget: of
    the column; held: (share allocated in first answers, in second ones) of sessions that forget;
    alone: what tools/compare/alone.py found, or None.
    """
    whole = pooled([r for r in rows if r["variant"] == "full" and r["length"] == length])["read"]
    asked, answers = defaultdict(list), defaultdict(list)
    for r in records:
        if r["length"] == length:
            if r["turn"] == 1:
                answers[r["variant"]].append(r)
            asked[r["variant"], r["turn"]].append((question_of(r)[:3], r["right"]))
    found, far = [], distances(records, length)
    for label, by in config["variants"].items():
        facts = by.get(str(length), {})
        here = [r for r in rows if r["variant"] == label and r["length"] == length]
        if not here or facts.get("alias") or "held" not in facts:
            continue
        first, second = (pooled([r for r in here if r["turn"] == turn]) for turn in (1, 2))
        every = pooled(here)
        found.append(
            {
                "label": label,
                "control": facts["control"],
                "kept": facts["kept"],
                "evicts": facts["evicts"],
                "name": facts["name"],
                "kind": facts["kind"],
                "budget": facts["budget"],
                "held": (first["held"], second["held"]),
                "alone": facts.get("alone"),
                "reads": reads(every),
                "read": every["read"],
                "read_share": every["read"] / whole if every["read"] and whole else None,
                "resident": facts["held"]["device"],
                "resident_share": facts["held"]["resident"],
                "first": paired(asked[label, 1]),
                "second": paired(asked[label, 2]),
                "top1": first["top1"],
                "kl": first["kl"],
                "distance": shown(far.get(label)),
                "kl_text": _interval(answers[label], "kl", 3) if first["compared"] else "",
            }
        )
    return sorted(found, key=lambda point: (point["read"] or 0, point["label"]))


def equal_bytes(points):
    """Markdown table: methods by the bytes that a step reads."""
    lines = []
    for point in points:
        shown = (
            point["label"] + (" (control)" if point["control"] else ""),
            point["reads"],
            "" if point["read"] is None else human(point["read"]),
            _percent(point["read_share"]),
            human(point["resident"]),
            _percent(point["resident_share"]),
            *("" if point[turn] is None else point[turn].share() for turn in ("first", "second")),
            "" if point["top1"] is None else f"{point['top1']:.3f}",
            "" if point["kl"] is None else f"{point['kl']:.4f}",
            point["distance"],
        )
        lines.append(shown)
    head = "method | a sparse layer reads | read per step | % of full | resident KV | % of full | "
    return table(
        head + "first questions | second questions | top-1 | KL | KL above its oracle", lines
    )


def controls(records, length):
    """Markdown table: OmniKV and its controls at each budget, first questions, 95% intervals; empty
    without controls.
    """
    far = distances(records, length)
    records = [r for r in records if r["length"] == length and r["turn"] == 1]
    budgets = sorted(
        {r["budget"] for r in records if r["variant"] == variant_of("omnikv", r["budget"])}
    )
    full = by_question(records, "full", 1)
    lines = []
    for budget in budgets:
        own, other = (
            variant_of("omnikv", budget),
            by_question(records, variant_of("omnikv", budget), 1),
        )
        for label in (own, *(variant_of(name, budget) for name in CONTROLS)):
            here = [r for r in records if r["variant"] == label]
            if not here:
                continue
            right = by_question(here, label, 1)
            lines.append(
                (
                    f"{budget:g}%",
                    label,
                    reads(rows_per_step(here)),
                    paired([(key[:3], value) for key, value in right.items()]).share(),
                    _points(against(right, full)),
                    "" if label == own else _points(against(other, right)),
                    _interval(here, "same", 3),
                    _interval(here, "kl", 4),
                    shown(far.get(label)),
                )
            )
    if not any(name in line[1] for name in CONTROLS for line in lines):
        return []
    head = "budget | method | a sparse layer reads | accuracy | against full | OmniKV against it | "
    return table(head + "top-1 | KL | KL above its oracle", lines)


def _interval(records, key, places):
    """Mean of a quantity per token that was compared, with its 95% interval over documents."""
    found = ratio([(question_of(r)[:3], r[key], r["compared"]) for r in records])
    if found is None:
        return ""
    mean, half = found
    high = min(1.0, mean + half) if key == "same" else mean + half
    return f"{mean:.{places}f} [{max(0.0, mean - half):.{places}f}, {high:.{places}f}]"


def _points(difference):
    return "" if difference is None else difference.points()


def _percent(share):
    return "" if share is None else f"{100 * share:.1f}"
