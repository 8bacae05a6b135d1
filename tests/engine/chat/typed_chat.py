"""Lines typed into a chat of this process."""

import io

from engine.chat.cli import main


def typed(monkeypatch, *lines):
    """Put lines on standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def chat(fake_llm, monkeypatch, capsys, *lines, flags=()):
    """Type lines into a chat; (exit code, stdout, stderr)."""
    typed(monkeypatch, *lines)
    code = main(["--model", "x", *flags])
    return (code, *capsys.readouterr())
