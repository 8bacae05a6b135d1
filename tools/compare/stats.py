"""Figures of a comparison's answers: cells with Wilson intervals, paired differences, and the
paper's three findings as hypotheses.

A record is one answer (tools/compare/run.py): variant, name, kind, budget, task, length, seed,
question, turn, right and so on. Differences are paired: two methods are compared on the questions
that both answered. Several answers rest on one document, so intervals take the wider of what
answers and documents say.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from tools.eval.report import DEPTH_BINS, wilson

WITHIN = 0.01  # hypothesis 1: a point
# hypothesis 1: per cent of the prompt; the paper's Mem 30% of Llama-3-8B
PAPER_SHARE = 6.67


@dataclass(frozen=True)
class Difference:
    """Mean of a paired quantity with its 95% interval, over `answers` answers about `documents`
    documents.
    """

    mean: float
    low: float
    high: float
    answers: int
    documents: int

    def points(self):
        """The difference in percentage points, for people."""
        return f"{100 * self.mean:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def paired(values):
    """Difference of (document, value) pairs, values in [-2, 2]; None without any.

    The wider of two 95% intervals: Agresti and Min (2005) for matched proportions, (N + 2) in place
    of N and one discordant pair more, which stays sound where nothing differs; and the ratio
    estimator over documents: answers about one document are not independent.
    """
    if not values:
        return None
    count, total = len(values), sum(v for _, v in values)
    squares = sum(v * v for _, v in values)
    answers = math.sqrt(max(0.0, squares + 1 - total * total / (count + 2))) / (count + 2)
    mean, by_document = total / count, defaultdict(list)
    for document, value in values:
        by_document[document].append(value)
    documents = len(by_document)
    spread = sum(sum(v - mean for v in found) ** 2 for found in by_document.values())
    clustered = math.sqrt(spread * documents / max(1, documents - 1)) / count
    half = 1.96 * max(answers, clustered)
    return Difference(mean, max(-2.0, mean - half), min(2.0, mean + half), count, documents)


def question_of(record):
    """What was asked: two records of different methods or turns with this in common were asked the
    same.
    """
    return record["task"], record["length"], record["seed"], record["question"]


def by_question(records, variant, turn):
    """{question: 0 or 1} of one variant in one turn."""
    return {
        question_of(r): r["right"] for r in records if r["variant"] == variant and r["turn"] == turn
    }


def against(ones, others):
    """Difference ones - others of two `by_question` maps over the questions that both
    answered; None without any.
    """
    return paired([(key[:3], ones[key] - others[key]) for key in ones if key in others])


def cells(records):
    """One row per (variant, task, length, turn), in order of first appearance.

    right, asked, accuracy, low, high (Wilson); same, compared: tokens like full attention's of
    those with the same history; kl: mean nats there; milliseconds per token and bytes read per step
    (None without steps); depths: [right, asked] per bin of the document.
    """
    groups = defaultdict(list)
    for record in records:
        groups[record["variant"], record["task"], record["length"], record["turn"]].append(record)
    rows = []
    for (variant, task, length, turn), found in groups.items():
        right, asked = sum(r["right"] for r in found), len(found)
        low, high = wilson(right, asked)
        steps, compared = sum(r["steps"] for r in found), sum(r["compared"] for r in found)
        depths = [[0, 0] for _ in range(DEPTH_BINS)]
        for record in found:
            if record["depth"] is not None:
                place = depths[min(DEPTH_BINS - 1, int(record["depth"] * DEPTH_BINS))]
                place[0] += record["right"]
                place[1] += 1
        rows.append(
            {
                "variant": variant,
                "name": found[0]["name"],
                "kind": found[0]["kind"],
                "budget": found[0]["budget"],
                "task": task,
                "length": length,
                "turn": turn,
                "right": right,
                "asked": asked,
                "accuracy": right / asked,
                "low": low,
                "high": high,
                "same": sum(r["same"] for r in found),
                "compared": compared,
                "kl": sum(r["kl"] for r in found) / compared if compared else None,
                "ms": 1000 * sum(r["decode_seconds"] for r in found) / steps if steps else None,
                "read": sum(r["bytes_read"] for r in found) / steps if steps else None,
                "link": sum(r["bytes_link"] for r in found) / steps if steps else None,
                "prompt_seconds": sum(r["prompt_seconds"] for r in found) / asked,
                "depths": depths,
            }
        )
    return rows


def pooled(rows):
    """Cells put together: mean accuracy over tasks, top-1 agreement and KL over tokens, ms and
    bytes over tasks.
    """

    def mean(key):
        found = [row[key] for row in rows if row[key] is not None]
        return sum(found) / len(found) if found else None

    compared = sum(row["compared"] for row in rows)
    return {
        "accuracy": mean("accuracy"),
        "tasks": len(rows),
        "asked": sum(row["asked"] for row in rows),
        "compared": compared,
        "top1": sum(row["same"] for row in rows) / compared if compared else None,
        "kl": sum(row["kl"] * row["compared"] for row in rows if row["kl"] is not None) / compared
        if compared
        else None,
        "ms": mean("ms"),
        "read": mean("read"),
        "link": mean("link"),
        "prompt_seconds": mean("prompt_seconds"),
    }


# -------------------------------------------------------------------- the three findings


@dataclass(frozen=True)
class Finding:
    """A hypothesis: its words, how it came out ("holds", "does not hold", "undecided", "not run")
    and the numbers that decide.
    """

    claim: str
    outcome: str
    numbers: tuple

    def lines(self):
        """Markdown: one line, its numbers below."""
        return [f"- **{self.claim}**: {self.outcome}", *(f"  - {line}" for line in self.numbers)]


def findings(records, evicting):
    """The paper's three findings, as they come out. evicting: names of the methods that evict."""
    return [within_a_point(records), two_stage_bound(records), second_turn(records, evicting)]


def within_a_point(records):
    """OmniKV at share 6.67% loses at most a point to full attention: first questions, every task
    and length that was run.
    """
    claim, variant = (
        f"OmniKV at share {PAPER_SHARE}% is within 1 point of full attention",
        f"omnikv {PAPER_SHARE:g}%",
    )
    ones, full = by_question(records, variant, 1), by_question(records, "full", 1)
    found = against(ones, full)
    if found is None:
        return Finding(claim, "not run", (f"needs answers of `{variant}` and `full`",))
    outcome = (
        "holds"
        if found.low >= -WITHIN
        else "does not hold"
        if found.high < -WITHIN
        else "undecided"
    )
    lines = [
        f"{found.points()} over {found.answers} questions about {found.documents} documents: "
        f"{_share(ones, full)} against "
        f"{_share(full, ones)}"
    ]
    if outcome == "undecided":
        lines.append("the interval reaches to both sides of -1 point: more answers would decide it")
    for length in sorted({key[1] for key in ones if key in full}):
        some = against({k: v for k, v in ones.items() if k[1] == length}, full)
        lines.append(f"{length:,} tokens: {some.points()}, {some.answers} questions")
    return Finding(claim, outcome, tuple(lines))


def _share(some, beside):
    found = [value for key, value in some.items() if key in beside]
    return f"{sum(found) / len(found):.3f}"


def two_stage_bound(records):
    """H2O's accuracy on 2StageRetr does not exceed its budget by more than noise: the Wilson
    interval does not lie above it.
    """
    claim = "H2O's accuracy on 2StageRetr does not exceed its budget"
    rows = cells(
        [
            r
            for r in records
            if r["name"] == "h2o"
            and r["kind"] == "share"
            and r["task"] == "two_stage"
            and r["turn"] == 1
        ]
    )
    if not rows:
        return Finding(claim, "not run", ("needs answers of `h2o` on two_stage",))
    full = {
        row["length"]: row["accuracy"]
        for row in cells(
            [
                r
                for r in records
                if r["variant"] == "full" and r["turn"] == 1 and r["task"] == "two_stage"
            ]
        )
    }
    above, telling, lines = [], 0, []
    for row in sorted(rows, key=lambda row: (row["length"], row["budget"])):
        budget, reach = row["budget"] / 100, full.get(row["length"])
        over = row["low"] > budget
        above += [f"{row['variant']} at {row['length']:,}"] if over else []
        empty = not over and reach is not None and reach <= budget
        telling += not empty
        lines.append(
            f"{row['variant']}, {row['length']:,} tokens: {row['accuracy']:.3f} "
            f"[{row['low']:.2f}, {row['high']:.2f}] of "
            f"{row['asked']}, budget {budget:.3g}"
            + (f", full attention {reach:.3f}" if reach is not None else "")
            + (
                ": says nothing, full attention is not above the budget either"
                if empty
                else ": above it"
                if over
                else ""
            )
        )
    outcome = "does not hold" if above else "holds" if telling else "undecided"
    return Finding(claim, outcome, tuple(lines))


def second_turn(records, evicting):
    """Eviction loses on the second question about a document, OmniKV does not; each question is
    asked in both turns.

    Loss of a turn: full attention's accuracy - the method's, on the same questions. Eviction loses
    where the interval of its loss in the second turn, over all its token shares, lies above 0;
    OmniKV does not where its interval reaches down to 0.
    """
    claim = "Methods that evict lose on second-turn questions, OmniKV does not"
    names = [
        n
        for n in dict.fromkeys(r["name"] for r in records if r["turn"] == 2)
        if n in evicting or n == "omnikv"
    ]
    verdicts, lines = {}, []
    for name in names:
        first, second, extra = losses(records, [name])
        if second is None:
            continue
        verdicts[name] = second.low > 0
        more = f"; {extra.points()} more than in the first" if extra else ""
        lines.append(
            f"{name}: loses {second.points()} in the second turn, "
            f"{first.points() if first else 'nothing asked'} in the first"
            f"{more} ({second.answers} questions)"
        )
    evictors = [n for n in verdicts if n in evicting]
    if "omnikv" not in verdicts or not evictors:
        return Finding(
            claim,
            "not run",
            (*lines, "needs second-turn answers of `full`, `omnikv` and a method that evicts"),
        )
    _, together, extra = losses(records, evictors)
    more = f", {extra.points()} more than in the first" if extra else ""
    lines.append(
        f"all that evict together: {together.points()} in the second turn{more} "
        f"({together.answers} questions)"
    )
    if together.low > 0:
        outcome = "does not hold: OmniKV loses too" if verdicts["omnikv"] else "holds"
    else:
        outcome = "does not hold" if together.high <= 0 else "undecided"
    return Finding(claim, outcome, tuple(lines))


def losses(records, names):
    """(first turn, second turn, second - first): Differences, the accuracy that these methods lose
    to full attention at all their token shares.
    """
    turns = {}
    for turn in (1, 2):
        full, found = by_question(records, "full", turn), []
        for r in records:
            if (
                r["turn"] == turn
                and r["name"] in names
                and r["kind"] != "mem"
                and question_of(r) in full
            ):
                found.append(((r["variant"], question_of(r)), full[question_of(r)] - r["right"]))
        turns[turn] = dict(found)
    document = {key: key[1][:3] for turn in turns.values() for key in turn}
    extra = [(document[key], turns[2][key] - turns[1][key]) for key in turns[2] if key in turns[1]]
    return (
        *(
            paired([(document[key], value) for key, value in turns[turn].items()])
            for turn in (1, 2)
        ),
        paired(extra),
    )
