"""Exact mode over the parts of a model: each part drafts with its own layers, on its device."""

from __future__ import annotations

from collections.abc import Sequence

from engine.methods.base import Method, Runtime, Setup
from engine.methods.exact import Exact, ExactRuntime
from engine.methods.split.split_runtime import SplitRuntime


class SplitExactRuntime(ExactRuntime, SplitRuntime):
    """Full attention over parts, and beside it one drafter of the parts' drafters. Arguments as of
    SplitRuntime.
    """

    def __init__(
        self, method: Exact, setup: Setup, parts: Sequence[Runtime], starts: Sequence[int]
    ) -> None:
        SplitRuntime.__init__(self, method, setup, parts, starts)
        drafters = [part.drafter for part in parts if isinstance(part, ExactRuntime)]
        self.drafter = SplitRuntime(method.method, setup, drafters, starts)
        self._choice = {}, {}


def over_parts(
    method: Method, setup: Setup, parts: Sequence[Runtime], starts: Sequence[int]
) -> SplitRuntime:
    """The runtime of a method over the runtimes of parts; arguments as of SplitRuntime."""
    if isinstance(method, Exact):
        return SplitExactRuntime(method, setup, parts, starts)
    return SplitRuntime(method, setup, parts, starts)
