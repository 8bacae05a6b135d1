"""Drafts without a model: where the newest tokens occurred before, what followed them there.

Source: prompt lookup decoding (Saxena, 2023); good where an answer copies from its context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NGRAM = 3  # tokens that must match: two match by chance in every long text


class PromptLookup:
    """Holds a session's token ids as one tensor on the host: int32, 4 bytes a token."""

    def __init__(self) -> None:
        self._ids = torch.empty(1024, dtype=torch.int32)
        self._known = 0

    def forget(self, length: int) -> None:
        """Tokens from `length` on may have changed."""
        self._known = min(self._known, length)

    def drafts(self, ids: Sequence[int], token: int, most: int) -> list[int]:
        """At most `most` tokens that followed the latest earlier occurrence of the newest NGRAM
        tokens: the last of `ids`, and `token` after them. Empty where there is none.
        """
        n = len(ids)
        if n < NGRAM or not most:
            return []
        self._learn(ids)
        text = self._ids[:n]
        # an occurrence ends before the newest token, so that something follows it
        hit = text[NGRAM - 1 :] == token
        for back, wanted in enumerate(reversed(ids[n - NGRAM + 1 :]), 1):
            hit &= text[NGRAM - 1 - back : n - back] == wanted
        found = torch.nonzero(hit)
        if not len(found):
            return []
        first = int(found[-1]) + NGRAM
        return [*ids[first : first + most], *([token] if first + most > n else [])][:most]

    def _learn(self, ids: Sequence[int]) -> None:
        n = len(ids)
        if n > len(self._ids):
            larger = torch.empty(max(n, 2 * len(self._ids)), dtype=torch.int32)
            larger[: self._known] = self._ids[: self._known]
            self._ids = larger
        self._known = min(self._known, n)
        if self._known < n:
            self._ids[self._known : n] = torch.tensor(ids[self._known : n], dtype=torch.int32)
            self._known = n
