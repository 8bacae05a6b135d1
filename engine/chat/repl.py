"""The loop of a chat: lines of a person or a pipe are answered, or run as commands."""

from __future__ import annotations

import errno
import os
import stat
import sys

from engine.base.errors import EngineError, OutputFailed, RankLost, UsageError
from engine.chat import commands as chat_commands
from engine.chat.talk.chat import Chat
from engine.terminal.display import Display
from engine.text.boundary import valid

LONGEST_LINE = 1 << 24  # characters of a piped line; a longer one fills every context there is


def answer_lines(chat: Chat) -> int:
    """Answer lines until the end of input or /quit; return the exit code."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        chat.display.note(
            "/help lists the commands; Ctrl-C stops an answer, Ctrl-D or /quit leaves"
        )
    # a pipe learns from the exit code that a message got no answer; a person saw it
    interrupted, failed = False, 0
    while True:
        text = ""
        try:
            text = read_message(chat.display)
            interrupted = False
            if text.strip() and _respond(chat, text) is chat_commands.LEAVE:
                return 0 if terminal else failed
        except EOFError:
            if terminal:
                chat.display.line()
            return 0 if terminal else failed
        except KeyboardInterrupt:
            if chat.interrupts.leaving or (not text and (interrupted or not terminal)):
                return 130
            interrupted = not text
            hint = "\n(Ctrl-C again or Ctrl-D leaves)"
            chat.display.line("stopped; the conversation stays" if text else hint)
        except (BrokenPipeError, OutputFailed, RankLost, _InputFailed):
            raise
        except Exception as error:  # whatever it is, the conversation is worth more
            chat.display.error(_told(error))
            if not is_command(text):
                failed = getattr(error, "exit_code", 1)


def _respond(chat: Chat, text: str) -> object:
    """Answer a message or run a command; return LEAVE where the chat must end."""
    valid(text, "message")
    if not is_command(text):
        chat.ask(text.removeprefix("/") if text.startswith("//") else text)
        return None
    with chat.interrupts.at_once():
        return chat_commands.run(chat, text)


def is_command(text: str) -> bool:
    """Whether a line is a command; // begins a message with a slash."""
    return text.startswith("/") and not text.startswith("//")


def _told(error: Exception) -> str:
    """Return an error's message; with the name of its type where it is none of the engine's."""
    if isinstance(error, EngineError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _InputFailed(UsageError):
    """Standard input cannot be read on, so that the chat must end."""


def read_message(display: Display) -> str:
    '''Read one message from standard input.

    A message is one line, or lines joined by a backslash at their end, or the lines between two
    """. Raises EOFError at the end of input, and UsageError where it comes before the closing """.
    '''
    line = _read_line("> ", display)
    if line.lstrip().startswith('"""'):
        body = line.lstrip()[3:]
        lines = []
        while '"""' not in body:
            lines.append(body)
            try:
                body = _read_line('" ', display)
            except EOFError:
                raise UsageError(
                    'message: found the end of input, expected a closing """; nothing was answered'
                ) from None
        return "\n".join([*lines, body[: body.index('"""')]]).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = _read_line("\\ ", display)
        except EOFError:  # nothing follows: the backslash was the message's own
            return "\n".join([*lines[:-1], line])
    return "\n".join([*lines, line])


def _read_line(prompt: str, display: Display) -> str:
    """Read a line without its end. Bytes that are no UTF-8 come in as lone surrogates."""
    if sys.stdin is None:
        raise EOFError
    try:
        if sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
            # with readline's editing and history, where there is readline
            return input(prompt)
        if sys.stdin.isatty():
            display.prompt(prompt)
        line = sys.stdin.readline(LONGEST_LINE)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EIO:  # the terminal is gone
            raise EOFError from None
        reason = getattr(error, "strerror", None) or error
        raise _InputFailed(f"standard input: cannot be read: {reason}") from error
    if not line:
        raise EOFError
    if len(line) == LONGEST_LINE and not line.endswith("\n"):
        raise _InputFailed(
            f"standard input: found a line of more than {LONGEST_LINE:,} characters, expected less"
        )
    return line.rstrip("\n")


def unread() -> bool:
    """Whether a pipe or a file stands at standard input with something that nobody has read."""
    try:
        number = sys.stdin.fileno()
        kind = os.fstat(number)
        if stat.S_ISREG(kind.st_mode):
            return kind.st_size > os.lseek(number, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(kind.st_mode):
            return False
        import fcntl  # not on Windows
        import termios

        waiting = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > 0
    except (AttributeError, ImportError, OSError, ValueError):
        return False
