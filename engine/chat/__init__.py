"""The chat: a terminal program over one session. `python -m engine.chat --help`."""

from engine.chat.cli import main

__all__ = ["main"]
