"""Where events begin, by surprise alone: a function of a text's surprises, on the host.

Source: EM-LLM (Fountas et al., ICLR 2025), section 3.2: a token begins an event where its surprise
exceeds mean + gamma * standard deviation of the surprises before it, of a window. An event that
would be shorter than `least` goes on, one of `most` tokens ends.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import torch


class Boundaries:
    """The surprises of a text's tokens, and `starts`: positions of events, the first at `sink`.

    What is known of a text does not depend on how it came: `add` may have one token or all.
    """

    def __init__(self, sink: int, window: int, gamma: float, least: int, most: int):
        self.sink, self.window, self.gamma, self.least, self.most = sink, window, gamma, least, most
        self.told = array("f")
        self.starts = [sink]

    @property
    def known(self) -> int:
        """Tokens whose surprise is known."""
        return len(self.told)

    @property
    def whole(self) -> int:
        """Events whose end nothing will move: two boundaries follow the beginning of each."""
        return max(0, len(self.starts) - 2)

    def add(self, surprises: Iterable[float]) -> None:
        """Take the surprises of the tokens that follow."""
        first = self.known
        self.told.extend(surprises)
        for token in self._surprising(first):
            self._go_to(token)
            if token - self.starts[-1] >= self.least:
                self.starts.append(token)
        self._go_to(self.known + 1)

    def _go_to(self, token: int) -> None:
        """End the events of `most` tokens that begin so far before a token."""
        while token - self.starts[-1] > self.most:
            self.starts.append(self.starts[-1] + self.most)

    def _surprising(self, first: int) -> list[int]:
        """Tokens from `first` on whose surprise is above the threshold: mean and deviation in
        float64, of up to `window` tokens before each, two at least.
        """
        low, first = max(0, first - self.window), max(first, 2)
        if first >= self.known:
            return []
        values = torch.tensor(self.told[low:].tolist(), dtype=torch.float64)
        sums = torch.zeros(2, len(values) + 1, dtype=torch.float64)
        sums[:, 1:] = torch.stack([values, values * values]).cumsum(1)
        at = torch.arange(first, self.known) - low
        before = (at - self.window).clamp(min=0)
        mean, square = (sums[:, at] - sums[:, before]) / (at - before)
        threshold = mean + self.gamma * (square - mean * mean).clamp(min=0).sqrt()
        return (at[values[at] > threshold] + low).tolist()

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.told[length:]
        del self.starts[max(1, bisect_left(self.starts, length)) :]
        self._go_to(self.known + 1)

    def events(self, length: int) -> int:
        """Events that begin before a position."""
        return bisect_left(self.starts, length)

    def reset(self, surprises: Iterable[float]) -> None:
        """Begin anew with these surprises."""
        self.cut(0)
        self.add(surprises)
