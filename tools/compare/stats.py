"""Figures of a comparison's answers: cells with Wilson intervals, means and paired differences.

A record is one answer (tools/compare/run.py): variant, name, kind, budget, task, length, seed,
question, turn, right and so on. Differences are paired: two methods are compared on the questions
that both answered. Several answers rest on one document, so intervals take the wider of what
answers and documents say.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from tools.common.intervals import wilson

DEPTH_BINS = 5  # of a document


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

    def share(self):
        """The mean of a quantity from 0 to 1, for people."""
        return f"{self.mean:.3f} [{max(0.0, self.low):.2f}, {min(1.0, self.high):.2f}]"


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


def ratio(values):
    """(sum of a / sum of b, half of its 95% interval) of (document, a, b): the ratio estimator over
    documents. None where b sums to 0; an infinite half for one document.
    """
    return mixed_ratio([values], (1,))


def mixed_ratio(parts, weights):
    """(sum over columns of weight * (sum of a / sum of b), half of its 95% interval): parts are
    columns of (document, a, b), each of the same questions. The ratio estimator over documents;
    None where a column's b sums to 0, an infinite half for one document.
    """
    unders = [sum(b for _, _, b in part) for part in parts]
    if not parts or not all(unders):
        return None
    mean, by_document = 0.0, defaultdict(float)
    for part, under, weight in zip(parts, unders, weights):
        own = sum(a for _, a, _ in part) / under
        mean += weight * own
        for document, a, b in part:
            by_document[document] += weight * (a - own * b) / under
    count = len(by_document)
    if count < 2:
        return mean, math.inf
    spread = sum(rest * rest for rest in by_document.values()) * count / (count - 1)
    return mean, 1.96 * math.sqrt(spread)


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
    those with the same history; kl: mean nats there; milliseconds per token, by the clock and of
    the thread (cpu; None of answers without them), and bytes read per step (None without steps);
    held: K and V that a session which forgets had allocated, as a share of full attention's of as
    many tokens (None of others); depths: [right, asked] per bin of the document. rows, context,
    chosen: per step, what a layer read that reads less than everything, of how many tokens, and how
    much of it the budget chose (None without steps).
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
                "kept": found[0]["kept"],
                "bank": found[0].get("bank", ""),  # answers of before there were banks have none
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
                "cpu": 1000 * sum(r["decode_cpu"] for r in found) / steps
                if steps and all("decode_cpu" in r for r in found)
                else None,
                "held": held_share(found),
                "read": sum(r["bytes_read"] for r in found) / steps if steps else None,
                "link": sum(r["bytes_link"] for r in found) / steps if steps else None,
                **rows_per_step(found),
                "prompt_seconds": sum(r["prompt_seconds"] for r in found) / asked,
                "depths": depths,
            }
        )
    return rows


def held_share(records):
    """K and V allocated by sessions that forget / those of all tokens; None without any."""
    whole = sum(r.get("held_of", 0) for r in records)
    return sum(r["held"] for r in records if r.get("held_of")) / whole if whole else None


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
        "cpu": mean("cpu"),
        "held": mean("held"),
        "read": mean("read"),
        "link": mean("link"),
        "rows": mean("rows"),
        "context": mean("context"),
        "chosen": mean("chosen"),
        "prompt_seconds": mean("prompt_seconds"),
    }


def reads(row):
    """What a layer reads in a step that reads less than everything, of pooled cells or one:
    "31 + 80 tail = 111 rows, 10.8%".
    """
    if not row["context"]:
        return ""
    rows, chosen, share = row["rows"], row["chosen"], 100 * row["rows"] / row["context"]
    if not chosen:
        return f"{rows:,.0f} rows, {share:.1f}%"
    tail = rows - min(chosen, rows)
    if tail < 0.5:
        return f"{rows:,.0f} rows, {share:.1f}%"
    return f"{chosen:,.0f} + {tail:,.0f} tail = {rows:,.0f} rows, {share:.1f}%"


def rows_per_step(records):
    """{rows, context, chosen} of some answers, per step; None without steps."""
    steps = sum(r["steps"] for r in records)
    if not steps:
        return dict.fromkeys(("rows", "context", "chosen"))
    return {
        "rows": sum(r["rows"] for r in records) / steps,
        "context": sum(r["context"] for r in records) / steps,
        "chosen": sum(r["chosen"] * r["steps"] for r in records) / steps,
    }
