"""The conversation with a person or a pipe: a line in, an answer out, a dim line of figures."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from engine.chat import commands as chat_commands
from engine.chat.calibrating import Calibrating, noted
from engine.chat.conversation import Conversation
from engine.chat.display import Display
from engine.chat.evidence import print_watch
from engine.chat.figures import answer_line, bytes_read, context_used, resident_bytes, stats_text
from engine.chat.interrupts import Interrupts
from engine.chat.output import emit
from engine.errors import EngineError, OutputFailed, UsageError
from engine.sampling import SamplingParams
from engine.text.boundary import valid
from engine.units import clock, count

LONGEST_LINE = 1 << 24  # characters of a piped line; a longer one fills every context there is

if TYPE_CHECKING:
    from engine.generate import GenerationStats, Piece
    from engine.llm import LLM
    from engine.watch import Watch


class Chat:
    """A conversation that prints answers to `out` and everything else through `display`.

    llm: a loaded LLM. params: how answers are sampled. system: the system prompt. as_json: print
    one JSON object per answer. show_stats: print the figures of /stats after each answer. out:
    standard output by default. watch: measures what the sparse layers keep (engine.check.Watch).
    calibrate: find filter layers on a document where nobody has (None: ask, on a terminal).
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        display: Display,
        system: str | None = None,
        as_json: bool = False,
        show_stats: bool = False,
        out: TextIO | None = None,
        watch: Watch | None = None,
        calibrate: bool | None = False,
    ):
        self.llm, self.params, self.display = llm, params, display
        self.as_json, self.show_stats, self.out = as_json, show_stats, out
        self.interrupts = Interrupts()
        self.calibrating = Calibrating(calibrate)
        self.conversation = Conversation(llm, system, announce=display.line)
        self.conversation.session.watch = watch
        self.last: GenerationStats | None = None  # figures of the last answer
        self.last_bytes = 0  # K and V bytes that its steps read
        if not self.conversation.templated:
            display.note("this model has no chat template, so it completes text")

    # ---------------------------------------------------------------- reading and answering

    def read(self, text: str, name: str) -> bool:
        """Read a document into the conversation; return whether all of it was read."""
        if not text.strip():
            self.display.line(f"{name}: empty, nothing to read")
            return True
        calibration = self.calibrating.begin(self, text)
        started = time.monotonic()
        with self.interrupts:
            show = noted(self.display.reading(), calibration)
            done = self.conversation.read(text, name, self.interrupts.watched(show))
        self.display.clear()
        if self.interrupts.leaving:
            raise KeyboardInterrupt
        if done.tokens < done.total:
            percent = 100 * done.characters // max(1, len(text))
            self.display.line(
                f"stopped: {name}: {done.tokens:,} of {count(done.total)} were read and stay in "
                f"the context ({percent}% of the text); ask about them, or /read the file again"
            )
            return False
        seconds = time.monotonic() - started
        if done.total:
            self.display.note(
                f"{name}: {count(done.total)} read in {clock(seconds)}, "
                f"{done.total / max(seconds, 1e-9):,.0f} tok/s"
                f" · context {context_used(self.llm, self.conversation.session)}"
            )
        else:
            self.display.note(f"{name}: will be read together with your question")
        if calibration is not None:
            self.calibrating.finish(self, calibration)
        return True

    def ask(self, text: str) -> str:
        """Answer a message; return why the answer ended (Piece.finish_reason)."""
        return self._answer(self.conversation.ask, text)

    def retry(self) -> None:
        """Answer the last message again; after an interruption, read on and answer it."""
        if not self.conversation.can_retry:
            self.display.line("nothing to answer again yet: ask something first")
            return
        self._answer(self.conversation.retry)

    def _answer(self, ask: Callable[..., Iterator[Piece]], *arguments: str) -> str:
        bytes_before = bytes_read(self.conversation.session)
        written: list[str] = []
        ids: list[int] = []
        logprobs: list[float | None] = []
        lead, piece = self.conversation.templated, None
        with self.interrupts:
            progress = self.interrupts.watched(self.display.reading())
            try:
                for piece in ask(*arguments, self.params, progress, self.interrupts.should_stop):
                    # a template ends where the answer's first space begins
                    text = piece.text.lstrip() if lead else piece.text
                    lead = lead and not text
                    written.append(text)
                    if piece.token_id is not None:
                        ids.append(piece.token_id)
                        logprobs.append(piece.logprob)
                    if not self.as_json and text:
                        self.display.clear()
                        emit(text, self.out)
            except KeyboardInterrupt:
                if self.interrupts.leaving:
                    self._end_line(written)
                    raise
        self.display.clear()
        if piece is None:
            held = count(len(self.conversation.session))
            self.display.line(
                f"stopped while reading: {held} stay in the context; /retry reads on and answers"
            )
            return "interrupted"
        self.last = piece.stats
        self.last_bytes = bytes_read(self.conversation.session) - bytes_before
        if self.as_json:
            self._write_json("".join(written), ids, logprobs, piece)
        self._end_line(written)
        self._print_figures(piece)
        return piece.finish_reason or ""

    def _end_line(self, written: list[str]) -> None:
        if not self.as_json and "".join(written)[-1:] != "\n":
            emit("\n", self.out)

    def _write_json(
        self, text: str, ids: list[int], logprobs: list[float | None], piece: Piece
    ) -> None:
        session = self.conversation.session
        data: dict[str, object] = {
            "text": text,
            "finish_reason": piece.finish_reason,
            "token_ids": ids,
            "stats": piece.stats.to_dict(),
            "context": {"used": len(session), "limit": self.llm.max_context},
            "model": self.llm.name,
            "method": repr(session.method),
            "memory_bytes": resident_bytes(),
        }
        if self.params.logprobs:
            data["logprobs"] = logprobs
        if self.show_stats:
            data["session"] = session.stats.to_dict()
        emit(json.dumps(data, ensure_ascii=False) + "\n", self.out)

    def _print_figures(self, piece: Piece) -> None:
        session = self.conversation.session
        self.display.note(answer_line(self.llm, session, piece.stats, piece.finish_reason))
        if self.show_stats and not self.as_json:
            self.display.line(stats_text(self.llm, session, self.last))
        if session.watch is not None:
            print_watch(session.watch, self.display)

    # ---------------------------------------------------------------- the interactive loop

    def run(self) -> int:
        """Answer lines until the end of input or /quit; return the exit code."""
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if terminal:
            self.display.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        # a pipe learns from the exit code that a message got no answer; a person saw it
        interrupted, failed = False, 0
        while True:
            text = ""
            try:
                text = read_message(self.display)
                interrupted = False
                if text.strip() and self._respond(text) is chat_commands.LEAVE:
                    return 0 if terminal else failed
            except EOFError:
                if terminal:
                    self.display.line()
                return 0 if terminal else failed
            except KeyboardInterrupt:
                if self.interrupts.leaving or (not text and (interrupted or not terminal)):
                    return 130
                interrupted = not text
                hint = "\n(Ctrl-C again or Ctrl-D leaves)"
                self.display.line("stopped; the conversation stays" if text else hint)
            except (BrokenPipeError, OutputFailed, _InputFailed):
                raise
            except Exception as error:  # whatever it is, the conversation is worth more
                self.display.error(_told(error))
                if not is_command(text):
                    failed = getattr(error, "exit_code", 1)

    def _respond(self, text: str) -> object:
        """Answer a message or run a command; return LEAVE where the chat must end."""
        valid(text, "message")
        if not is_command(text):
            self.ask(text.removeprefix("/") if text.startswith("//") else text)
            return None
        with self.interrupts.at_once():
            return chat_commands.run(self, text)


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
