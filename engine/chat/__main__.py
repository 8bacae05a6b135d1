"""`python -m engine.chat`."""

import sys

from engine.chat.cli import main

sys.exit(main())
