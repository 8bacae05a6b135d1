"""Shared by the command lines of the chat and the server: flags, settings, plans in words."""
