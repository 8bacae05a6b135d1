"""Tool calls in what a model writes, found while it is written.

Four forms, told apart by the chat template: Hermes and Qwen put each call between <tool_call> and
</tool_call>, and Qwen3-Coder and Qwen3.5 write it there as <function=NAME>; Mistral writes
[TOOL_CALLS] and then a list, or NAME[ARGS]{...}; Llama 3.1 answers with nothing but JSON objects,
perhaps behind <|python_tag|>. What only looks like a call stays text: JSON that does not parse, a
name that the request does not offer, arguments that are no object.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.base.errors import EngineError
from engine.serve.request.calls.functions import CLOSE, FUNCTION, OPEN, PARAMETER, FunctionReader
from engine.serve.request.calls.typed import DECODER, typed
from engine.text.tokenizer import Tokenizer

Form = Literal["tags", "functions", "list", "bare"]

CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
PYTHON = "<|python_tag|>"
# spellings that a tokenizer may have as special tokens, which are not shown
MARKERS = (OPEN, CLOSE, CALLS, ARGUMENTS, PYTHON)
ID = 9  # letters and digits of a call's id: Mistral's templates accept no other length
BEGUN = re.compile(f"{OPEN}|{FUNCTION}")
WORD = re.compile(r"[-+.\w]*")  # at an end, what may become a value of JSON


def form_of(template: str) -> Form | None:
    """How a model with this chat template writes calls; None where that is not known."""
    if "tools" not in template:
        return None
    if FUNCTION in template:
        return "functions" if OPEN in template and PARAMETER in template else None
    if CALLS in template:
        return "list"
    if OPEN in template:
        return "tags"
    if PYTHON in template or '"parameters"' in template:
        return "bare"
    return None


def space_before(tokenizer: Tokenizer) -> str:
    """White space that the chat template writes between a text and a call behind it. The model
    writes it too: in its text it would stand twice when the text goes back to the template.
    """
    answer = "0answer0"
    call = {"id": "0" * ID, "type": "function", "function": {"name": "f", "arguments": {}}}
    turn = {"role": "assistant", "content": answer, "tool_calls": [call]}
    try:
        text = tokenizer.render([{"role": "user", "content": "0"}, turn], False)
    except EngineError:
        return ""
    between, found, _ = text.partition(answer)[2].partition(OPEN)
    return between if found and between.isspace() else ""


def new_id() -> str:
    """An id for a call."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID))


@dataclass(frozen=True)
class Call:
    """arguments: the JSON text of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)


Part = str | Call


def call_of(value: Any, offered: Mapping[str, Any]) -> Call | None:
    """The call that a JSON value is, if it is one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if value["name"] not in offered:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


def _call(name: str, arguments: Mapping[str, Any]) -> Call | None:
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:
        return None


class CallScanner:
    """Splits an answer that is still being written into text and calls.

    offered: {name of a function: the JSON schema of its parameters}. hidden: {token id: its marker}
    of special tokens that the text does not show. single: only the first call counts, and nothing
    after it.
    """

    def __init__(
        self,
        form: Form,
        offered: Mapping[str, Any],
        hidden: Mapping[int, str] | None = None,
        single: bool = False,
    ) -> None:
        self.form, self.offered, self.single = form, offered, single
        self._hidden = dict(hidden or {})
        self._held = ""  # what may be a call, or the beginning of a marker
        self._inside = False  # whether _held begins at a marker
        self._reader: FunctionReader | None = None  # of the call that _held begins with
        self._behind = False  # whether _held begins behind a function, whose tag may yet end
        self._begun = False  # whether anything but white space was shown
        self._called = False
        self._space = ""  # white space behind a call
        self._unseen: set[str] = set()  # markers that came as special tokens

    def push(self, text: str, token_id: int | None = None) -> list[Part]:
        """The parts that are certain after a token and the text that it added."""
        marker = self._hidden.get(token_id, "") if token_id is not None else ""
        if marker:
            self._unseen.add(marker)
        self._held += text + marker
        return self._kept(self._certain(False))

    def marks(self, token_id: int | None) -> bool:
        """Whether a token is a marker that the text does not show."""
        return token_id in self._hidden

    def end(self) -> list[Part]:
        """The parts that remain."""
        if self.form in ("tags", "functions"):
            return self._kept(self._certain(True))
        calls = self._parsed(self._held) if self._inside else None
        found: list[Part] = list(calls) if calls else [self._shown(self._held)]
        self._held = ""
        return self._kept(found)

    def _certain(self, last: bool) -> list[Part]:
        if self.form == "tags":
            return self._tags(last)
        return self._functions(last) if self.form == "functions" else self._rest()

    def _kept(self, parts: list[Part]) -> list[Part]:
        """Parts without empty texts, and without what follows a single call."""
        found: list[Part] = []
        for part in parts:
            if self.single and self._called:
                break
            if isinstance(part, Call):
                self._called, self._space = True, ""
            elif self._called and not part.strip():
                self._space += part  # between two calls it is nobody's
                continue
            else:
                part, self._space = self._space + part, ""
                self._begun = self._begun or bool(part.strip())
            if part:
                found.append(part)
        return found

    def _shown(self, text: str) -> str:
        for marker in self._unseen:
            text = text.replace(marker, "")
        return text

    # ---------------------------------------------------------------- between tags

    def _tags(self, last: bool) -> list[Part]:
        found: list[Part] = []
        while True:
            at = self._held.find(OPEN)
            if at < 0:
                keep = 0 if last else overlap(self._held, OPEN)
                found.append(self._shown(self._held[: len(self._held) - keep]))
                self._held = self._held[len(self._held) - keep :]
                return found
            found.append(self._shown(self._held[:at]))
            self._held = self._held[at:]
            stop, call = self._tagged(last)
            if stop == 0:
                return found
            found.append(call or self._shown(self._held[:stop]))
            self._held = self._held[stop:]

    def _tagged(self, last: bool) -> tuple[int, Call | None]:
        """(where the held text's first call ends, the call or None where it is text); 0: not yet
        known.
        """
        body = self._held[len(OPEN) :]
        begin = len(body) - len(body.lstrip())
        close = body.find(CLOSE)
        if close < 0 and not last:
            return 0, None
        try:
            value, stop = DECODER.raw_decode(body, begin)
        except json.JSONDecodeError as error:
            unfinished = "Unterminated string" in error.msg or WORD.fullmatch(body, error.pos)
            if unfinished and not last:
                return 0, None  # the close is inside a string
            return len(OPEN) + (close + len(CLOSE) if close >= 0 else len(body)), None
        except (ValueError, RecursionError):  # NaN, a number of thousands of digits
            return len(OPEN) + (close + len(CLOSE) if close >= 0 else len(body)), None
        rest = body[stop:]
        behind = len(rest) - len(rest.lstrip())
        call = call_of(value, self.offered)
        if rest.startswith(CLOSE, behind):
            return len(OPEN) + stop + behind + len(CLOSE), call
        if behind == len(rest) and last:
            return len(self._held), call  # a model that forgot the end
        close = body.find(CLOSE, stop)
        if close < 0 and not last:
            return 0, None
        return len(OPEN) + (close + len(CLOSE) if close >= 0 else len(body)), None

    # ---------------------------------------------------------------- functions between tags

    def _functions(self, last: bool) -> list[Part]:
        found: list[Part] = []
        while True:
            if self._behind and not self._closed(last):
                return found
            if self._reader is None:
                begun = BEGUN.search(self._held)
                keep = 0 if last else max(overlap(self._held, mark) for mark in (OPEN, FUNCTION))
                at = begun.start() if begun else len(self._held) - keep
                found.append(self._shown(self._held[:at]))
                self._held = self._held[at:]
                if not begun:
                    return found
                self._reader = FunctionReader()
            if not self._reader.over(self._held, last):
                return found
            stop, call = self._reader.at, self._read(self._reader)
            found.append(call or self._shown(self._held[:stop]))
            self._held, self._reader, self._behind = self._held[stop:], None, call is not None

    def _read(self, reader: FunctionReader) -> Call | None:
        if reader.name is None or reader.name not in self.offered:
            return None
        schema = self.offered[reader.name]
        return _call(reader.name, {k: typed(v, k, schema) for k, v in reader.values.items()})

    def _closed(self, last: bool) -> bool:
        """Whether it is known what follows a function; its tag's end, or a part of it at the end of
        the answer, is nobody's.
        """
        rest = self._held.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE and not last:
            return False
        if rest.startswith(CLOSE) or CLOSE.startswith(rest):
            self._held = rest[len(CLOSE) :]
        self._behind = False
        return True

    # ---------------------------------------------------------------- to the answer's end

    def _rest(self) -> list[Part]:
        """Text before the first marker; everything from there on waits for the end."""
        if self._inside:
            return []
        if self.form == "bare" and not self._begun and not self._held.strip():
            return []  # it may stand in front of a call
        marker = CALLS if self.form == "list" else PYTHON
        at = self._held.find(marker)
        if self.form == "bare" and not self._begun and self._held.lstrip()[:1] == "{":
            at = 0
        if at >= 0:
            self._inside = True
            text, self._held = self._held[:at], self._held[at:]
            return [self._shown(text)]
        keep = overlap(self._held, marker)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return [self._shown(text)]

    def _parsed(self, text: str) -> list[Call] | None:
        """The calls that a text consists of; None where anything in it is none."""
        try:
            if self.form == "list":
                values = _listed(text)
            else:
                values = _objects(text.replace(PYTHON, "", 1), " \t\r\n;")
        except (ValueError, RecursionError):
            return None
        calls = [call for call in (call_of(value, self.offered) for value in values) if call]
        return calls if calls and len(calls) == len(values) else None


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of a text that begins a marker."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)


def _objects(text: str, between: str) -> list[Any]:
    """The JSON values of a text, with the characters `between` around them. Raises ValueError."""
    found: list[Any] = []
    at = 0
    while True:
        while at < len(text) and text[at] in between:
            at += 1
        if at == len(text):
            return found
        value, at = DECODER.raw_decode(text, at)
        found.append(value)


def _listed(text: str) -> list[Any]:
    """The calls behind Mistral's markers: lists, or names with arguments. Raises ValueError."""
    found: list[Any] = []
    for piece in text.split(CALLS)[1:]:
        name, named, arguments = piece.partition(ARGUMENTS)
        if named:
            (value,) = _objects(arguments, " \t\r\n")
            found.append({"name": name.strip(), "arguments": value})
            continue
        for value in _objects(piece, " \t\r\n"):
            found += value if isinstance(value, list) else [value]
    return found
