"""The processes that hold one model together, and what they tell each other in a step.

What lies in host memory goes through torch.distributed's Gloo group, and on one machine through a
segment of shared memory, which takes microseconds where Gloo takes hundreds. What lies on a rank's
card goes through NCCL, or through one-shot sums (engine/ranks/collectives/). Every rank gets the
same bits: what is a sum is added in the order of ranks, or in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.base.errors import RankLost, SettingError
from engine.model.config.share import Part
from engine.ranks.collectives.cards import OnCard, joined_card, mark
from engine.ranks.collectives.carrier import Carrier, CollectiveFailed
from engine.ranks.collectives.gloo import Gloo
from engine.ranks.collectives.segment import Segment
from engine.ranks.collectives.watch import Watch

TIMEOUT = 120.0  # seconds that a rank waits for the others


@dataclass
class Sent:
    """What a rank has brought into collectives: calls, and bytes of its own tensors."""

    calls: int = 0
    bytes: int = 0


class Ranks:
    """One process's place among `size`: its number `rank`, and the collectives of the model.

    store: of torch.distributed, where the processes meet. timeout: seconds. segment: shared memory
    for small tensors; None: Gloo carries all. card: what carries the tensors of this rank's GPU;
    None: it runs on a CPU.
    """

    card: OnCard | None = None
    _watch: Watch | None = None

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        timeout: float = TIMEOUT,
        segment: Segment | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.segment = rank, size, timeout, segment
        self.sent = Sent()
        self._alone, self._refused, self._store = False, "", store
        self._gloo = Gloo(rank, size, store, timeout)

    def take_card(self, device: torch.device, dtype: torch.dtype) -> None:
        """Run on a GPU: every rank on its own. dtype: of what is added in a step."""
        given = self.rank, self.size, self._store, device, dtype, self.timeout
        self._watch = self._watching(device)
        with self._watch.inside():
            self.card = joined_card(*given, self.agree)

    def hold_card(self, card: OnCard) -> None:
        """Have the tensors of a card carried by `card`."""
        self.card, self._watch = card, self._watching(card.device)

    def _watching(self, device: torch.device) -> Watch:
        """Sees that nobody waits for a card for ever."""

        def stalled(seconds: float) -> None:
            why = f"rank {self.rank} waited {seconds:.0f} s for the others"
            self.refuse(why)
            watch.lost(why)

        moved = lambda: self.sent.calls  # noqa: E731
        watch = Watch(self.rank, self.timeout, moved, lambda: mark(device), stalled)
        return watch

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [...] over ranks, of x's dtype; 16 bits are added in float32 on a CPU. x may
        be written to.
        """
        self._count(x)
        x = x.contiguous()
        carrier = self._carrier(x)
        try:
            return (carrier if carrier.adds(x) else self._gloo).add(x)
        except CollectiveFailed as error:
            self._lose(error)

    def beside(self, x: torch.Tensor, parts: tuple[Part, ...]) -> torch.Tensor:
        """x [..., part] of every rank side by side: [..., whole]; parts: of each rank."""
        self._count(x)
        whole = x.new_empty(*x.shape[:-1], parts[0].of)
        widest = max(part.size for part in parts)
        own = x.new_zeros(*x.shape[:-1], widest)
        own[..., : x.shape[-1]] = x
        for part, theirs in zip(parts, self.gathered(own, counted=False)):
            whole[..., part.first : part.stop] = theirs[..., : part.size]
        return whole

    def gathered(self, x: torch.Tensor, counted: bool = True) -> torch.Tensor:
        """x [...] of every rank, in the order of ranks: [size, ...]."""
        if counted:
            self._count(x)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        try:
            self._carrier(x).gather(x, out)
        except CollectiveFailed as error:
            self._lose(error)
        return out

    def said(self, *numbers: int) -> list[list[int]]:
        """What each rank says, in the order of ranks; all say as many numbers, int64."""
        found: list[list[int]] = self.gathered(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return found

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return all(own for (own,) in self.said(yes))

    def texts(self, text: str) -> list[str]:
        """A text of each rank, in the order of ranks."""
        own = text.encode("utf-8", "replace")
        sizes = [size for (size,) in self.said(len(own))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        rows = self.gathered(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]

    def follow_calls(self) -> None:
        """From now on the ranks meet inside `together` alone: what one of them computes beside it
        would wait for the others for ever.
        """
        self._alone = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that every rank makes; `settle` at its end."""
        before, self._alone = self._alone, False
        try:
            with nullcontext() if self._watch is None else self._watch.inside():
                yield
        except Exception:
            self.settle()
            raise
        finally:
            self._alone = before
        self.settle()

    def settle(self) -> None:
        """Raise RankLost where a rank was lost: what has come from a card is worth nothing then."""
        if self.card is not None:
            self._require_well()

    def refuse(self, why: str) -> None:
        """Raise RankLost from now on, and have nobody wait here."""
        again, self._refused = bool(self._refused), self._refused or why
        if self.segment is not None:
            self.segment.end()
        if self.card is not None and not again:
            self.card.end()
            if self._watch is not None:
                self._watch.lost(self._refused)

    def close(self) -> None:
        """Give up what carries the tensors of a card: the others have gone too."""
        if self._watch is not None:
            self._watch.close()
        if self.card is not None:
            self.card.end()

    def meet(self) -> None:
        """Wait until every rank is here."""
        try:
            self._gloo.meet()
        except CollectiveFailed as error:
            self._lose(error)

    def _carrier(self, x: torch.Tensor) -> Carrier:
        """What carries x."""
        if self.card is not None and x.device == self.card.device:
            return self.card
        return self._gloo if self.segment is None else self.segment

    def _count(self, x: torch.Tensor) -> None:
        self._require_well()
        if self._alone:
            raise SettingError(
                f"ranks: found {self.size}, but this works on one process: only calls of sessions "
                "are made by all ranks"
            )
        self.sent.calls += 1
        self.sent.bytes += x.numel() * x.element_size()

    def _require_well(self) -> None:
        if self._refused:
            raise RankLost(self._refused)

    def _lose(self, error: CollectiveFailed) -> NoReturn:
        """Raise RankLost: a collective has failed, and every later one fails too."""
        self.refuse(f"rank {self.rank} lost the others: {error}")
        raise RankLost(self._refused) from None
