"""Decode attention: dense, sparse, split and merged."""
