"""A step that reads as many tokens as its query wants: what it has read is known on the device."""

from __future__ import annotations

from engine.bank.base import Step
from engine.methods.select.base import mean_counts
from engine.methods.select.index.base import IndexRuntime
from engine.plan.layers import Role


class VaryingRuntime(IndexRuntime):
    """`wanted` differs from step to step. `rows_read` asks the device once a step, for all
    layers.
    """

    _length = 0  # tokens of sequence 0 in the step that chose last

    def lengths(self, step: Step) -> list[int]:
        """Keeps the step's length for `rows_read`."""
        lengths = super().lengths(step)
        self._length = lengths[0]
        return lengths

    def beside(self, n: int) -> int:
        """Newest tokens that a step at n tokens reads beside its choice."""
        return min(n, self.method.newest(self.k))

    def rows_read(self, n: int) -> list[int]:
        """The mean over the lists of the step that has just run at n tokens, rounded up; the most
        that a step at another length reads.
        """
        seen = super().rows_read(n)
        if n != self._length:
            return seen
        counted = mean_counts(self.chosen)
        for layer, role in enumerate(self.plan.roles):
            group = self.plan.group_of[layer]
            if role is Role.SPARSE and group in self.chosen:
                seen[layer] = counted[group] + self.beside(n) if group in counted else n
        return seen

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._length = 0
