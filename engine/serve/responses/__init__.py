"""OpenAI's responses: requests and replies."""
