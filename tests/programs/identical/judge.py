"""One answer of exact mode beside full attention's: equal token by token, or a tie.

A product over several rows rounds otherwise than over one. Where full attention's two best tokens
lie within that rounding, either may win. So a difference is judged by figures that it has no part
in: what the two kernels' logits differ by at the other positions of the answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine import Full, SamplingParams
from engine.plan.layers import Role
from engine.session.generate import generate

if TYPE_CHECKING:
    from engine import Exact
    from engine.llm import LLM
    from engine.session.session import Session


@dataclass
class Difference:
    """Position of a token that is not full attention's. gap: between the two tokens in full
    attention's logits; rank: of exact mode's token there, the number of better ones (0: a draw, 1:
    the second best); rounding: largest difference of the two kernels' logits at a position, median
    over the positions where the tokens agree.
    """

    position: int
    gap: float
    rank: int
    rounding: float = 0.0

    @property
    def is_tie(self) -> bool:
        """Whether full attention's own two best lie within the rounding of both kernels."""
        return self.rank <= 1 and self.gap <= 2 * self.rounding


@dataclass
class Answer:
    """What became of one answer of `tokens` tokens. least_read, length: rows that a draft's sparse
    layer reads at the end, of so many; logits_differ: largest difference of the two kernels' logits
    where the tokens agree, of all positions.
    """

    tokens: int
    cycles: int
    drafted: int
    accepted: int
    least_read: int
    length: int
    logits_differ: float
    differences: list[Difference] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self)


def full_answer(
    llm: LLM, ids: Sequence[int], tokens: int, offload: str = "device"
) -> tuple[list[int], torch.Tensor]:
    """Full attention's greedy answer, and the logits float32 [tokens, vocab] that chose it."""
    with llm.session(Full(), offload=offload) as session:
        session.prefill(ids)
        logits, written = [session.last_logits.clone()], []
        for piece in generate(session, [], greedy(tokens)):
            written.append(piece.token_id)
            logits.append(session.last_logits.clone())
    return written, torch.stack(logits[:tokens])


def compare(
    llm: LLM,
    method: Exact,
    offload: str,
    ids: Sequence[int],
    wanted: Sequence[int],
    logits: torch.Tensor,
) -> Answer:
    """Answer under exact mode and judge every token against `wanted`; after a difference the answer
    goes on with full attention's token, so all positions are judged.
    """
    differences: list[Difference] = []
    spreads: list[float] = []
    at, start = 0, len(ids)
    with llm.session(method, offload=offload) as session:
        session.prefill(ids)
        while at < len(wanted):
            stream = generate(session, [], greedy(len(wanted) - at))
            before = session.last_logits
            for piece in stream:
                if piece.token_id != wanted[at]:
                    differences.append(difference(at, logits[at], piece.token_id))
                    stream.close()
                    session.truncate(start + at)
                    session.decode(wanted[at])
                    at += 1
                    break
                spreads.append(float((before - logits[at]).abs().max()))
                before, at = session.last_logits, at + 1
        counters = session.counters
        answer = Answer(
            len(wanted),
            counters.cycles,
            counters.drafted,
            counters.accepted,
            least_read(session),
            len(session),
            max(spreads),
            differences,
        )
    for found in differences:
        found.rounding = statistics.median(spreads)
    return answer


def difference(position: int, logits: torch.Tensor, token: int) -> Difference:
    """Exact mode's `token` where full attention's logits [vocab] choose another."""
    gap = float(logits.max() - logits[token])
    return Difference(position, gap, int((logits > logits[token]).sum()))


def least_read(session: Session) -> int:
    """Rows that the sparse layer which reads least reads in a draft step."""
    rows = session.runtime.drafter.rows_read(len(session))
    return min(n for n, role in zip(rows, session.plan.roles) if role is Role.SPARSE)


def greedy(tokens: int) -> SamplingParams:
    """A greedy answer of exactly so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
