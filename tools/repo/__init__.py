"""Programs about this repository: its structure, its API page, its answers."""
