"""Tokens that a method has run again behind a prompt, before it ends."""
