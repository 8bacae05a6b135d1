"""python -m engine.serve."""

import os
import sys

from engine.ranks.place import started
from engine.terminal.sigint import leave_quietly

leave_quietly("engine.serve")

from engine.serve.flags import parser, require_sense  # noqa: E402


def follow_rank_0() -> None:
    """Under torchrun rank 0 alone serves: another one ends here, when rank 0 does."""
    place = started(os.environ)
    if place is not None and place.rank:
        place.bind()
        from engine.ranks.drive.following import follow

        sys.exit(follow(place))


def start() -> int:
    """Run the installed program; looks at the flags before it imports the engine."""
    follow_rank_0()
    parser().require(require_sense)
    from engine.serve.cli import main

    return main()


if __name__ == "__main__":  # not by start(): leave_quietly knows a module's own imports
    follow_rank_0()
    parser().require(require_sense)
    from engine.serve.cli import main

    sys.exit(main())
