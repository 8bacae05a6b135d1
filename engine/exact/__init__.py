"""Exact mode: a sparse method drafts, full attention verifies."""
