"""The state of a model's recurrent layers: as it stands and as it stood at earlier lengths."""
