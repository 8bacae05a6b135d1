"""How many rows a sliding-window layer keeps: its ring (engine/bank/window_ring.py)."""

from __future__ import annotations

# tokens that a session may go back without reading again, beside a chunk that breaks off
LEAST_SPARE = 512
QUERIES = 128  # what a query ring may ask for once more
ROUND = 64


def ring_size(window: int, chunk: int, capacity: int) -> int:
    """Return the tokens that a ring holds: the window, a chunk (or LEAST_SPARE) and QUERIES, at
    most the capacity.
    """
    size = window + max(min(chunk, capacity), LEAST_SPARE) + QUERIES
    return min(-(-size // ROUND) * ROUND, capacity)
