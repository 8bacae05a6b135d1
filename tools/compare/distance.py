"""How far a method that chooses is from the oracle of its granularity: what its choice loses, apart
from what any choice of as many tokens loses.

The oracle reads as many tokens, of the same layers, by lists of the same granularity
(tools/compare/build.py, `bound`). Both follow their own answers for as long as they say what full
attention says, so both figures are of the same questions and not of the same positions.
"""

from tools.compare.claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, Check, Finding
from tools.compare.methods import entry_of
from tools.compare.stats import mixed_ratio, question_of

NEAR_CONTROLS = ("omnikv_random", "omnikv_newest")


def distances(records, length):
    """{label: (mean, half of its 95% interval)}: KL of the method less KL of its oracle in nats per
    token, over the first questions that both answered at a length; none where either was not run.
    """
    found = {}
    kl = _by_question(records, length)
    labels = {_column(r): r["variant"] for r in records}
    for column, own in kl.items():
        name, _, _, _, bank = column
        oracle = entry_of(name).oracle
        other = kl.get((oracle, *column[1:])) if oracle and not bank else None
        far = None if other is None else _mixed((1, -1), own, other)
        if far is not None:
            found[labels[column]] = far
    return found


def shown(distance):
    """A distance for people: "+0.120 [+0.080, +0.160]"; "" for None."""
    if distance is None:
        return ""
    mean, half = distance
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def _column(r):
    """What a record and its oracle's have in common but for the name, which comes first."""
    return r["name"], r["kind"], r["budget"], tuple(r["kept"]), r.get("bank", "")


def _by_question(records, length):
    """{column: {question: (sum of KL, positions)}} of first answers that were compared."""
    found = {}
    for r in records:
        if r["turn"] == 1 and r["length"] == length and r.get("compared"):
            found.setdefault(_column(r), {})[question_of(r)] = r["kl"], r["compared"]
    return found


def _mixed(weights, *sides):
    """(mean, half) of weighted KL per token of several columns, on the questions of all."""
    both = [key for key in sides[0] if all(key in side for side in sides)]
    parts = [[(key[:3], *side[key]) for key in both] for side in sides]
    return mixed_ratio(parts, weights)


# -------------------------------------------------------------------- the claim


def nearer_to_the_oracle(records):
    """OmniKV's choice is nearer to its oracle than to chance, by KL, at every budget and length
    where all three were run.

    Holds where the interval of 2 * KL - KL of the oracle - KL of chance lies below 0 everywhere,
    fails where one lies above. A control is OmniKV with another choice; chance itself fails unless
    oracle and chance cannot be told apart, and then the model says nothing.
    """
    claim = "OmniKV's choice is nearer to the oracle's than to chance"
    outcome, lines = _nearer(records, "omnikv")
    if outcome == NOT_RUN:
        needs = "needs answers of `omnikv`, `omnikv_random` and `oracle_omnikv` at one budget"
        return Finding(claim, NOT_RUN, (needs,))
    checks = []
    for name in NEAR_CONTROLS:
        passed, numbers = _nearer(records, name)
        checks.append(Check(name, passed, "; ".join(numbers)))
    return Finding(claim, outcome, tuple(lines), tuple(checks))


def _nearer(records, name):
    """(outcome, lines) of the claim for one way to choose."""
    found, lines = [], []
    for length in sorted({r["length"] for r in records}):
        kl = _by_question(records, length)
        for column, own in kl.items():
            if column[:2] != (name, "share") or column[3] or column[4]:
                continue
            oracle, chance = (
                kl.get((other, *column[1:])) for other in ("oracle_omnikv", "omnikv_random")
            )
            if oracle is None or chance is None:
                continue
            nearer = _mixed((2, -1, -1), own, oracle, chance)
            if nearer is None:
                continue
            found.append(nearer)
            near, far = _mixed((1, -1), own, oracle), _mixed((1, -1), own, chance)
            said = f"{shown(near)} above its oracle, {shown(far)} beside chance"
            lines.append(f"{name} {column[2]:g}%, {length:,} tokens: {said} (KL)")
    if not found:
        return NOT_RUN, lines
    if any(mean - half > 0 for mean, half in found):
        return FAILS, lines
    return HOLDS if all(mean + half < 0 for mean, half in found) else UNDECIDED, lines
