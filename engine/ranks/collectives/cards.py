"""A rank on each GPU: whether this machine can, and what carries the tensors of its card."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.base.checks import integer
from engine.base.device import current
from engine.base.errors import SettingError
from engine.model.share.divide import MOST_RANKS
from engine.ranks.collectives.nccl import Nccl
from engine.ranks.collectives.one_shot import (
    Memory,
    OneShot,
    SymmetricMemory,
    sums,
    tried,
    wanted,
    wrong,
)
from engine.ranks.collectives.watch import Ended


def here() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_cards(count: int) -> None:
    """Raise SettingError where this machine has not so many GPUs, or they cannot add together."""
    integer("gpus", count, 2, MOST_RANKS)
    found = here()
    if found < count:
        most = f"gpus={found} (--gpus {found}), or " if found > 1 else ""
        seen = f"{found} GPU{'' if found == 1 else 's'}"
        raise SettingError(
            f"gpus: found {count}, but torch {torch.__version__} sees {seen} here; use {most}"
            f"ranks={count} (--ranks {count}), which splits over this machine's cores"
        )
    if not dist.is_nccl_available():
        raise SettingError(
            f"gpus: found {count}, but torch {torch.__version__} has no NCCL, which PyTorch has on "
            "Linux alone; devices= (--devices 0,1) splits layers over GPUs without it"
        )


@dataclass(frozen=True)
class Asked:
    """How many ranks there will be, and whether each is on a card of its own."""

    count: int
    cards: bool

    @classmethod
    def of(
        cls,
        ranks: int | None,
        gpus: int | None,
        torchruns: int | None,
        device: str = "auto",
        imagined: bool = False,
    ) -> Asked:
        """By the settings `ranks`, `gpus` and `device`; torchruns: how many processes torchrun has
        started, None: it has not. They are on cards where this machine has any and `device` does
        not say otherwise. imagined: plan for GPUs that need not be here. Raises SettingError.
        """
        if gpus is not None and ranks is not None and ranks != torchruns:
            raise SettingError(f"gpus: found {gpus} beside ranks={ranks}; leave one of them out")
        if gpus is not None and device not in ("auto", "cuda"):
            raise SettingError(
                f"device: found {device!r} beside gpus={gpus}, which takes cuda:0 to "
                f"cuda:{gpus - 1}; leave one of them out"
            )
        if torchruns is None:
            count, cards = gpus or (2 if ranks is None else ranks), gpus is not None
        else:
            count = torchruns
            cards = gpus is not None or (device in ("auto", "cuda") and here() > 0)
            if gpus not in (None, count):
                raise SettingError(
                    f"gpus: found {gpus} under torchrun, which started {count} processes; leave it "
                    "out"
                )
        if cards and not imagined:
            require_cards(count)
        return cls(count, cards)


@dataclass(frozen=True)
class OnCard:
    """A Carrier of one rank's card: one-shot sums for what they take, NCCL for the rest."""

    nccl: Nccl
    one_shot: OneShot | None = None

    @property
    def device(self) -> torch.device:
        """The card."""
        return self.nccl.device

    def adds(self, x: torch.Tensor) -> bool:
        """As Carrier."""
        return True

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """As Carrier, in place."""
        one = self.one_shot
        return one.add(x) if one is not None and one.adds(x) else self.nccl.add(x)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As Carrier."""
        self.nccl.gather(x, out)

    def end(self) -> None:
        """As Carrier."""
        self.nccl.end()


def mark(device: torch.device) -> Ended:
    """Put a mark behind a card's work so far; says whether the card has come to it."""
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    return event.query


def on_card(
    nccl: Nccl,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    agree: Callable[[bool], bool],
    memory: Callable[[], Memory],
    may: Callable[[torch.device, torch.dtype, int], str] = wanted,
) -> OnCard:
    """What carries a rank's tensors, tested; every rank takes the same ways. agree: whether all
    ranks say yes. memory: makes what one-shot sums go through. may: why a card does without them,
    or "". Raises DeviceFailed where NCCL adds wrong.
    """
    device = nccl.device
    with current(device), torch.no_grad():
        nccl.warm_up(dtype)
        if not agree(not may(device, dtype, ranks)):
            return OnCard(nccl)

        def listed(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(ranks, *x.shape)
            nccl.gather(x.contiguous(), out)
            return out

        found, why = tried(
            memory,
            dtype,
            agree,
            lambda one: sums(one.add, rank, device, dtype),
            lambda made: wrong(made, listed),
        )
    if why and rank == 0:
        warnings.warn(f"sums over GPUs are NCCL's alone: {why}", stacklevel=2)
    return OnCard(nccl, found)


def joined_card(
    rank: int,
    ranks: int,
    store: dist.Store,
    device: torch.device,
    dtype: torch.dtype,
    timeout: float,
    agree: Callable[[bool], bool],
) -> OnCard:
    """As on_card, of NCCL and torch's symmetric memory."""
    with current(device):
        nccl = Nccl.made(rank, ranks, store, device, timeout)
    given = rank, ranks, store, device, timeout
    return on_card(nccl, rank, ranks, dtype, agree, lambda: SymmetricMemory(*given))
