"""Stop strings in a text that arrives in pieces, and the token where a text position falls."""

from bisect import bisect_left
from collections.abc import Sequence


class StopScanner:
    """Hold back the end of a text as long as it could still become a stop string.

    The text ends before the stop string that is complete first, or before the longest if several
    end together. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False  # a stop string was met

    def push(self, text: str) -> str:
        """Return the text that may be shown now.

        A stop string sets `found`; it and everything after it are dropped.
        """
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.found = "", True
            return text[: min(found)[1]]
        keep = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text still held back, when the answer ends for another reason."""
        text, self._held = self._held, ""
        return text


def tokens_before(ends: Sequence[int], position: int) -> int:
    """Return how many tokens lie wholly before a text position.

    ends: ascending text positions at which the tokens end. Tokens that share a character have equal
    ends; they are never separated.
    """
    n = bisect_left(ends, position + 1)
    while 0 < n < len(ends) and ends[n - 1] == ends[n]:
        n -= 1
    return n
