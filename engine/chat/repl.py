"""The conversation with a person or a pipe: a line in, an answer out, a dim line of figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from engine.chat import commands as chat_commands
from engine.chat.conversation import Conversation
from engine.chat.display import Display, printable
from engine.chat.evidence import print_watch
from engine.chat.figures import answer_line, bytes_read, context_used, resident_bytes, stats_text
from engine.chat.interrupts import Interrupts
from engine.errors import EngineError
from engine.sampling import SamplingParams
from engine.units import clock, count

if TYPE_CHECKING:
    from engine.generate import GenerationStats, Piece
    from engine.llm import LLM
    from engine.watch import Watch


class Chat:
    """A conversation that prints answers to `out` and everything else through `display`.

    llm: a loaded LLM. params: how answers are sampled. system: the system prompt. as_json: print
    one JSON object per answer. show_stats: print the figures of /stats after each answer. out:
    standard output by default. watch: measures what the sparse layers keep (engine.check.Watch).
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
    ):
        self.llm, self.params, self.display = llm, params, display
        self.as_json, self.show_stats, self.out = as_json, show_stats, out or sys.stdout
        self.interrupts = Interrupts()
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
        started = time.monotonic()
        with self.interrupts:
            done = self.conversation.read(
                text, name, self.interrupts.watched(self.display.reading())
            )
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
                        self.out.write(printable(text) if self.out.isatty() else text)
                        self.out.flush()
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
            self.out.write("\n")
            self.out.flush()

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
        self.out.write(json.dumps(data, ensure_ascii=False) + "\n")
        self.out.flush()

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
        terminal = sys.stdin.isatty()
        if terminal:
            self.display.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        # a pipe learns from the exit code that a message got no answer; a person saw it
        interrupted, failed = False, 0
        while True:
            try:
                text = read_message(self.display)
            except EOFError:
                if terminal:
                    self.display.line()
                return 0 if terminal else failed
            except KeyboardInterrupt:
                if interrupted or not terminal:
                    return 130
                interrupted = True
                self.display.line("\n(Ctrl-C again or Ctrl-D leaves)")
                continue
            interrupted = False
            if not text.strip():
                continue
            command = text.startswith("/") and not text.startswith("//")
            try:
                if not command:
                    self.ask(text.removeprefix("/") if text.startswith("//") else text)
                elif chat_commands.run(self, text) is chat_commands.LEAVE:
                    return 0 if terminal else failed
            except EngineError as error:
                self.display.line(f"error: {error}")
                failed = failed if command else error.exit_code


def read_message(display: Display) -> str:
    '''Read one message from standard input.

    A message is one line, or lines joined by a backslash at their end, or the lines between two
    """. Raises EOFError at the end of input.
    '''
    line = _read_line("> ", display)
    if line.lstrip().startswith('"""'):
        body = line.lstrip()[3:]
        lines = []
        while '"""' not in body:
            lines.append(body)
            body = _read_line('" ', display)
        return "\n".join([*lines, body[: body.index('"""')]]).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line("\\ ", display)
    return "\n".join([*lines, line])


def _read_line(prompt: str, display: Display) -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        # with readline's editing and history, where there is readline
        line = input(prompt)
    else:
        if sys.stdin.isatty():
            display.stream.write(prompt)
            display.stream.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        line = line.rstrip("\n")
    # bytes that are not UTF-8 come in as lone surrogates
    return line.encode("utf-8", "replace").decode("utf-8")
