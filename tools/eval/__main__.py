"""`python -m tools.eval`."""

import sys

from tools.eval.cli import main

sys.exit(main())
