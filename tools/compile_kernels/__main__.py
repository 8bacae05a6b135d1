"""`python -m tools.compile_kernels`."""

import sys

from tools.compile_kernels.cli import main

sys.exit(main())
