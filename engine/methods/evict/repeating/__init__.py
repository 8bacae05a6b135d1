"""What a method needs that lets the model repeat a prompt: the passes' scores and shares."""
