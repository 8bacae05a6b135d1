"""`python -m tools.suites`."""

import sys

from tools.suites.cli import main

sys.exit(main())
