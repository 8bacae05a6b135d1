"""Shared by the tools: documents, synthetic banks, planted selections, argument parsing."""
