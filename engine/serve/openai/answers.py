"""The parts of an answer that is being written: its thought, its text and its calls."""

from __future__ import annotations

from collections.abc import Callable

from engine.serve.request.calls.scanner import Call, CallScanner
from engine.serve.request.thoughts import ChannelScanner, TagScanner, Thought
from engine.serve.worker.worker import Wrote

FINISH = {"stop": "stop", "length": "length", "context": "length", "interrupted": "length"}

Part = str | Call | Thought


class Answers:
    """A request's answers. scanner: makes what finds the calls in one; None where the request
    offers no tools. thinker: the same of thoughts. chat: white space in front of an answer is not
    shown. thinking: tokens of thoughts so far. forgets: how many of so many tokens a conversation
    without end has forgotten; None: it has an end.
    """

    def __init__(
        self,
        chat: bool,
        scanner: Callable[[], CallScanner] | None = None,
        thinker: Callable[[], TagScanner | ChannelScanner] | None = None,
        forgets: Callable[[int], int] | None = None,
    ) -> None:
        self._forgets = forgets
        self._chat, self._scanner, self._thinker = chat, scanner, thinker
        self._scanners: dict[int, CallScanner] = {}
        self._thinkers: dict[int, TagScanner | ChannelScanner] = {}
        self._begun: set[int] = set()
        self.called: dict[int, list[Call]] = {}  # choice -> its calls so far
        self.thinking = 0

    def forgotten(self, tokens: int) -> dict[str, int]:
        """What the usage adds for a conversation without end of so many tokens: how many of them
        are forgotten.
        """
        return {} if self._forgets is None else {"forgotten_tokens": self._forgets(tokens)}

    def parts(self, event: Wrote) -> list[Part]:
        """What a step adds: thoughts and texts, none of them empty, and calls."""
        found: list[Part] = []
        for part in self._split(event):
            if isinstance(part, Call):
                self.called.setdefault(event.choice, []).append(part)
            elif isinstance(part, str) and self._chat and event.choice not in self._begun:
                # a template ends where the answer's first space begins
                part = part.lstrip()
            if part:
                self._begun.add(event.choice)
                found.append(part)
        return found

    def _split(self, event: Wrote) -> list[Part]:
        calls = None
        if self._scanner is not None:
            calls = self._scanners.setdefault(event.choice, self._scanner())
        if self._thinker is None:
            if calls is None:
                return [event.text]
            plain: list[Part] = [*calls.push(event.text, event.token_id)]
            return plain + (calls.end() if event.finish else [])
        thoughts = self._thinkers.setdefault(event.choice, self._thinker())
        before = thoughts.inside
        parts = thoughts.push(event.text, event.token_id)
        self.thinking += event.token_id is not None and (before or thoughts.inside)
        marker = calls is not None and calls.marks(event.token_id)
        if marker:
            parts += thoughts.release()
        if event.finish:
            parts += thoughts.end()
        if calls is None:
            return list(parts)
        found: list[Part] = []
        for part in parts:
            found += [part] if isinstance(part, Thought) else calls.push(part)
        if marker and not thoughts.inside:
            found += calls.push("", event.token_id)
        return found + (calls.end() if event.finish else [])

    def finish(self, choice: int, reason: str) -> str:
        """OpenAI's finish_reason."""
        if reason == "stop" and self.called.get(choice):
            return "tool_calls"
        return FINISH[reason]
