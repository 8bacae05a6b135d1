"""`python -m tools.paper`."""

import sys

from tools.paper.cli import main

sys.exit(main())
