"""`python -m tools.paper.pictures`."""

import sys

from tools.paper.pictures.cli import main

sys.exit(main())
