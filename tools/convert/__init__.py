"""Programs that convert checkpoints."""
