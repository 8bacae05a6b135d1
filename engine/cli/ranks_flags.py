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
        "--gpus",
        type=ranks,
        metavar="N",
        help="hold the model in N processes, split by heads, each on a GPU of its own; torchrun "
        "does the same where there are GPUs",
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
    """Which flag asks for several processes; "" for none. Raises UsageError for two of them, and
    for what does not go with GPUs.
    """
    given = {
        "--gpus": args.gpus is not None,
        "--ranks": args.ranks is not None,
        "--numa": args.numa != "off",
    }
    asked = [flag for flag, found in given.items() if found]
    if len(asked) > 1:
        raise UsageError(f"{asked[0]}: found beside {asked[1]}, which says how many there are")
    if args.gpus is not None:
        _require_gpus(args)
    return asked[0] if asked else ""


def _require_gpus(args: argparse.Namespace) -> None:
    if args.devices is not None:
        raise UsageError("--gpus: found beside --devices; layers or heads are split, not both")
    if args.device not in ("auto", "cuda"):
        raise UsageError(
            f"--gpus: found beside --device {args.device}; it takes the first {args.gpus} GPUs"
        )
    if args.split_by == "context":
        raise UsageError("--split-by: found context beside --gpus, which divides heads")
