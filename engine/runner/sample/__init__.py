"""What a method may learn of a model before it reads a prompt."""
