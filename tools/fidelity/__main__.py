"""`python -m tools.fidelity`."""

import sys

from tools.fidelity.cli import main

sys.exit(main())
