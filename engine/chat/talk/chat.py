"""A conversation of the terminal program."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from engine.base.figures import clock, count
from engine.chat.talk.calibrating import Calibrating, noted
from engine.chat.talk.conversation import Conversation
from engine.cli.figures import answer_line, bytes_read, context_used, stats_text
from engine.llm import LLM
from engine.load.pocket import DEMONSTRATION, POCKET, is_pocket
from engine.methods.mass_meter import Watch
from engine.plan.free_memory import resident_bytes
from engine.sampling.params import SamplingParams
from engine.session.results import GenerationStats, Piece
from engine.terminal.display import Display
from engine.terminal.interrupts import Interrupts
from engine.terminal.output import emit

WARN_BELOW = 0.9  # share of the attention mass below which --watch warns


def print_watch(watch: Watch, display: Display) -> None:
    """Print what the watch measured; as a warning where the mass kept was low."""
    if not watch.sampled:
        return
    text = (
        f"attention mass kept: {watch.mass:.3f} now, lowest {watch.lowest:.3f}, "
        f"measured at {watch.sampled} of {count(watch.steps, 'step')}"
    )
    if watch.exact_steps:
        text += (
            f"; {count(watch.exact_steps, 'step')} ran full attention "
            f"(--exact-below {watch.exact_below:g})"
        )
    if watch.lowest < WARN_BELOW:
        display.line(
            f"{text}; this is low: /check compares with full attention, "
            "/method full answers with it"
        )
    else:
        display.note(text)


class Chat:
    """A conversation that prints answers to `out` and everything else through `display`.

    llm: a loaded LLM. params: how answers are sampled. system: the system prompt. as_json: print
    one JSON object per answer. show_stats: print the figures of /stats after each answer. out:
    standard output by default. watch: measures what the sparse layers keep
    (engine.session.check.Watch). calibrate: find filter layers on a document where nobody has
    (None: ask, on a terminal).
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
        self.conversation.session.watch_with(watch)
        self.last: GenerationStats | None = None  # figures of the last answer
        self.last_bytes = 0  # K and V bytes that its steps read
        self.warned = False  # that the model is a demonstration
        self.forgot = False  # whether it was said that the conversation begins to forget
        if not self.conversation.templated:
            display.note("this model has no chat template, so it completes text")

    def sample_with(self, params: SamplingParams) -> None:
        """Sample the answers from the next one on with these settings."""
        self.params = params

    # ---------------------------------------------------------------- reading and answering

    def read(self, text: str, name: str, titled: bool = False) -> bool:
        """Read a document into the conversation; return whether all of it was read. titled: with
        its name before it.
        """
        if not text.strip():
            self.display.line(f"{name}: empty, nothing to read")
            return True
        self.warn_of_demonstration(text)
        calibration = self.calibrating.begin(self, text)
        started = time.monotonic()
        with self.interrupts:
            show = noted(self.display.reading(), calibration)
            heading = f"{name}:\n\n" if titled else ""
            done = self.conversation.read(text, name, self.interrupts.watched(show), heading)
        self.display.clear()
        if self.interrupts.leaving:
            raise KeyboardInterrupt
        self._say_forgotten()
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
                f" · context {context_used(self.llm.planner, self.conversation.session)}"
            )
        else:
            self.display.note(f"{name}: will be read together with your question")
        if calibration is not None:
            self.calibrating.finish(self, calibration)
        return True

    def warn_of_demonstration(self, text: str) -> None:
        """Say once that the model in the box knows no text but its own."""
        if self.warned or not is_pocket(self.llm.folder):
            return
        own = POCKET / "welcome.txt"
        if not own.is_file() or text.strip() != own.read_text(encoding="utf-8").strip():
            self.warned = True
            self.display.line(DEMONSTRATION)

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
        self._say_forgotten()
        self._print_figures(piece)
        return piece.finish_reason or ""

    def _say_forgotten(self) -> None:
        """Say once what a conversation without end has begun to forget."""
        session = self.conversation.session
        if not session.forgotten:
            self.forgot = False  # emptied, it holds everything again
        elif not self.forgot:
            self.forgot = True
            self.display.line(session.method.forgotten(len(session)))

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
            "context": {"used": len(session), "limit": self.llm.max_context}
            | ({"forgotten": session.forgotten} if session.endless else {}),
            "documents": [
                {"name": d.name, "characters": d.stop - d.start}
                for d in self.conversation.documents
            ],
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
        self.display.note(answer_line(self.llm.planner, session, piece.stats, piece.finish_reason))
        if self.show_stats and not self.as_json:
            self.display.line(stats_text(self.llm.planner, session, self.last))
        if session.watch is not None:
            print_watch(session.watch, self.display)
