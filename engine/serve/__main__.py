"""python -m engine.serve."""

import sys

from engine.serve.cli import main

sys.exit(main())
