"""The page of a recorded answer. The chat's command /sources
FILE.json writes such a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.evidence.provenance import Run, write_page
from tools.common.program import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (not a run) or 2 (usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.repo.sources",
        description="Show what every word of a recorded answer read.",
    )
    parser.add_argument("run", metavar="RUN.json")
    parser.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where to write the page (default: beside the run)"
    )
    args = parser.parse_args(argv)
    out = args.out or str(Path(args.run).with_suffix(".html"))

    def work() -> None:
        write_page(Run.load(args.run), out)
        print(out)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
