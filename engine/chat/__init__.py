"""The chat: a terminal program over one session. `python -m engine.chat --help`."""

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; imports the engine first."""
    from engine.chat import cli

    return cli.main(arguments)
