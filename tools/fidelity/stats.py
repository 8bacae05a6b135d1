"""What is compared of two columns on the same texts, and what the controls say about a claim.

Fewer texts than FEWEST carry no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.common.intervals import Interval, over_texts, wilson
from tools.compare.methods import CONTROLS
from tools.fidelity.follow import Record, agreement, until_difference

FEWEST = 6  # texts of a verdict: all on one side by chance is 1 in 32
MODEL_SAYS_NOTHING = "not tested by this model"


def kl_of(record: Record) -> tuple[float, int]:
    """(sum of KL in nats, positions)."""
    return sum(record["kl"]), len(record["kl"])


def same_of(record: Record) -> tuple[float, int]:
    """(positions that agree, positions)."""
    return agreement(record) * len(record["same"]), len(record["same"])


def until_of(record: Record) -> tuple[float, int]:
    """(tokens up to the first difference, 1)."""
    return until_difference(record), 1


def mean(records: Iterable[Record], of: Callable[[Record], tuple[float, int]]) -> Interval | None:
    """`over_texts` of a figure of records."""
    return over_texts((r["text"], *of(r)) for r in records)


def difference(
    ones: Iterable[Record],
    others: Iterable[Record],
    of: Callable[[Record], tuple[float, int]] = kl_of,
) -> Interval | None:
    """Mean of ones - others over the texts, lengths and streams that both have; None without
    any.
    """
    beside = {place(r): of(r) for r in others}
    pairs = []
    for record in ones:
        if place(record) in beside:
            (total, count), (minus, _) = of(record), beside[place(record)]
            pairs.append((record["text"], total - minus, count))
    return over_texts(pairs)


def place(record: Record) -> tuple[str, str, int]:
    """What a record is about: two columns' records with this in common can be compared."""
    return record["stream"], record["text"], record["length"]


@dataclass(frozen=True)
class Verdict:
    """What the controls say about one OmniKV column: KL(control) - KL(OmniKV) on the same texts,
    by control; words: for people.
    """

    column: str
    differences: Mapping[str, Interval]
    words: str


def verdict(groups: Mapping[str, Sequence[Record]], column: str) -> Verdict:
    """Whether random, one and newest are clearly worse than an OmniKV column at its filters, wait
    layers and budget: the paired interval of each difference lies above 0.
    """
    own = groups[column]
    found = {}
    for name in CONTROLS:
        match = next((r for r in groups.values() if r and _controls(r[0], name, own[0])), None)
        far = difference(match, own) if match else None
        if far is not None:
            found[name.removeprefix("omnikv_")] = far
    equal = [name for name, far in found.items() if not far.low > 0]
    if len(found) < len(CONTROLS):
        run = ", ".join(found) or "none"
        words = f"not judged: of the controls, {run} ran"
    elif min(far.texts for far in found.values()) < FEWEST:
        words = f"not judged: fewer than {FEWEST} texts"
    elif equal:
        words = f"{MODEL_SAYS_NOTHING}: {' and '.join(equal)} not clearly worse"
    else:
        words = "random, one and newest are clearly worse than OmniKV at the same bytes"
    return Verdict(column, found, words)


def _controls(control: Record, name: str, own: Record) -> bool:
    """Whether a record is of the control `name` for OmniKV's record `own`."""
    alike = all(control[field] == own[field] for field in ("filters", "wait"))
    return (
        control["name"] == name
        and alike
        and (name == "omnikv_one" or control["budget"] == own["budget"])
    )


def answered(records: Sequence[Record], askable: set[tuple]) -> dict[str, tuple]:
    """{"askable" | "all": (right, asked, low, high)} of needle records, Wilson intervals."""
    out = {}
    for name, some in (
        ("askable", [r for r in records if question_of(r) in askable]),
        ("all", list(records)),
    ):
        right = sum(r["right"] for r in some)
        out[name] = (right, len(some), *wilson(right, len(some)))
    return out


def question_of(record: Record) -> tuple:
    """What was asked, whatever the column."""
    return record["text"], record["length"], record["question"]
