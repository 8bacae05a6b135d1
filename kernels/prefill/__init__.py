"""A prompt's attention: dense, windowed, sparse, block-sparse."""
