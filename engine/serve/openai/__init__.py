"""OpenAI's chat and text completions: replies and streams."""
