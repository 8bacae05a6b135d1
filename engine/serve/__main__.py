"""python -m engine.serve."""

import sys

from engine.terminal.sigint import leave_quietly

leave_quietly("engine.serve")

from engine.serve.flags import parser, require_sense  # noqa: E402

if __name__ == "__main__":
    parser().require(require_sense)

from engine.serve.cli import main  # noqa: E402  (seconds of imports)

if __name__ == "__main__":
    sys.exit(main())
