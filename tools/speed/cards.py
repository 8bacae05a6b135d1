"""Predict a decode step over several cards, without any: milliseconds, bytes that a card holds, and
what crosses the link, for each split of docs/PARALLEL.md. Nothing here is measured.

    python -m tools.speed.cards --shape llama-3-8b --cards 1,2,4 --context 8K,128K,1M

A step takes the sum of: weights over the rate at which a card reads them and a launch for each
product; K and V over that rate, and a launch for each layer's attention; OmniKV's choices; small
kernels; and collectives. Launches and shares are those of tools.compile_kernels.predict, of one
card. A card's rate is a copy's on an H100; a collective of some KB takes 4 us and 2 us for every
doubling of the cards, what others measured of one-shot sums over NVLink inside a CUDA graph
(vllm-project/vllm#24111 and #24532: 7 and 10 us for 512 KB over 2 and 4 H100s; NVIDIA/nccl#1259:
6 us for 2), beside its bytes over the link.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from engine.base.errors import UsageError
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan
from tools.bench.floor import step_bytes
from tools.bench.shapes import SHAPES, shape_config, shape_filters, short_size
from tools.compile_kernels.predict import (
    CHOICE,
    CHOICE_TOKEN,
    DENSE_LAUNCH,
    DENSE_SHARE,
    LAUNCH,
    SMALL,
    SPARSE,
)
from tools.compile_kernels.predict import READ as LARGER
from tools.speed import harness
from tools.speed.harness import Report, flag

READ = 3.0e12  # bytes a second of an H100's memory, by a copy
LINK = 366e9  # bytes a second of NVLink, by a large sum over 4 H100s
FIRST, DOUBLING = 4e-6, 2e-6  # seconds of a collective of some KB
HOP = 10e-6  # seconds in which a hidden vector crosses from one card's layers to the next's
CARD = 78 * 2.0**30  # bytes that an H100 of 80 GB leaves to programs
ROOM = 4e9  # of what is neither weights nor bank
BYTES = 2  # of bfloat16
SPLITS = ("heads", "layers", "context")


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part, bytes that the fullest card holds, and bytes that a card sends."""

    weights: float
    attention: float
    choice: float
    collectives: float
    held: float
    sent: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.weights + self.attention + self.choice + self.collectives + SMALL

    @property
    def fits(self) -> bool:
        """Whether the fullest card holds its part."""
        return self.held + ROOM <= CARD


def collective(cards: int, size: float) -> float:
    """Seconds in which cards sum, or gather, `size` bytes of each."""
    if cards == 1:
        return 0.0
    return FIRST + DOUBLING * math.log2(cards) + size * (cards - 1) / LINK


def step(config: ModelConfig, layers: LayerPlan, k: int, n: int, cards: int, split: str) -> Step:
    """A step at n tokens, whose sparse layers read k, over cards by one of SPLITS."""
    partial, tail = set(layers.partial_layers), TAIL_BLOCK
    depth = config.num_layers
    rows = [min(n, k + tail) if layer in partial else n for layer in range(depth)]
    found = step_bytes(config, BYTES, layers, n, rows)
    bank = n * depth * config.kv_bytes(BYTES)
    heads, whole = 1 / cards, 1.0
    if split == "heads":  # where ranks outnumber the K/V heads, several hold the same one
        heads = math.ceil(config.num_kv_heads / cards) / config.num_kv_heads
    read = {"heads": 1 / cards, "layers": whole, "context": whole}[split]  # of the weights
    seen = {"heads": heads, "layers": whole, "context": 1 / cards}[split]  # of K and V
    dense = depth - len(partial)
    products = 4 * depth + 1
    weights = found.weights * read / READ + products * LAUNCH
    attention = found.read * seen / READ / DENSE_SHARE
    attention += dense * DENSE_LAUNCH + len(partial) * SPARSE
    chosen = bool(partial) and k + tail < n
    choice = chosen * (CHOICE + n * CHOICE_TOKEN * LARGER / READ)
    crossing = _crossing(config, layers, k if chosen else 0, cards, split)
    collectives = sum(count * collective(cards, size) for count, size in crossing)
    sent = sum(count * size for count, size in crossing)
    if split == "layers":
        collectives, sent = (cards - 1) * HOP, config.hidden_size * BYTES
    held = found.weights * (whole if split == "context" else 1 / cards)
    held += bank * (1 / cards if split != "heads" else heads)
    return Step(weights, attention, choice, collectives, held, sent if cards > 1 else 0.0)


def _crossing(
    config: ModelConfig, layers: LayerPlan, k: int, cards: int, split: str
) -> list[tuple[int, float]]:
    """(how many collectives, bytes that a card brings into each) of a token, as docs/PARALLEL.md
    has it. k: tokens that filter layers choose; 0: they choose none.
    """
    filters = sum(bool(group.layers) for group in layers.groups) if k else 0
    lists = (filters, 8.0 * k)
    if split == "context":  # partial outputs in float32 with their log-sum-exp, to all
        one = config.num_heads * (config.head_dim + 1) * 4.0
        return [(config.num_layers, one), lists]
    one = config.hidden_size * float(BYTES)
    logits = config.vocab_size * BYTES / cards
    return [(2 * config.num_layers + 1, one), (1, logits), lists]


def plans(args: argparse.Namespace, config: ModelConfig) -> dict[str, LayerPlan]:
    """The layers of full attention and of OmniKV with one wait layer."""
    method = OmniKV(filter_layers=shape_filters(args.shape), wait_layers=1, tokens=args.tokens)
    return {"full": Full().plan(config), "omnikv w1": method.plan(config)}


def work(args: argparse.Namespace) -> Report:
    """Predict every context, method, split and number of cards."""
    harness.require(args, 1, "tokens")
    try:
        counts = [int(word) for word in args.cards.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"--cards: found {args.cards!r}, expected numbers of cards, as 1,2,4")
    config = shape_config(args.shape)
    rows, lines = [], []
    for context in harness.sizes(args, "context"):
        for name, layers in plans(args, config).items():
            alone = step(config, layers, args.tokens, context, 1, "heads")
            for split in SPLITS:
                for cards in counts:
                    if cards == 1 and split != "heads":
                        continue
                    found = step(config, layers, args.tokens, context, cards, split)
                    rows.append(_row(context, name, split, cards, found))
                    lines.append(_line(context, name, split, cards, found, alone))
    head = (
        "tokens | method | split | cards | ms a token | of these collectives | gain | a card holds"
    )
    facts = (
        f"Predicted, not measured: {args.shape} in bfloat16, {READ / 1e12:g} TB/s a card, a "
        f"collective of {1e6 * collective(2, 0):g} us over 2 cards and {1e6 * collective(4, 0):g} "
        f"over 4, {LINK / 1e9:g} GB/s; a card of {CARD / 1e9:g} GB with {ROOM / 1e9:g} for the rest"
    )
    return Report(facts, harness.markdown(head, lines), {"rows": rows})


def _row(context: int, name: str, split: str, cards: int, found: Step) -> dict[str, Any]:
    parts = {part: round(1000 * value, 4) for part, value in vars(found).items()}
    parts |= {"held": int(found.held), "sent": int(found.sent), "fits": found.fits}
    return dict(
        context=context, method=name, split=split, cards=cards, ms=1000 * found.seconds, **parts
    )


def _line(context: int, name: str, split: str, cards: int, found: Step, alone: Step) -> tuple:
    gain = alone.seconds / found.seconds
    held = f"{found.held / 1e9:.1f} GB" + ("" if found.fits else ", does not fit")
    return (
        *(short_size(context), name, "-" if cards == 1 else split, cards),
        *(f"{1000 * found.seconds:.2f}", f"{1000 * found.collectives:.2f}", f"{gain:.2f}", held),
    )


FLAGS: dict[str, dict[str, Any]] = {
    "--shape": dict(choices=SHAPES, default="llama-3-8b"),
    "--context": flag("8K,128K,1M", "tokens in the session, or several such sizes"),
    "--cards": dict(default="1,2,4", metavar="N,..", help="how many (%(default)s)"),
    "--tokens": flag(2048, "OmniKV's budget"),
}
main = harness.program("cards", __doc__, FLAGS, work)

if __name__ == "__main__":
    raise SystemExit(main())
