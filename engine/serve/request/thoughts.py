"""What a model thinks before it answers: found while it is written, and given back to the chat
template in the form in which it was written, so that the next prompt begins with the same tokens.

Two forms, told apart by the chat template. Tags: <think> ... </think> (Qwen, DeepSeek, SmolLM3) or
[THINK] ... [/THINK] (Mistral), of which the prompt may hold the first. Channels: gpt-oss names a
channel in front of each message, and thinks in `analysis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.base.errors import EngineError
from engine.serve.request.calls.scanner import overlap
from engine.text.tokenizer import Tokenizer

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CHANNELS = (START, CHANNEL, MESSAGE, END)
THINKING = "analysis"  # the channel
FIELD = "reasoning_content"  # of a message, as clients name it
FIELDS = (FIELD, "thinking")  # as templates name it


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True)
class Marks:
    """How a model marks its thoughts: open + lead + thought + trail + close + gap + answer, as its
    template writes it. open: "" where it writes channels. name: of the field of a message that the
    template reads; "" where a thought stands in the content. hidden: {token id: marker} of special
    tokens that the text does not show.
    """

    open: str
    close: str = ""
    name: str = ""
    lead: str = ""
    trail: str = ""
    gap: str = ""
    hidden: Mapping[int, str] = field(default_factory=dict)

    def scanner(self, prompt: str) -> TagScanner | ChannelScanner:
        """Finds the thoughts of one answer. prompt: the text in front of it."""
        if not self.open:
            return ChannelScanner(self.hidden)
        at = prompt.rfind(self.open)
        written = prompt[at + len(self.open) :]
        if at < 0 or written.strip():
            return TagScanner(self, False, self.lead)
        if not self.name:
            return TagScanner(self, True, "", written)  # it goes back as it stands
        lead = self.lead[len(written) :] if self.lead.startswith(written) else ""
        return TagScanner(self, True, lead)

    def given_back(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template takes it: its thought in the field, or in its content."""
        found = dict(message)
        thought = found.pop(FIELD, "")
        if thought and self.name:
            found[self.name] = thought
        elif thought and self.open:
            found["content"] = f"{self.open}{thought}{self.close}{found['content']}"
        return found


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """How a model with this chat template marks its thoughts; None where it has none."""
    source = tokenizer.template.source if tokenizer.template else ""
    spelled = {i: tokenizer.token(i) or "" for i in tokenizer.special_ids}
    if CHANNEL in source and set(CHANNELS) <= set(spelled.values()):
        hidden = {i: text for i, text in spelled.items() if text in CHANNELS}
        return Marks("", name=_name(source), hidden=hidden)
    for tags in TAGS:
        if tags[1] in source:
            hidden = {i: text for i, text in spelled.items() if text in tags}
            return _around(tokenizer, Marks(*tags, name=_name(source), hidden=hidden))
    return None


def _name(source: str) -> str:
    """The field of a message in which a template looks for its thought; "": none."""
    asked = [(f"{quote}{name}{quote}" in source) for name in FIELDS for quote in "\"'"]
    for number, name in enumerate(FIELDS):
        if f".{name}" in source or any(asked[2 * number : 2 * number + 2]):
            return name
    return ""


def _around(tokenizer: Tokenizer, marks: Marks) -> Marks:
    """Marks with what the template writes around a thought. Without a field nothing: the thought
    goes back into the content with all its white space.
    """
    thought, answer = "0thought0", "0answer0"
    messages = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": answer, marks.name: thought},
    ]
    if not marks.name:
        return marks
    try:
        text = tokenizer.render(messages, add_generation_prompt=False)
    except EngineError:
        return marks
    before, found, behind = text.partition(thought)
    _, opened, lead = before.rpartition(marks.open)
    trail, closed, rest = behind.partition(marks.close)
    gap, answered, _ = rest.partition(answer)
    spaces = not (lead + trail + gap).strip()
    if not (found and opened and closed and answered and spaces):
        return marks
    return Marks(marks.open, marks.close, marks.name, lead, trail, gap, marks.hidden)


class TagScanner:
    """Splits an answer that is still being written into a thought at its beginning and the rest.

    inside: the prompt has begun the thought. lead: white space that is still to come in front of
    it. written: what of the thought the prompt has.
    """

    def __init__(self, marks: Marks, inside: bool, lead: str, written: str = "") -> None:
        self._marks, self._lead = marks, lead
        self._held = written
        self._state = "lead" if inside else "before"  # then thought, gap, answer

    @property
    def inside(self) -> bool:
        """Whether the model is thinking."""
        return self._state in ("lead", "thought")

    def push(self, text: str, token_id: int | None = None) -> list[str | Thought]:
        """The parts that are certain after a token and the text that it added."""
        marker = self._marks.hidden.get(token_id, "") if token_id is not None else ""
        self._held += text + marker
        return self._split(False)

    def release(self) -> list[str | Thought]:
        """The parts before a token that can be no part of a tag."""
        return [] if self.inside else self._split(True)

    def end(self) -> list[str | Thought]:
        """The parts that remain."""
        return self._split(True)

    def _split(self, last: bool) -> list[str | Thought]:
        found: list[str | Thought] = []
        while self._advance(last):
            pass
        if self._state == "thought":
            found += self._thought(last)
            if self._state == "gap":
                return [*found, *self._split(last)]
        elif self._state == "answer" and self._held:
            found.append(self._held)
            self._held = ""
        return found

    def _advance(self, last: bool) -> bool:
        """Go over what surrounds a thought; whether more of it may follow."""
        held, marks = self._held, self._marks
        if self._state == "before":
            shown = held.lstrip()
            if shown.startswith(marks.open):
                self._held, self._state = shown[len(marks.open) :], "lead"
                return True
            if last or not marks.open.startswith(shown):
                self._state = "answer"
        elif self._state in ("lead", "gap"):
            space = self._lead if self._state == "lead" else marks.gap
            if space.startswith(held) and held != space and not last:
                return False
            if held.startswith(space):
                self._held = held[len(space) :]
            elif self._state == "gap":
                self._held = held.lstrip()
                if not self._held and not last:
                    return False
            self._state = "thought" if self._state == "lead" else "answer"
        return False

    def _thought(self, last: bool) -> list[str | Thought]:
        """The thought as far as it is certain."""
        trail, close = self._marks.trail, self._marks.close
        text, closed, rest = self._held.partition(close)
        if closed:
            text, self._held, self._state = text.removesuffix(trail), rest, "gap"
        else:
            keep = 0 if last else max(overlap(text, close), overlap(text, trail + close))
            self._held = text[len(text) - keep :]
            text = text[: len(text) - keep]
        return [Thought(text)] if text else []


class ChannelScanner:
    """Splits an answer of gpt-oss into what it writes in its channel of thoughts and the rest.

    hidden: {token id: marker}. An answer without a channel is text.
    """

    def __init__(self, hidden: Mapping[int, str]) -> None:
        self._hidden = hidden
        self._channel = ""  # of the message that is being written
        self._state = "start"  # header: a name follows; body; between: behind a message

    @property
    def inside(self) -> bool:
        """Whether the model is thinking."""
        return self._state == "body" and self._channel.strip().startswith(THINKING)

    def push(self, text: str, token_id: int | None = None) -> list[str | Thought]:
        """The parts that are certain after a token and the text that it added."""
        found: list[str | Thought] = []
        if text and self._state == "start":
            self._state = "body"
        if text and self._state == "body":
            found.append(Thought(text) if self.inside else text)
        elif self._state == "header":
            self._channel += text
        marker = self._hidden.get(token_id, "") if token_id is not None else ""
        if marker == CHANNEL:
            self._state, self._channel = "header", ""
        elif marker == MESSAGE:
            self._state = "body"
        elif marker in (START, END):
            self._state = "between"
        return found

    def release(self) -> list[str | Thought]:
        """Nothing is held back."""
        return []

    end = release
