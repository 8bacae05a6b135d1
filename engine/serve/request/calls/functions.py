"""A call of Qwen3-Coder's and Qwen3.5's form, read while it is written:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is any text, </parameter> in it too: the one that ends it has <parameter= or </function>
behind it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
LONGEST = 256  # characters of a name

T = TypeVar("T")
Reads = Generator[None, None, T]  # waits for more text at every yield


def is_name(text: str) -> bool:
    """Whether a function or a parameter may have this name in a call."""
    return 0 < len(text) <= LONGEST and not set(text) & {"<", ">", "\n"}


class FunctionReader:
    """One call. at: how far the text is read. name: None where it is no call; values: texts."""

    def __init__(self) -> None:
        self.at = 0
        self.name: str | None = None
        self.values: dict[str, str] = {}
        self._text, self._last = "", False
        self._reads = self._call()

    def over(self, text: str, last: bool) -> bool:
        """Read on in a text that begins with what was read; last: nothing follows it. Whether it is
        known what it is: a call up to `at`, or none. The tag around it may be missing, its end may
        not: an answer that was cut has half a value.
        """
        self._text, self._last = text, last
        return next(self._reads, self) is self

    def _call(self) -> Reads[None]:
        if (yield from self._one_of(OPEN, FUNCTION)) == OPEN:
            if not (yield from self._one_of(FUNCTION)):
                return
        name = yield from self._name()
        while name:
            what = yield from self._one_of(PARAMETER, FUNCTION_END)
            if what == FUNCTION_END:
                self.name = name
            if what != PARAMETER:
                return
            key = yield from self._name()
            value = (yield from self._value()) if key else None
            if key is None or value is None:
                return
            self.values[key] = value.removeprefix("\n").removesuffix("\n")

    def _one_of(self, *marks: str) -> Reads[str]:
        """The mark behind white space; "" where it is none of these."""
        while True:
            while self._text[self.at : self.at + 1].isspace():
                self.at += 1
            rest = self._text[self.at : self.at + max(map(len, marks))]
            for mark in marks:
                if rest.startswith(mark):
                    self.at += len(mark)
                    return mark
            if self._last or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def _name(self) -> Reads[str | None]:
        """What stands before the next >; None where that is no name."""
        begin = self.at
        while ">" not in (part := self._text[begin : begin + LONGEST + 1]):
            if self._last or len(part) > LONGEST or "\n" in part:
                return None
            yield
        name = part.partition(">")[0]
        self.at = begin + len(name) + 1
        return name if is_name(name) else None

    def _value(self) -> Reads[str | None]:
        """A parameter's text; None where the answer ends within it."""
        begin = look = self.at
        while True:
            stop = self._text.find(PARAMETER_END, look)
            if stop < 0:
                if self._last:
                    self.at = len(self._text)
                    return None
                look = max(begin, len(self._text) - len(PARAMETER_END) + 1)
                yield
                continue
            self.at = behind = stop + len(PARAMETER_END)
            ends = yield from self._one_of(PARAMETER, FUNCTION_END)
            self.at = look = behind
            if ends:
                return self._text[begin:stop]
