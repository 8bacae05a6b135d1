"""A request's body: its fields, prompts, tools and formats, checked."""
