"""The offer to calibrate an uncalibrated model, on a document while the chat reads it.

Asked once, on a terminal only; --calibrate does it unasked, --no-calibrate never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from engine.base.errors import EngineError
from engine.base.figures import clock, count
from engine.calibration.keep import calibration, keep
from engine.chat.talk.conversation import Conversation
from engine.chat.talk.while_reading import WhileReading, seconds, unable
from engine.llm import LLM
from engine.methods.omnikv.method import OmniKV
from engine.plan.filter_layers import filter_layers
from engine.terminal.display import Display
from engine.terminal.interrupts import Interrupts


class Talk(Protocol):
    """What a calibration uses of a chat."""

    llm: LLM
    display: Display
    interrupts: Interrupts
    conversation: Conversation
    as_json: bool


class Calibrating:
    """What a chat does about filter layers that nobody has found.

    wish: True calibrates on the first document, False never; None asks where a person can answer.
    """

    def __init__(self, wish: bool | None = None) -> None:
        self.wish = wish

    def begin(self, chat: Talk, text: str) -> WhileReading | None:
        """Ask, if necessary, before a document is read. None: do not calibrate on this one."""
        llm, display, asked = chat.llm, chat.display, self.wish is None
        if llm.options.forever:
            if not asked:
                display.line("not calibrated: --forever runs methods that need no filter layers")
            return None
        person = sys.stdin is not None and sys.stdin.isatty() and display.tty
        if self.wish is False or asked and (chat.as_json or not person):
            return None
        method = llm.options.method
        if asked and method is not None and not _guesses(method):
            return None
        known = filter_layers(llm.folder, llm.resolved, llm.config)
        # a set that others have published may be replaced by the model's own, if somebody asks
        if known.source in ("file", "found") or asked and known.source != "spread":
            if not asked:
                self.wish = False
                display.line("not calibrated: this model is (/plan names its filter layers)")
            return None
        tokens = len(chat.conversation.tokenizer.encode(text))
        if why := unable(llm, tokens):
            if not asked:
                display.line(f"not calibrated: {why}")
            return None
        cost = clock(seconds(llm, tokens))
        if asked:
            self.wish = False  # one question a conversation
            if not self._agreed(chat, cost):
                return None
        else:
            display.line(f"calibrating while reading: about {cost} beside the reading itself")
        return WhileReading(chat.conversation.session)

    def _agreed(self, chat: Talk, cost: str) -> bool:
        chat.display.line(
            "this model is uncalibrated, so that all layers read everything. Its filter "
            f"layers can be found on this document, once: about {cost} after the reading."
        )
        chat.display.prompt("calibrate? [y/N] ")
        try:
            answer = sys.stdin.readline(100)
        except KeyboardInterrupt:
            chat.display.line()
            return False
        return answer.strip().lower() in ("y", "yes")

    def finish(self, chat: Talk, reading: WhileReading) -> None:
        """Search, keep what was chosen and use it. A Ctrl-C ends the search and leaves the
        conversation as it was.
        """
        display, llm, began = chat.display, chat.llm, time.monotonic()
        if not reading.ready:
            display.line("not calibrated: the document was not read in one go")
            return

        def tell(left: float) -> None:
            text = f"calibrating: {clock(time.monotonic() - began)}, about {clock(left)} left"
            display.progress(text, began)

        try:
            with chat.interrupts:
                chosen = reading.choose(chat.interrupts.watched(tell))
        except KeyboardInterrupt:
            display.clear()
            if chat.interrupts.leaving:
                raise
            display.line("calibration stopped; what was read stays")
            return
        display.clear()
        self.wish = False
        layers = llm.config.num_layers - len(llm.config.local_layers)
        display.line(
            f"filter layers {chosen.filters}: {chosen.full} of {layers} layers read everything, "
            f"KL {chosen.kl:.4f} nats against full attention ({chosen.guess:.4f} with an even "
            f"spread), found in {clock(time.monotonic() - began)}"
        )
        if chosen.kl > chosen.guess:
            display.line("not kept: the even spread is nearer to full attention on this document")
            return
        assert llm.folder is not None
        try:
            path = keep(Path(llm.folder), calibration(Path(llm.folder), chosen.filters, chosen.k))
            display.line(f"kept in {path}; the next start finds them")
        except EngineError as error:
            display.error(str(error))
        self._use(chat, chosen.filters)

    def _use(self, chat: Talk, filters: tuple[int, ...]) -> None:
        """Go on with the filter layers, where the method was the engine's own choice."""
        session, asked_for = chat.conversation.session, chat.llm.options.method
        if asked_for is not None and not _guesses(asked_for):
            chat.display.line("/method omnikv uses them now")
            return
        wanted = asked_for if isinstance(asked_for, OmniKV) else OmniKV()
        with chat.interrupts:
            session.set_method(
                _with(wanted, filters), chat.interrupts.watched(chat.display.reading())
            )
        chat.display.note(f"from now on {session.method.name}, {count(len(session))} stay read")


def _guesses(method: object) -> bool:
    """Whether a method that was asked for has its filter layers from a guess."""
    return isinstance(method, OmniKV) and method.filter_layers is None


def _with(method: OmniKV, filters: tuple[int, ...]) -> OmniKV:
    return replace(method, filter_layers=filters, wait_layers=method.wait_layers or 0)


def noted(show: Callable[..., None], reading: WhileReading | None) -> Callable[..., None]:
    """Wrap a progress callback so that a calibration sees every chunk."""
    if reading is None:
        return show

    def progress(figures: object) -> None:
        show(figures)
        reading.note(figures)  # type: ignore[arg-type]

    return progress
