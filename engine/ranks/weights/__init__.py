"""Weights of a rank."""
