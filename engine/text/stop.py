"""Stop strings in a text that arrives in pieces."""

from bisect import bisect_left
from collections.abc import Sequence


class StopScanner:
    """Holds back the end of a text as long as it could still become a stop string.

    The first stop string to be complete ends the text, the longest where several end together: the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False  # a stop string was met

    def push(self, text: str) -> str:
        """Text that may be shown; a stop string and what follows it are dropped and set `found`."""
        if not self._stops or self.found:
            return "" if self.found else text
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
        """The text still held back, when the answer ends for another reason."""
        text, self._held = self._held, ""
        return text


def tokens_before(ends: Sequence[int], position: int) -> int:
    """How many tokens lie wholly before a text position: the largest clean border n where ends[n -
    1] <= position.

    ends: ascending text positions where tokens end. A border inside a character (equal ends) is not
    clean.
    """
    n = bisect_left(ends, position + 1)
    while 0 < n < len(ends) and ends[n - 1] == ends[n]:
        n -= 1
    return n
