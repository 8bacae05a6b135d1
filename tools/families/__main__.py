"""`python -m tools.families`."""

import sys

from tools.families.cli import main

sys.exit(main())
