"""Cutting a model into shares: which rank holds what, and where the ranks' results are joined."""
