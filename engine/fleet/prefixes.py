"""Which replica has read which beginning of a text, as far as whoever hands requests out knows."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

BLOCK = 2048  # characters, some 500 tokens; beginnings are told apart by so many
DIGEST = 16  # bytes
MOST = 1 << 18  # beginnings remembered: half a gigabyte of texts in some 50 MB
SHARE = 0.5  # of a request that a replica must have read for the request to follow it
# of a request's body, in the order in which chat templates write them
TEXTS = ("tools", "system", "instructions", "messages", "prompt", "input")
R = TypeVar("R", bound=Hashable)


def beginnings(body: bytes) -> tuple[bytes, ...]:
    """Digests of the first BLOCK, 2 BLOCK, ... characters of what a request's body, in JSON, has
    its model read. What is no JSON object, or short, has none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, dict):
        return ()
    text = json.dumps({name: found[name] for name in TEXTS if found.get(name) is not None})
    digest, out = hashlib.sha256(), []
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK].encode())
        out.append(digest.digest()[:DIGEST])
    return tuple(out)


class Prefixes(Generic[R]):
    """Who got which beginnings, the newest `most` of them.

    A replica that has let a text go since is still named: it reads the text again, as any other
    would have to.
    """

    def __init__(self, most: int = MOST, share: float = SHARE) -> None:
        self.most, self.share = most, share
        self._holders: OrderedDict[bytes, R] = OrderedDict()
        self._counts: dict[R, int] = {}

    def holder(self, beginnings: Sequence[bytes], replicas: Collection[R]) -> R | None:
        """Who of `replicas` got the longest of some beginnings, where that is `share` of them."""
        for length in range(len(beginnings), 0, -1):
            if length < self.share * len(beginnings):
                return None
            found = self._holders.get(beginnings[length - 1])
            if found is not None and found in replicas:
                return found
        return None

    def held(self, replica: R) -> int:
        """How many beginnings a replica got."""
        return self._counts.get(replica, 0)

    def note(self, beginnings: Sequence[bytes], replica: R) -> None:
        """A replica gets a request."""
        for one in beginnings:
            self._forget(one)
            self._holders[one] = replica
            self._counts[replica] = self._counts.get(replica, 0) + 1
        while len(self._holders) > self.most:
            self._forget(next(iter(self._holders)))

    def drop(self, replica: R) -> None:
        """A replica is gone, and with it what it has read."""
        for one in [one for one, holder in self._holders.items() if holder == replica]:
            self._forget(one)

    def _forget(self, one: bytes) -> None:
        if one in self._holders:
            replica = self._holders.pop(one)
            self._counts[replica] -= 1
            if not self._counts[replica]:
                del self._counts[replica]
