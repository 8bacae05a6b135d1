"""Anchor layers and the head map of a model for Kascade: measured on texts, and written."""
