"""A step of the bounds of choosing: each layer ranks the tokens, keeps the best of every list and
attends to those.
"""

from __future__ import annotations

import torch

from engine.bank.base import Step
from engine.methods.oracle.settings import ByGranularity
from engine.methods.select.base import Selecting, Selection
from engine.plan.layers import Role, tail_start
from kernels.select.topk import select_topk


class GranularRuntime(Selecting):
    """No CUDA graph: the host knows whether k covers the bank. apart: whether lists of a layer
    differ in length.
    """

    apart = False

    method: ByGranularity
    scores: torch.Tensor
    index: torch.Tensor

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> None:
        """Rank the tokens: fill self.scores [B * lists, at least the longest], for the first
        lengths[b] tokens of each sequence. q [B, Q, H, D] rotated.
        """
        raise NotImplementedError

    def budgets(self, step: Step, stop: torch.Tensor) -> torch.Tensor:
        """How many of its scores each list takes: int32 [B * lists]. stop: its candidates' end."""
        return torch.full_like(stop, self.k)

    def covers(self, candidates: int) -> bool:
        """Whether every list takes all of so many candidates."""
        return candidates <= self.k

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        tail, lengths = self.tail_start(step), step.lengths
        if self.covers(max(tail.tolist() if self.method.tail else lengths)):
            return Selection(None, None, tail)
        self.score(layer, q, step, lengths)
        index = self.index[self.group(layer)]
        lists = len(index) // len(q)
        stop = tail.repeat_interleave(lists)
        counts = torch.empty_like(stop)
        first, wanted = torch.zeros_like(stop), self.budgets(step, stop)
        backend = self.setup.backend
        select_topk(self.scores, first, stop, wanted, index, counts, backend=backend)
        by_list = counts.view(len(q), lists)
        return Selection(
            index.view(len(q), lists, -1), by_list if self.apart else by_list[:, 0], tail
        )

    def group(self, layer: int) -> int:
        """The number of a layer that chooses among those that do."""
        number = self.plan.group_of[layer]
        assert number is not None, f"layer {layer} does not choose"
        return number

    def tail_start(self, step: Step) -> torch.Tensor:
        return step.tail_start(self.method.tail) if self.method.tail else step.visible

    def tokens_read(self, n: int) -> int:
        """At most: a K/V head whose query heads choose apart reads up to their number times k."""
        tail, config = self.method.tail, self.setup.config
        newest = n - tail_start(n, tail) if tail else 0
        apart = config.group if self.method.granularity == "query_head" else 1
        return min(n, self.k * apart + newest)

    def chooses(self, n: int) -> bool:
        """Whether a step at n tokens leaves any out."""
        tail = self.method.tail
        candidates = tail_start(n, tail) if tail else n
        return Role.SPARSE in self.plan.roles and not self.covers(candidates)
