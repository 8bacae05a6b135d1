"""How often a draft is what the sampler draws, by the rule that keeps it.

Computed, not counted: from full attention's and the drafter's distributions at the same position,
after temperature and filters, follows the probability that a rule accepts.

rejection  sum over tokens of min(p, q): the most that any rule can (Leviathan et al., 2023)
race       exponential clocks, one a token, shared by both draws: the sampler's
(engine/sampling/exponential_race.py) number     one uniform number for both, in cumulative sums:
what the sampler did before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine import Exact, Full, SamplingParams
from engine.exact.runner import ExactRunner
from engine.methods.base import Method
from engine.sampling.sampler import Sampler
from engine.session.session import Session
from tools.studies.exact.starts import Known

RULES = ("rejection", "number", "race")
LIKELY = 1e-4  # tokens below it in both distributions are left out of `race`: at most their sum


@dataclass
class Coupling:
    """Probability that a rule accepts draft 1, 2, ... of a cycle, given those before, for every
    cycle of one answer. cycles: {rule: [cycle][position]}.
    """

    kind: str
    length: int
    temperature: float
    top_p: float
    cycles: dict[str, list[list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)


def accepted(rates: Sequence[Sequence[float]]) -> float:
    """Expected drafts accepted a cycle: mean of the sum of running products."""
    total = 0.0
    for cycle in rates:
        reached = 1.0
        for rate in cycle:
            reached *= rate
            total += reached
    return total / len(rates)


def rejection(p: torch.Tensor, q: torch.Tensor) -> float:
    """p, q [vocab]: probabilities."""
    return float(torch.minimum(p.double(), q.double()).sum())


def number(p: torch.Tensor, q: torch.Tensor, by_rank: bool) -> float:
    """Overlap of each token's two intervals in the cumulative sums. by_rank: sums run from the
    likeliest token down; else in the order of the vocabulary.
    """
    low, high = [], []
    for values in (p.double(), q.double()):
        order = values.argsort(descending=True) if by_rank else torch.arange(len(values))
        ends = values[order].cumsum(0)
        high.append(torch.empty_like(values).scatter_(0, order, ends))
        low.append(high[-1] - values)
    return float((torch.minimum(*high) - torch.maximum(*low)).clamp_(min=0).sum())


def race(p: torch.Tensor, q: torch.Tensor) -> float:
    """Sum over tokens x of 1 / sum over y of max(p_y / p_x, q_y / q_x)."""
    p, q = p.double(), q.double()
    total = 0.0
    for x in torch.nonzero((p > LIKELY) & (q > LIKELY)).flatten().tolist():
        total += float(1 / torch.maximum(p / p[x], q / q[x]).sum())
    return total


def coupling(
    session: Session,
    method: Method,
    ids: Sequence[int],
    tokens: int,
    draft: int,
    kind: str,
    params: SamplingParams,
) -> Coupling:
    """Sample an answer under full attention, draft along it, and compare the distributions.

    The session holds the prompt `ids` and ends so.
    """
    sampler = Sampler(params, session.loaded.config.vocab_size)
    assert session.last_logits is not None
    written, truth = [], [session.last_logits.clone()]
    for _ in range(tokens):
        written.append(sampler.sample(truth[-1])[0])
        truth.append(session.decode(written[-1]).clone())
    session.truncate(len(ids))
    session.set_method(Exact(method, draft=draft, lookup=False))
    runner = session.runner
    assert isinstance(runner, ExactRunner)
    found: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    by_rank = params.top_p < 1
    for first in range(0, tokens - draft, draft + 1):
        n = len(ids) + first + 1
        known = Known(written[first + 1 : first + 1 + draft], forced=True)
        session.write_with(known)  # type: ignore[assignment]
        runner.feed(written[first], n)
        session.bank.before_step(n)
        runner._guess(n, draft)
        session.write_with(None)
        pairs = [
            (sampler.probabilities(truth[first + 1 + j]), sampler.probabilities(logits))
            for j, logits in enumerate(known.logits)
        ]
        found["rejection"].append([rejection(p, q) for p, q in pairs])
        found["number"].append([number(p, q, by_rank) for p, q in pairs])
        found["race"].append([race(p, q) for p, q in pairs])
        for token in written[first : first + draft + 1]:
            session.decode(token)
    session.truncate(len(ids))
    session.set_method(Full())
    session.refresh_logits()
    return Coupling(kind, len(ids), params.temperature, params.top_p, found)
