"""Weights that do not fit: which layers' matrices lie in host memory, planned before loading."""
