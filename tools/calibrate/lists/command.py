"""What the commands share that find whose lists of tokens are alike (anchors, sharing): flags, the
texts that they measure on, and what their files say of how they came about.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine import LLM
from engine.base.errors import UsageError
from engine.base.version import VERSION
from tools.calibrate.texts import add_text_flags, texts_for
from tools.common.program import require_writable
from weights.fingerprint import fingerprint


def add_list_flags(
    parser: argparse.ArgumentParser, name: str, share: str = "", positions: int = 24
) -> None:
    """Flags of a command that writes the file `name`; share: what --share is of, "" without it;
    positions: the default of --positions.
    """
    add_text_flags(parser)
    add = parser.add_argument
    add("--length", type=int, default=4096, help="tokens per text (default 4096)")
    about = "decode positions at a text's end (default %(default)s)"
    add("--positions", type=int, default=positions, help=about)
    if share:
        add("--share", type=float, default=0.1, help=f"{share} (default 0.1)")
    add("--out", metavar="FILE", help=f"where to write {name} (default: beside the model)")
    add("--dry-run", action="store_true", help="measure and print, write nothing")


def require_every_token(llm: LLM, what: str) -> None:
    """Raise UsageError for a model some of whose layers do not see everything."""
    if llm.config.other_layers:
        raise UsageError(
            f"{what}: does not know sliding-window or recurrent layers ({llm.config.family})"
        )


def list_texts(
    llm: LLM, args: argparse.Namespace, name: str
) -> tuple[list[tuple[str, list[int]]], Path]:
    """The texts to measure on, and where the file `name` goes. Raises UsageError for counts or a
    length of nothing, and where the file cannot be written.
    """
    length = min(args.length, llm.max_context)
    if length < 128 or args.positions < 1 or args.texts < 1 or not 0 < args.share < 1:
        raise UsageError(
            f"found length {length}, positions {args.positions}, texts {args.texts}, share "
            f"{args.share}; expected a length of at least 128, counts of at least 1 and a share "
            "in (0, 1)"
        )
    path = Path(args.out or Path(llm.folder) / name)
    if not args.dry_run:
        require_writable("--out", path)
    return texts_for(llm, args.text, args.texts, length, args.seed), path


def made_by(llm: LLM, args: argparse.Namespace, command: str) -> dict[str, Any]:
    """What a file says of the model and of how it was made."""
    return {
        "fingerprint": fingerprint(llm.folder),
        "share": args.share,
        "positions": args.positions,
        "made_by": f"{command} {VERSION}",
    }
