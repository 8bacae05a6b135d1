"""`python -m tools.calibrate`."""

import sys

from tools.calibrate.cli import main

sys.exit(main())
