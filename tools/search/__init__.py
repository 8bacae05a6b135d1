"""Searches for the settings of single methods."""
