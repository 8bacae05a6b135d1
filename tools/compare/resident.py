"""Accuracy at equal resident bytes: the table, and the claim with its controls.

At such a budget a method that evicts forgets, so that its session holds its store and nothing else,
and OmniKV's sparse layers lie in host memory.
"""

from engine.base.figures import human
from tools.common.page import table
from tools.compare.claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, Check, Finding
from tools.compare.methods import PROMPT_KEPT
from tools.compare.stats import paired, question_of

CHOOSING = ("omnikv_random", "omnikv_newest")  # controls that have budgets in bytes
NOTE = """Both turns are asked of sessions that really hold so much. "% of full": K and V that a
session allocates for a prompt of this length and a step, of full attention's; "in answers": what
sessions that forget had allocated after the first step of a first and of a second answer, of full
attention's K and V of as many tokens. Of OmniKV the rest is in host memory; its answers here come
from a bank on the device, which says the same. CPU ms: thread CPU time of a step, and peak: the
most resident memory beyond what the process had before there was a model, weights included and
since they were loaded, both of a process of its own per line that reads a document and answers
16 tokens (`python -m tools.compare.alone`). A prompt that is read by full attention is in the
peak."""


def at_resident(points):
    """Markdown table: methods by the K and V that a session holds; empty without budgets in
    resident bytes.
    """
    kept = [p for p in points if p["kind"] == "mem" or p["name"] in ("full", PROMPT_KEPT)]
    if not any(point["kind"] == "mem" for point in kept):
        return []
    kept.sort(key=lambda p: (p["budget"], p["kind"] != "mem", p["control"], _first(p), p["name"]))
    lines = []
    for point in kept:
        alone = point["alone"]
        shown = (
            f"{point['budget']:g}%" if point["kind"] == "mem" else "",
            point["name"] + (" (control)" if point["control"] else ""),
            human(point["resident"]),
            f"{100 * point['resident_share']:.1f}",
            ", ".join(f"{100 * share:.1f}" for share in point["held"] if share is not None),
            *("" if point[turn] is None else point[turn].share() for turn in ("first", "second")),
            point["kl_text"],
            "" if point["top1"] is None else f"{point['top1']:.3f}",
            "" if alone is None else f"{alone['cpu_ms']:.1f}",
            "" if alone is None else human(alone["peak"]),
        )
        lines.append(shown)
    head = "budget | method | resident KV | % of full | in answers | first questions | "
    head += "second questions | KL | top-1 | CPU ms | peak"
    return [*table(head, lines), "", NOTE]


def _first(point):
    """OmniKV before what evicts."""
    return point["name"] != "full", not point["name"].startswith("omnikv")


# -------------------------------------------------------------------- the claim


def beside_eviction(records, evicting):
    """OmniKV answers more than every method that evicts at the same resident bytes: both turns, the
    budgets that both reach. evicting: names of the methods, without controls.

    Holds where every paired interval lies above 0; does not hold where one lies at or below it. A
    control is OmniKV with another choice, of which the same is asked: it fails the claim where a
    method that evicts is better for sure.
    """
    claim = "At equal resident bytes OmniKV answers more than every method that evicts"
    records = [r for r in records if r["kind"] == "mem" and not r["kept"]]
    found = _against(records, "omnikv", evicting)
    if not found:
        needs = "needs answers of `omnikv` and of a method that evicts at one budget in bytes"
        return Finding(claim, NOT_RUN, (needs,))
    lines = [
        f"{name}: {difference.points()} over {difference.answers} answers at {budgets}"
        for name, (difference, budgets) in sorted(found.items(), key=lambda item: item[1][0].mean)
    ]
    controls = tuple(_control(records, name, evicting) for name in CHOOSING)
    return Finding(claim, _outcome(found), tuple(lines), controls)


def _against(records, name, evicting):
    """{method that evicts: (Difference of `name` - it, budgets in words)}."""
    own = {_key(r): r["right"] for r in records if r["name"] == name}
    found = {}
    for other in dict.fromkeys(r["name"] for r in records if r["name"] in evicting):
        pairs = [
            (key, own[key] - r["right"])
            for r in records
            if r["name"] == other and (key := _key(r)) in own
        ]
        if pairs:
            budgets = ", ".join(f"{budget:g}%" for budget in sorted({key[0] for key, _ in pairs}))
            found[other] = paired([(key[2][:3], value) for key, value in pairs]), budgets
    return found


def _key(record):
    """Equal for the answers of two methods at one budget to one question in one turn."""
    return record["budget"], record["turn"], question_of(record)


def _outcome(found):
    """How the claim comes out, of `_against`."""
    differences = [difference for difference, _ in found.values()]
    if all(difference.low > 0 for difference in differences):
        return HOLDS
    return FAILS if any(difference.high <= 0 for difference in differences) else UNDECIDED


def _control(records, name, evicting):
    """The claim of a control."""
    found = _against(records, name, evicting)
    if not found:
        return Check(name, NOT_RUN)
    worst = min(found, key=lambda other: found[other][0].high)
    difference, _ = found[worst]
    said = f"against {worst}: {difference.points()}, {difference.answers} answers"
    return Check(name, _outcome(found), said)
