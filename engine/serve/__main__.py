"""python -m engine.serve."""

import sys

from engine.terminal.sigint import leave_quietly

leave_quietly("engine.serve")

from engine.serve.flags import parser, require_sense  # noqa: E402


def start() -> int:
    """Run the installed program; looks at the flags before it imports the engine."""
    parser().require(require_sense)
    from engine.serve.cli import main

    return main()


if __name__ == "__main__":  # not by start(): leave_quietly knows a module's own imports
    parser().require(require_sense)
    from engine.serve.cli import main

    sys.exit(main())
