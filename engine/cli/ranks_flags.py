"""The flags that hold a model in several processes. Nothing here imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from engine.base.errors import UsageError

MOST_RANKS = 64


def ranks(text: str) -> int:
    """Parse a number of processes: 2 to 64."""
    if text.isdecimal() and 2 <= int(text) <= MOST_RANKS:
        return int(text)
    raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 2 to {MOST_RANKS}")


def nodes(text: str) -> int | str:
    """Parse what --numa takes: auto, off or a number of processes."""
    return text if text in ("auto", "off") else ranks(text)


def ranks_flags(add: Callable, program: str = "engine.chat") -> None:
    """Add them. program: that torchrun would start."""
    add(
        "--ranks",
        type=ranks,
        metavar="N",
        help="hold the model in N processes of this machine, split by heads, each on cores of its "
        f"own; torchrun --nproc-per-node N -m {program} does the same (docs/PARALLEL.md)",
    )
    add(
        "--numa",
        type=nodes,
        default="off",
        metavar="WHAT",
        help="one process for each NUMA node that has cores (auto), or N dealt over the nodes, "
        "each with its part of weights and bank in its node's memory; off: one process (default)",
    )
    add(
        "--selection",
        choices=("global", "per_rank"),
        default="global",
        help="with several processes: select the tokens that one would (global), or let each "
        "choose by its own heads, with nothing sent for it (per_rank)",
    )
    add(
        "--split-by",
        choices=("heads", "context"),
        default="heads",
        help="what several processes divide: attention heads, MLPs and vocabulary (heads), or the "
        "tokens of the context bank, beside all weights on each (context)",
    )


def flag_of(args: argparse.Namespace) -> str:
    """Which flag asks for several processes; "" for none. Raises UsageError for both."""
    if args.ranks is None:
        return "" if args.numa == "off" else "--numa"
    if args.numa != "off":
        raise UsageError("--ranks: found beside --numa, which says how many there are")
    return "--ranks"
