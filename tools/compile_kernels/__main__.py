"""`python -m tools.compile_kernels`."""

import sys
from pathlib import Path

if "--triton" in sys.argv[:-1]:  # before anything imports the installed one
    sys.path.insert(0, str(Path(sys.argv[sys.argv.index("--triton") + 1]).resolve()))

from tools.compile_kernels.cli import main  # noqa: E402

sys.exit(main())
