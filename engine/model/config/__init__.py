"""config.json, checked: families, blocks, rotation."""
