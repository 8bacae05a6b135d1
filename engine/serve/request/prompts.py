"""Messages and texts to token ids, in threads beside the event loop.

What a user writes is never taken for the tokens that a chat template writes between turns
(engine/text/literal.py), or a document could end its own turn and speak as the system.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from engine.base.errors import EngineError
from engine.serve.errors import ApiError
from engine.serve.request.calls.scanner import MARKERS, CallScanner, Form, form_of, space_before
from engine.serve.request.thoughts import FIELD, marks_of
from engine.serve.request.tools import NO_TOOLS, Tools, tools_of
from engine.text.characters import most_characters
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer

PIECE = 64 << 10  # characters


@dataclass(frozen=True)
class Prompt:
    """ids, the text that they spell, and where in it each one's characters end."""

    ids: list[int]
    text: str = ""
    ends: Sequence[int] = ()


class Prompts:
    """Encodes for one model, from several threads. vocab_size and ends (ids that end an answer):
    for grammars. capacity: tokens of the context; texts of many more are refused before they take
    memory.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        ends: Sequence[int],
        capacity: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size, self._ends, self._capacity = vocab_size, ends, capacity
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()  # templates take turns
        self.learn_template()
        tokenizer.let_others_run()
        self.characters = most_characters(tokenizer)
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._plain.encode_special_tokens = True  # the tokenizers' name for: do not recognise them

    def learn_template(self) -> None:
        """Find out how the chat template writes thoughts and calls."""
        self.marks = marks_of(self.tokenizer)
        self._space = space_before(self.tokenizer) if self.form in ("tags", "functions") else ""

    def _given_back(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message such that the template writes an answer as the model wrote it."""
        given = self.marks.given_back if self.marks else _without_thought
        found = given(message)
        if found.get("tool_calls") and self._space:
            found["content"] = found["content"].removesuffix(self._space)
        return found

    @property
    def form(self) -> Form | None:
        """How this model writes tool calls; None where it cannot, or where that is not known."""
        return form_of(self.tokenizer.template.source) if self.tokenizer.template else None

    def scanner(self, tools: Tools) -> CallScanner:
        """Finds the calls in one answer."""
        assert self.form is not None
        return CallScanner(self.form, tools.schemas, self.hidden, not tools.parallel)

    @property
    def hidden(self) -> dict[int, str]:
        """Markers of calls that are special tokens, by their ids."""
        spelled = {i: self.tokenizer.token(i) or "" for i in self.tokenizer.special_ids}
        return {i: text for i, text in spelled.items() if text in MARKERS}

    @property
    def grammars(self) -> Grammars:
        """Made when first asked for. Raises SettingError where llguidance is not installed."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self._vocab_size, self._ends)
            return self._grammars

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation, ready for the answer. tools: what the model may call. more: variables of
        the template.
        """
        messages = [self._given_back(message) for message in messages]
        try:
            with self._lock:
                written = self.tokenizer.write(messages, True, tools, more)
        except EngineError as error:
            raise ApiError(400, str(error), "messages", "template_error") from None
        self._bounded(written.text, "messages")
        ids, ends = self.tokenizer.encode_spans(written, special=False)
        return Prompt(ids, written.text, ends)

    def text(self, text: str, start: bool, known: bool) -> list[int]:
        """Ids of a text. start: the model's start tokens go in front. known: special tokens written
        in it are recognised.
        """
        self._bounded(text, "text")
        if known:
            return self.tokenizer.encode(text, special=start)
        return self.tokenizer.encode_by(self._plain, text)

    def completion(self, prompt: str | list[int], echo: bool) -> Prompt:
        """A completion's prompt; echo: with its text. Special tokens written in it are recognised,
        and those of ids are not shown.
        """
        if isinstance(prompt, str):
            self._bounded(prompt, "prompt")
            if not echo:
                return Prompt(self.tokenizer.encode(prompt))
            ids, where = self.tokenizer.encode_spans(prompt)
            return Prompt(ids, prompt, where)
        if not echo:
            return Prompt(prompt)
        words, parts, ends = self.tokenizer.stream(), list[str](), list[int]()
        for token_id in prompt:
            parts.append(words.push(token_id))
            ends.append((ends[-1] if ends else 0) + len(parts[-1]))
        parts.append(words.flush())
        return Prompt(prompt, "".join(parts), ends)

    def _bounded(self, text: str, param: str) -> None:
        """Raise ApiError where a long text has more than twice the tokens that the context holds,
        counted in pieces: a token takes some 600 bytes until its text has been read. What a cut
        between two pieces changes is far less.
        """
        capacity, found = self._capacity, 0
        if capacity is None or len(text) < 2 * PIECE:
            return
        for start in range(0, len(text), PIECE):
            found += len(self.tokenizer.encode_by(self._plain, text[start : start + PIECE]))
            if found > 2 * capacity:
                raise ApiError(
                    400,
                    f"{param}: found at least {found} tokens, expected at most "
                    f"{capacity - 1}: this server's context is {capacity} tokens (--ctx)",
                    param,
                    "context_length_exceeded",
                )


def _without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for a template that knows no thoughts: another model's, from an earlier turn."""
    return {name: value for name, value in message.items() if name != FIELD}


def usable_tools(body: Mapping[str, Any], prompts: Prompts) -> Tools | None:
    """The tools of a request, as far as this model can call them; None where it may not. Raises
    ApiError that names the field.
    """
    tools = tools_of(body)
    if tools is None or tools.choice == "none":
        return None
    if prompts.form is None:
        raise ApiError(400, f"tools: {NO_TOOLS}", "tools", "unsupported_parameter")
    return tools
