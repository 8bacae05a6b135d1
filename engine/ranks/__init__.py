"""One model over several processes, split by heads or by context, driven by rank 0."""
