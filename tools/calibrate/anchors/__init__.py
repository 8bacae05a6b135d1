"""Kascade's anchor layers and head map of a model: measured on texts, found, and written."""
