"""Layers of a decode step between which Python has nothing to decide: one call of C++."""
