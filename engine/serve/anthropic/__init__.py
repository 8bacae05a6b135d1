"""Anthropic's messages: requests and replies."""
