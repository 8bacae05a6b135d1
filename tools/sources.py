"""python -m tools.sources RUN.json [-o PAGE.html]: the page of a recorded answer. Runs are written
by /sources FILE.json in the chat.
"""

import argparse
import sys
from pathlib import Path

from engine import EngineError
from engine.chat.provenance import Run, write_page


def main(argv=None):
    """Command line: 0, 1 (not a run), 2 (usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sources",
        description="Show what every word of a recorded answer read.",
    )
    parser.add_argument("run", metavar="RUN.json")
    parser.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where to write the page (default: beside the run)"
    )
    args = parser.parse_args(argv)
    out = args.out or str(Path(args.run).with_suffix(".html"))
    try:
        write_page(Run.load(args.run), out)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
