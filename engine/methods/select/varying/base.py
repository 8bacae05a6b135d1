"""A step that reads as many tokens as its query wants: what it has read is known on the device."""

from __future__ import annotations

from engine.bank.base import Step
from engine.methods.select.index.base import IndexRuntime
from engine.methods.select.varying.counted import CountedRuntime


class VaryingRuntime(CountedRuntime, IndexRuntime):
    """`wanted` differs from step to step."""

    def lengths(self, step: Step) -> list[int]:
        """Keeps the step's length for `rows_read`."""
        return self.chose_at(step)

    def beside(self, n: int) -> int:
        return min(n, self.method.newest(self.k))
