"""Several sequences: the batch, its scheduler, chunked prefill beside decode, the shared step."""
