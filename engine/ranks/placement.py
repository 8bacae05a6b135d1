"""What each rank of a model holds, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.base.figures import human
from engine.ranks.llm import RankedLLM
from engine.ranks.share_llm import ShareLLM


@dataclass(frozen=True)
class Placement:
    """One rank's part. weights, bank, total: bytes; heads, kv_heads, mlp, vocab: (first, one past
    the last); cores: it runs on these, () where the system decides.
    """

    rank: int
    weights: int
    bank: int
    total: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    mlp: tuple[int, int]
    vocab: tuple[int, int]
    cores: tuple[int, ...] = ()


def placements(llm: RankedLLM) -> list[Placement]:
    """The part of every rank at the planned context."""
    settings = {**llm.asked, "method": llm.method, "chunk": llm.chunk}
    settings["max_context"] = llm.max_context
    found, count = [], llm.place[1]
    for rank in range(count):
        one = ShareLLM(llm.name, (rank, count), llm.selection, **settings)
        plan, share = one.planner.plan(), one.config.share
        assert share is not None
        cores = llm.places[rank].cores if rank < len(llm.places) else ()
        found.append(
            Placement(
                rank,
                plan.bytes_of("weights"),
                plan.bytes_of("context bank"),
                plan.total,
                share.heads.range,
                share.kv_heads.range,
                share.mlp.range,
                share.vocab.range,
                cores,
            )
        )
    return found


def placement_text(llm: RankedLLM) -> str:
    """A line for each rank: weights and bank in bytes, heads and cores."""
    lines = []
    for one in placements(llm):
        cores = f", cores {_numbers(one.cores)}" if one.cores else ""
        lines.append(
            f"rank {one.rank}: weights {human(one.weights)}, bank {human(one.bank)}, "
            f"{human(one.total)} at the peak; query heads {_numbers(range(*one.heads))}, "
            f"K/V heads {_numbers(range(*one.kv_heads))}{cores}"
        )
    return "\n".join(lines)


def _numbers(cores: Iterable[int]) -> str:
    """Format ascending numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1][-1] = core
        else:
            parts.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
