"""The selection of all ranks together: the tokens that one process would choose.

A filter layer scores a token by the maximum over its query heads, s(t) = max_r s_r(t), where rank r
knows the maximum s_r over its own heads. The winners are the k first tokens in the order of (score
descending, index ascending). Each rank lists the k first in the order of its own scores.

Every winner t is in the list of a rank r whose score of it is s(t): a token u that stands before t
in r's own order has s_r(u) > s_r(t), or the same and a lower index; as s(u) >= s_r(u) and s(t) =
s_r(t), u stands before t in the common order too. Fewer than k tokens do. So fewer than k stand
before t in r's order, and r lists it with its true score.

A rank gives each listed token the greatest score that any list has of it, v(t), and leaves its own
score to all others. Then v(t) = s(t) for the winners and v(u) <= s(u) for all other tokens, which
therefore stand behind every winner in the order of v as well: the k first by v are the winners, on
every rank, whatever the ranks did not list. NaN counts as the lowest score.

k x ranks pairs of 8 bytes travel per filter layer and step, where scores of n tokens would.
"""

from __future__ import annotations

import torch

from engine.ranks.group import Ranks
from kernels.attention.scratch import Scratch
from kernels.select.topk import select_topk


class Merge:
    """Chooses as one process would, from the lists of all ranks. alone: each rank keeps to its own
    list, and nothing is sent.
    """

    def __init__(self, ranks: Ranks, alone: bool = False) -> None:
        self._ranks, self.alone = ranks, alone

    def select(
        self,
        scores: torch.Tensor,
        lo: torch.Tensor,
        hi: torch.Tensor,
        k: torch.Tensor,
        out: torch.Tensor,
        counts: torch.Tensor,
        scratch: Scratch | None = None,
        backend: str = "auto",
        counted: bool = False,
    ) -> None:
        """As kernels.select.topk.select_topk, of the maxima over all ranks' heads; scores [B, T] of
        own heads, in which listed tokens get the greatest score that a rank has of them.
        """
        select_topk(scores, lo, hi, k, out, counts, scratch, backend, counted)
        if self.alone:
            return
        give(scores, self._ranks.gathered(listed(scores, out)))
        select_topk(scores, lo, hi, k, out, counts, scratch, backend)


def listed(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A rank's list as one message, int32 [2, B, K]: the indices, -1 where there is none, and the
    bits of their scores.
    """
    there = index >= 0
    own = _ranked(scores.gather(1, torch.where(there, index, 0).long()))
    own = torch.where(there, own, torch.full_like(own, float("-inf")))
    return torch.stack((torch.where(there, index, 0).int(), own.view(torch.int32)))


def give(scores: torch.Tensor, lists: torch.Tensor) -> None:
    """Write to scores [B, T], at the indices that any of `lists` [ranks, 2, B, K] has, the greatest
    score that a rank has given there.
    """
    index = lists[:, 0].transpose(0, 1).flatten(1).long()
    theirs = lists[:, 1].transpose(0, 1).flatten(1).contiguous().view(torch.float32)
    scores.scatter_(1, index, _ranked(scores.gather(1, index)))
    scores.scatter_reduce_(1, index, theirs, "amax")


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Scores by which NaN is the lowest."""
    return torch.where(torch.isnan(scores), float("-inf"), scores)
