"""Tool calls in what a model writes: the forms that templates have, and values by their schema."""
