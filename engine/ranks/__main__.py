"""`python -m engine.ranks`: a rank that follows. Rank 0 starts it; nobody else needs to."""

import os
import sys

from engine.ranks.place import started


def start() -> int:
    """Take this process's place, import torch, and follow rank 0; the exit code."""
    place = started(os.environ)
    if place is None or place.rank == 0:
        sys.stderr.write(
            "error: engine.ranks: started by nobody; use --ranks N of engine.chat, or torchrun\n"
        )
        return 2
    place.bind()
    from engine.ranks.drive.following import follow

    return follow(place)


if __name__ == "__main__":
    sys.exit(start())
