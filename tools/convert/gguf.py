"""A GGUF file of a plain Llama as a Hugging Face
folder that the engine, and transformers, load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.common.arguments import command
from tools.common.program import guarded, progress, say
from tools.convert.to_gguf import DTYPES, convert
from weights.gguf.header import KINDS


def conversion_progress() -> Callable[[int, int], None]:
    """A report of elements decoded, of all: one line of stderr, renewed at each per cent."""
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        if 100 * done // total != shown:
            shown = 100 * done // total
            progress(f"converting: {shown}% of {total / 1e6:,.0f} M weights")

    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (not convertible, no room) or 2 (usage)."""
    parser = command(
        "python -m tools.convert.gguf",
        "Convert a GGUF file of the architecture llama to a Hugging Face folder.",
        "Types: "
        + ", ".join(KINDS)
        + ". The engine opens such files as they are; a folder is for other programs.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="must not exist yet")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="what the folder stores"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        if convert(args.file, args.folder, args.dtype, conversion_progress()):
            say("")
        else:
            say("already there, the same conversion")
        print(args.folder)

    return guarded(work, "stopped; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
