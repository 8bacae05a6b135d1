"""Weights of few bits: packing, products."""
