"""`python -m tools.compare`."""

import sys

from tools.compare.cli import main

sys.exit(main())
