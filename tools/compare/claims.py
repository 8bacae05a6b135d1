"""The paper's three findings as hypotheses, each beside its controls.

A claim about a selection is tested only by a model on which it is false of methods that have none.
So every claim is asked again of the controls (OmniKV with random tokens, with the newest, with
one), on the same questions, budgets and intervals. A claim that holds, and that a control satisfies
or may satisfy, is printed as "not tested by this model". So is a claim about eviction that no
longer holds where the evicting methods leave the layers of `--dense-layers-kept` alone.
"""

from dataclasses import dataclass, replace

from tools.compare.methods import CONTROLS, PAPER_SHARE
from tools.compare.stats import (
    against,
    by_question,
    cells,
    paired,
    question_of,
    reads,
    rows_per_step,
)

WITHIN = 0.01  # hypothesis 1: a point
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run"
UNTESTED = "not tested by this model"
SAID = {
    HOLDS: "passes: the claim is true of it too",
    FAILS: "fails the claim, as it must",
    UNDECIDED: "may pass: more answers would decide it",
    NOT_RUN: "was not run",
}


@dataclass(frozen=True)
class Check:
    """A claim asked of one control: how it came out there, and the numbers."""

    name: str
    outcome: str
    numbers: str = ""

    def line(self):
        """One line for people."""
        return f"control {self.name} {SAID[self.outcome]}" + (
            f" ({self.numbers})" if self.numbers else ""
        )


@dataclass(frozen=True)
class Finding:
    """A hypothesis: its words, how it came out ("holds", "does not hold", "undecided", "not run"),
    the numbers that decide, the same claim asked of every control, and of the methods that evict
    where they leave layers dense (None where that was not run, or is not asked).
    """

    claim: str
    outcome: str
    numbers: tuple
    controls: tuple[Check, ...] = ()
    kept: Check | None = None

    @property
    def tested(self):
        """Whether the controls were run and all of them fail the claim, which is not due to the
        layers that OmniKV reads whole.
        """
        clear = bool(self.controls) and all(check.outcome == FAILS for check in self.controls)
        return clear and (self.kept is None or self.kept.outcome == HOLDS)

    @property
    def verdict(self):
        """What is printed: the outcome, unless the claim holds and is not tested."""
        if self.outcome != HOLDS or self.tested:
            return self.outcome
        passing = [check.name for check in self.controls if check.outcome in (HOLDS, UNDECIDED)]
        if passing:
            return f"{UNTESTED} (it holds, and controls pass or may pass: {', '.join(passing)})"
        if any(check.outcome == NOT_RUN for check in self.controls) or not self.controls:
            return "not tested (it holds, but its controls were not run)"
        return f"{UNTESTED} (it holds, but not for sure of {self.kept.name})"

    def lines(self):
        """Markdown: one line, its numbers and controls below."""
        below = [*self.numbers, *(check.line() for check in self.controls)]
        if self.kept is not None:
            below.append(f"{self.kept.name}: {self.kept.outcome} ({self.kept.numbers})")
        return [f"- **{self.claim}**: {self.verdict}", *(f"  - {line}" for line in below)]

    def to_dict(self):
        """Plain dict for JSON."""
        return vars(self) | {
            "controls": [vars(check) for check in self.controls],
            "kept": self.kept and vars(self.kept),
            "tested": self.tested,
            "verdict": self.verdict,
        }


def findings(records, evicting):
    """The paper's three findings, as they come out. evicting: names of the methods that evict.

    Methods with `--dense-layers-kept` are not the published ones: the claims are asked of them
    apart.
    """
    kept = [r for r in records if r["kept"]]
    records = [r for r in records if not r["kept"]]
    return [
        within_a_point(records),
        two_stage_bound(records, kept),
        second_turn(records, evicting, kept),
    ]


def variant_of(name, share=PAPER_SHARE):
    """The label of OmniKV or a control at a share; one token has one budget."""
    return name if name == "omnikv_one" else f"{name} {share:g}%"


# -------------------------------------------------------------------- within a point


def within_a_point(records):
    """OmniKV at share 6.67% loses at most a point to full attention: first questions, every task
    and length that was run.
    """
    claim, variant = (
        f"OmniKV at share {PAPER_SHARE}% is within 1 point of full attention",
        variant_of("omnikv"),
    )
    ones, full = by_question(records, variant, 1), by_question(records, "full", 1)
    found = against(ones, full)
    if found is None:
        return Finding(claim, NOT_RUN, (f"needs answers of `{variant}` and `full`",))
    outcome = point_outcome(found)
    lines = [
        f"{found.points()} over {found.answers} questions about {found.documents} documents: "
        f"{_share(ones, full)} against "
        f"{_share(full, ones)}"
    ]
    if outcome == UNDECIDED:
        lines.append("the interval reaches to both sides of -1 point: more answers would decide it")
    for length in sorted({key[1] for key in ones if key in full}):
        some = against({k: v for k, v in ones.items() if k[1] == length}, full)
        own = [r for r in records if (r["variant"], r["length"], r["turn"]) == (variant, length, 1)]
        lines.append(
            f"{length:,} tokens: {some.points()}, {some.answers} questions; a sparse layer reads "
            f"{reads(rows_per_step(own))}"
        )
    controls = tuple(_point_check(records, name, ones, full) for name in CONTROLS)
    return Finding(claim, outcome, tuple(lines), controls)


def point_outcome(found):
    """Whether a Difference to full attention is at most a point of loss, by its interval."""
    return HOLDS if found.low >= -WITHIN else FAILS if found.high < -WITHIN else UNDECIDED


def _point_check(records, name, ones, full):
    """The claim of a control, on the questions that OmniKV answered."""
    asked = by_question(records, variant_of(name), 1)
    found = against({key: right for key, right in asked.items() if key in ones}, full)
    if found is None:
        return Check(name, NOT_RUN)
    return Check(name, point_outcome(found), f"{found.points()}, {found.answers} questions")


def _share(some, beside):
    found = [value for key, value in some.items() if key in beside]
    return f"{sum(found) / len(found):.3f}"


# -------------------------------------------------------------------- 2StageRetr by budget


def two_stage_bound(records, kept=()):
    """H2O's accuracy on 2StageRetr does not exceed its budget by more than noise: the Wilson
    interval does not lie above it. kept: records of methods that leave layers dense.
    """
    claim = "H2O's accuracy on 2StageRetr does not exceed its budget"
    rows = _two_stage(records, lambda r: r["name"] == "h2o" and r["kind"] == "share")
    if not rows:
        return Finding(claim, NOT_RUN, ("needs answers of `h2o` on two_stage",))
    full = {
        row["length"]: row["accuracy"]
        for row in _two_stage(records, lambda r: r["variant"] == "full")
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
            f"{row['asked']}, budget {budget:.3g} ({reads(row)})"
            + (f", full attention {reach:.3f}" if reach is not None else "")
            + (
                ": says nothing, full attention is not above the budget either"
                if empty
                else ": above it"
                if over
                else ""
            )
        )
    outcome = FAILS if above else HOLDS if telling else UNDECIDED
    controls = tuple(_bound_check(records, name, rows) for name in CONTROLS)
    apart = replace(_bound_check(kept, "h2o", rows), name="h2o with layers left dense")
    asked = apart if apart.outcome != NOT_RUN else None
    return Finding(claim, outcome, tuple(lines), controls, asked)


def _two_stage(records, wanted):
    """Cells of the first questions of 2StageRetr."""
    return cells([r for r in records if r["task"] == "two_stage" and r["turn"] == 1 and wanted(r)])


def _bound_check(records, name, h2o):
    """The bound of a control, at H2O's lengths and budgets: it fails where it is above one of them
    for sure.
    """
    found = _two_stage(
        records, lambda r: r["name"] == name and r["kind"] in ("share", "read", "none")
    )
    pairs = [
        (row, other["budget"] / 100)
        for row in found
        for other in h2o
        if row["length"] == other["length"]
        and (row["kind"] == "none" or row["budget"] == other["budget"])
    ]
    if not pairs:
        return Check(name, NOT_RUN)
    row, budget = max(pairs, key=lambda pair: pair[0]["low"] - pair[1])
    outcome = (
        FAILS
        if row["low"] > budget
        else UNDECIDED
        if any(other["accuracy"] > bound for other, bound in pairs)
        else HOLDS
    )
    said = f"{row['accuracy']:.3f} [{row['low']:.2f}, {row['high']:.2f}], budget {budget:.3g}"
    return Check(name, outcome, f"{row['length']:,} tokens: {said}")


# -------------------------------------------------------------------- the second question


def second_turn(records, evicting, kept=()):
    """Eviction loses on the second question about a document, OmniKV does not; each question is
    asked in both turns.

    Loss of a turn: full attention's accuracy - the method's, on the same questions. Eviction loses
    where the interval of its loss in the second turn, over all its token shares, lies above 0;
    OmniKV does not where its interval reaches down to 0. A control passes where OmniKV's half of
    the claim is true of it. kept: records of methods that leave layers dense, of which eviction's
    half is asked.
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
            NOT_RUN,
            (*lines, "needs second-turn answers of `full`, `omnikv` and a method that evicts"),
        )
    _, together, extra = losses(records, evictors)
    more = f", {extra.points()} more than in the first" if extra else ""
    lines.append(
        f"all that evict together: {together.points()} in the second turn{more} "
        f"({together.answers} questions)"
    )
    if together.low > 0:
        outcome = f"{FAILS}: OmniKV loses too" if verdicts["omnikv"] else HOLDS
    else:
        outcome = FAILS if together.high <= 0 else UNDECIDED
    controls = tuple(_turn_check(records, name) for name in CONTROLS)
    return Finding(claim, outcome, tuple(lines), controls, _kept_check(records, kept, evicting))


def _kept_check(records, kept, evicting):
    """Whether the methods that evict lose in the second turn with layers left dense."""
    full = [r for r in records if r["variant"] == "full"]
    _, second, _ = losses([*full, *kept], evicting)
    if second is None:
        return None
    outcome = HOLDS if second.low > 0 else FAILS if second.high <= 0 else UNDECIDED
    said = f"lose {second.points()} in the second turn, {second.answers} questions"
    return Check("methods that evict with layers left dense", outcome, said)


def _turn_check(records, name):
    """Whether a control loses in the second turn."""
    _, second, _ = losses(records, [name])
    if second is None:
        return Check(name, NOT_RUN)
    said = f"loses {second.points()} in the second turn, {second.answers} questions"
    return Check(name, FAILS if second.low > 0 else HOLDS, said)


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
