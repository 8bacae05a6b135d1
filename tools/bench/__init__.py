"""Per-token latency of every method and peer, side by side."""
