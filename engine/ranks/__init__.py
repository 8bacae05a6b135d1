"""One model over several processes, split by heads: on torch.distributed, driven by rank 0."""
