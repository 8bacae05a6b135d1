"""Processes that run templates and expressions of untrusted folders."""
