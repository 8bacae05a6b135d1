"""What a decode step knows of a layer before it comes to it."""
