"""What a step has read where its lists are as long as its query wants."""

from __future__ import annotations

from engine.bank.base import Step
from engine.methods.select.base import Selecting, mean_counts
from engine.plan.layers import Role


class CountedRuntime(Selecting):
    """`rows_read` asks the device once a step, for all layers; a method's `select` tells `chose_at`
    of the step.
    """

    _length = 0  # tokens of sequence 0 in the step that chose last

    def chose_at(self, step: Step) -> list[int]:
        """Keep the step's length for `rows_read`; the lengths of all sequences."""
        lengths = step.lengths
        self._length = lengths[0]
        return lengths

    def beside(self, n: int) -> int:
        """Newest tokens that a step at n tokens reads beside its choice."""
        raise NotImplementedError

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
