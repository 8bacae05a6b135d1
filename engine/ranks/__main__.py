"""`python -m engine.ranks`: a rank that follows. Rank 0 starts it; nobody else needs to."""

import os
import sys
import threading
import time

from engine.ranks.place import Place, started

LOOK = 0.25  # seconds between two looks for rank 0


def _watch(place: Place) -> None:
    """End where rank 0 has ended, also before there is a connection to it."""
    while not place.orphaned:
        time.sleep(LOOK)
    time.sleep(LOOK)  # the connection may know it too, and say so
    sys.stderr.write(f"rank {place.rank}: rank 0 has ended\n")
    sys.stderr.flush()
    os._exit(1)


def start() -> int:
    """Take this process's place, import torch, and follow rank 0; the exit code."""
    place = started(os.environ)
    if place is None or place.rank == 0:
        sys.stderr.write(
            "error: engine.ranks: started by nobody; use --ranks N of engine.chat, or torchrun\n"
        )
        return 2
    place.bind()
    threading.Thread(target=_watch, args=(place,), daemon=True).start()
    from engine.ranks.drive.following import follow

    return follow(place)


if __name__ == "__main__":
    sys.exit(start())
