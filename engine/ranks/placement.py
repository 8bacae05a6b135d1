"""What each rank of a model holds, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.base.figures import human
from engine.model.config.share import BLOCK
from engine.ranks.llm import RankedLLM
from engine.ranks.share_llm import ShareLLM, card_of


@dataclass(frozen=True)
class Placement:
    """One rank's part. weights, bank, total: bytes; heads, kv_heads, mlp, vocab: (first, one past
    the last); cores: it runs on these, () where the system decides; tokens: whose K and V it holds
    of a full session, None: of all; device: "cpu", or its GPU; state_heads: of recurrent layers'
    values, None: there are none.
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
    tokens: int | None = None
    device: str = "cpu"
    state_heads: tuple[int, int] | None = None


def placements(llm: RankedLLM) -> list[Placement]:
    """The part of every rank at the planned context."""
    settings = {**llm.asked, "method": llm.method, "chunk": llm.chunk}
    settings["max_context"] = llm.max_context
    found, count = [], llm.place[1]
    for rank in range(count):
        device = card_of(rank) if llm.cards else "cpu"
        if llm.cards:
            settings["device"] = device
        how = llm.selection, llm.split_by, llm.cards
        one = ShareLLM(llm.name, (rank, count), *how, **settings)
        plan, share = one.planner.plan(), one.config.share
        config, context = one.config, one.config.context
        cores = llm.places[rank].cores if rank < len(llm.places) else ()
        found.append(
            Placement(
                rank,
                plan.bytes_of("weights"),
                plan.bytes_of("context bank"),
                plan.total,
                (0, config.num_heads) if share is None else share.heads.range,
                (0, config.num_kv_heads) if share is None else share.kv_heads.range,
                (0, config.intermediate_size) if share is None else share.mlp.range,
                (0, config.vocab_size) if share is None else share.vocab.range,
                cores,
                None if context is None else context.count(plan.max_context),
                device,
                None if share is None or share.values is None else share.values.range,
            )
        )
    return found


def placement_text(llm: RankedLLM) -> str:
    """A line for each rank: weights and bank in bytes, heads or tokens, and cores."""
    lines = []
    for one in placements(llm):
        where = f", cores {_numbers(one.cores)}" if one.cores else ""
        where = where if one.device == "cpu" else f"; on {one.device}"
        if one.tokens is None:
            heads, kv_heads = (_numbers(range(*own)) for own in (one.heads, one.kv_heads))
            whole, held = "", f"query heads {heads}, K/V heads {kv_heads}"
            if one.state_heads is not None:
                held += f", heads of recurrent state {_numbers(range(*one.state_heads))}"
        else:
            whole = "all "
            held = f"{one.tokens} of {llm.max_context} tokens, in blocks of {BLOCK} in turn"
        lines.append(
            f"rank {one.rank}: {whole}weights {human(one.weights)}, bank {human(one.bank)}, "
            f"{human(one.total)} at the peak; {held}{where}"
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
