"""The chat itself: a line in, an answer out, one dim line of figures; Ctrl-C and Ctrl-D as people
expect them.
"""

import json
import signal
import sys
import threading
import time

from engine.chat import commands as chat_commands
from engine.chat.conversation import Conversation
from engine.chat.display import Display, printable, resident_bytes
from engine.chat.evidence import watch_line
from engine.errors import EngineError
from engine.sampling import SamplingParams
from engine.units import clock, count, human


class Interrupts:
    """Ctrl-C while something runs: the first asks it to stop where nothing is lost, the second
    leaves at once.
    """

    def __init__(self, display: Display):
        self.display, self.stopped, self.leaving = display, False, False

    def __enter__(self) -> "Interrupts":
        self.stopped = self.leaving = False
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *error) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number, frame) -> None:
        if self.stopped:
            self.leaving = True
            raise KeyboardInterrupt
        self.stopped = True

    def should_stop(self) -> bool:
        """For the decode loop: asked before every step."""
        return self.stopped

    def watched(self, show):
        """A progress callback that shows, and ends the prefill after this chunk once Ctrl-C was
        pressed.
        """

        def progress(p) -> None:
            show(p)
            if self.stopped:
                raise KeyboardInterrupt

        return progress


class Chat:
    """A conversation with a person or a pipe. llm: a loaded LLM (or what a test puts in its place)."""

    def __init__(
        self,
        llm,
        params: SamplingParams,
        display: Display,
        system: str | None = None,
        as_json: bool = False,
        show_stats: bool = False,
        out=None,
        omnikv=None,
        watch=None,
    ):
        self.llm, self.params, self.display = llm, params, display
        self.as_json, self.show_stats, self.out = as_json, show_stats, out or sys.stdout
        # what /method omnikv goes back to: the flags' settings
        self.omnikv = omnikv
        self.interrupts = Interrupts(display)
        self.conversation = Conversation(llm, system, announce=display.line)
        self.conversation.session.watch = watch
        self.last = None  # GenerationStats of the last answer
        self.last_bytes = 0  # bytes that its steps read
        if not self.conversation.templated:
            display.note("no chat template: completing text")

    # ---------------------------------------------------------------- reading and answering

    def read(self, text: str, name: str) -> bool:
        """Read a document into the conversation; whether all of it was read."""
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
            self.display.line(
                f"stopped: {name}: {done.tokens:,} of {count(done.total)} read, and they stay "
                f"({100 * done.characters // max(1, len(text))}% of the text); ask about them, or /read it again"
            )
            return False
        seconds = time.monotonic() - started
        if done.total:
            self.display.note(
                f"{name}: {count(done.total)} read in {clock(seconds)}, {done.total / max(seconds, 1e-9):,.0f} tok/s"
                f" · context {self._context()}"
            )
        else:
            self.display.note(f"{name}: will be read with the question")
        return True

    def ask(self, text: str) -> str:
        """Answer a message; returns why the answer ended."""
        return self._answer(self.conversation.ask, text)

    def retry(self) -> None:
        """Answer the last message again, or read on and answer it."""
        if not self.conversation.can_retry:
            self.display.line("nothing to answer again yet")
            return
        self._answer(self.conversation.retry)

    def _answer(self, ask, *arguments) -> str:
        bytes_before, written = _bytes_read(self.conversation.session), []
        lead, piece, ids, logprobs = self.conversation.templated, None, [], []
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
            held = len(self.conversation.session)
            self.display.line(
                f"stopped while reading: {count(held)} stay read; /retry reads on and answers"
            )
            return "interrupted"
        self.last, self.last_bytes = (
            piece.stats,
            _bytes_read(self.conversation.session) - bytes_before,
        )
        if self.as_json:
            self._write_json("".join(written), ids, logprobs, piece)
        self._end_line(written)
        self._figures(piece)
        watch_line(self)
        return piece.finish_reason

    def _end_line(self, written: list[str]) -> None:
        if not self.as_json and "".join(written)[-1:] != "\n":
            self.out.write("\n")
            self.out.flush()

    def _write_json(self, text: str, ids: list[int], logprobs: list, piece) -> None:
        session = self.conversation.session
        data = {
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

    def _figures(self, piece) -> None:
        s = piece.stats
        parts = [f"{s.cached_tokens:,} cached + {s.prompt_tokens:,} new tokens"]
        if s.prompt_tokens and s.prefill_seconds:
            parts.append(f"read in {clock(s.prefill_seconds)}, {s.prefill_rate:,.0f} tok/s")
        steps = s.sparse_steps + s.dense_steps
        if s.decode_seconds and steps:
            parts.append(
                f"{s.new_tokens:,} written at {s.decode_rate:.1f} tok/s, {1000 * s.decode_seconds / steps:.1f} ms each"
            )
        parts += [f"context {self._context()}", self._memory()]
        if piece.finish_reason in ("length", "context", "interrupted"):
            parts.append(
                {
                    "length": "cut at -n/--max-tokens",
                    "context": "the context is full",
                    "interrupted": "stopped",
                }[piece.finish_reason]
            )
        self.display.note("[" + " · ".join(part for part in parts if part) + "]")
        if self.show_stats and not self.as_json:
            self.display.line(chat_commands.stats_text(self))

    def _context(self) -> str:
        used, limit = len(self.conversation.session), self.llm.max_context
        return f"{used:,} of {limit:,} ({100 * used / limit:.0f}%)"

    def _memory(self) -> str:
        parts = []
        if getattr(self.llm.device, "type", "cpu") == "cuda":
            import torch

            parts.append(f"{human(torch.cuda.memory_allocated(self.llm.device))} on the GPU")
        if (held := resident_bytes()) is not None:
            parts.append(f"{human(held)} RAM")
        return ", ".join(parts)

    # ---------------------------------------------------------------- the interactive loop

    def run(self) -> int:
        """Read lines until the end of input or /quit; the exit code."""
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


def _bytes_read(session) -> int:
    stats = session.stats
    return stats.bytes_read_dense + stats.bytes_read_sparse


def read_message(display: Display) -> str:
    '''One message from standard input: a line, lines that end in a backslash and their next, or lines between """ and """.

    Raises EOFError at the end of input.
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
    # bytes that are no text come in as lone surrogates
    return line.encode("utf-8", "replace").decode("utf-8")
