"""Scores of tokens and the k largest."""
