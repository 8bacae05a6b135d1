"""How the rows of a bank came about, token by token: what may be known of them beside the model and
the tokens.

A row is made by attention over all rows before it. So the origins of a beginning say everything
that its rows depend on.
"""

from __future__ import annotations

from collections.abc import Iterable

# FULL: by full attention over the rows before. Another text: by attention that it describes. None:
# by more than settings and tokens say (a choice of tokens in an answer, an unknown program).
Origin = str | None
FULL = ""
# by a prompt that a file says was read: it may say so of any rows, so no more is known of them
READ = "read"
Span = tuple[int, Origin]  # (stop, origin) of the tokens since the span before


class RowOrigins:
    """The origins of a session's rows, as spans."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans: list[Span] = []
        self.add(0, spans)

    def add(self, first: int, spans: Iterable[Span]) -> None:
        """Note those of the tokens from `first` on. What was noted of them is forgotten; what was
        not of tokens before, unknown.
        """
        self._spans = self.of(0, first)
        self._note(first, None)
        for stop, origin in spans:
            self._note(stop, origin)

    def _note(self, stop: int, origin: Origin) -> None:
        if self._spans and self._spans[-1][0] >= stop or not stop:
            return
        if self._spans and self._spans[-1][1] == origin:
            self._spans.pop()
        self._spans.append((stop, origin))

    def of(self, first: int, stop: int) -> list[Span]:
        """What is noted of tokens first .. stop-1."""
        found, begun = [], 0
        for end, origin in self._spans:
            if max(begun, first) < min(end, stop):
                found.append((min(end, stop), origin))
            begun = end
        return found

    def text(self, first: int, stop: int) -> Origin:
        """How tokens first .. stop-1 came about: FULL, a text, or None where that is not known."""
        spans = self.of(first, stop)
        if not spans or spans[-1][0] < stop or any(origin in (None, READ) for _, origin in spans):
            return None
        if len(spans) == 1:
            return spans[0][1]
        return "; ".join(f"{end - first} {origin or 'full'}" for end, origin in spans)
