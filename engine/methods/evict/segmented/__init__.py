"""Prompts that are cut while they are read."""
