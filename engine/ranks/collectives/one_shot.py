"""Sums of small tensors over cards that reach each other's memory: one kernel of torch's symmetric
memory, in which every card reads what all have left and adds it in the order of ranks.

So every rank gets the same bits whatever the size, and 16 bits are rounded after every addition
(load_and_reduce in torch's CUDASymmetricMemory-inl.h). A message of some KB is bound by latency:
one exchange of signals before and one behind, where NCCL's ring passes 2 (ranks - 1) stages.

The interface is alpha in torch, and no machine of this project has run it. It is used where a
self-test on the very cards finds the sums right, the same on all ranks, and in a replayed graph;
otherwise NCCL carries these sums too. OMNIKV_ONE_SHOT=0 leaves it out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from engine.base.figures import first_line
from engine.forward.graphs import captured

VARIABLE = "OMNIKV_ONE_SHOT"
MOST = 128 << 10  # bytes of a message: 16 rows of an 8B. Above it a link's rate decides
ALIGNED = 16  # bytes that the kernel reads at a time
SIZES = (8, 1000, 4096)  # elements of the tested sums
TURNS = 4  # of each, one behind the other: what the one before has left must not be read
REPLAYS = 2
DTYPES = (torch.bfloat16, torch.float32)
_NUMBERS = itertools.count()  # of this process's groups


class Memory(Protocol):
    """Memory of all ranks that each can read."""

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [count] of this rank; every rank asks for as many."""
        ...

    def add(self, held: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of every rank's `held`, the first part of its buffer, to out."""
        ...


class SymmetricMemory:
    """torch's. store: where the ranks exchange handles. timeout: seconds that one waits there."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, device: torch.device, timeout: float
    ) -> None:
        from torch.distributed import _symmetric_memory as torchs

        # torch keeps groups by name for as long as the process lives
        self._torchs, self._device, self._name = torchs, device, f"omnikv-one-shot-{next(_NUMBERS)}"
        kept = dist.PrefixStore("omnikv-one-shot", store)
        kept.set_timeout(timedelta(seconds=timeout))
        torchs._SymmetricMemory.set_group_info(self._name, rank, size, kept)

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As Memory."""
        made: torch.Tensor = self._torchs.empty(count, dtype=dtype, device=self._device)
        self._torchs._SymmetricMemory.rendezvous(made, self._name)
        return made

    def add(self, held: torch.Tensor, out: torch.Tensor) -> None:
        """As Memory."""
        torch.ops.symm_mem.one_shot_all_reduce_out(held, "sum", self._name, out)


class OneShot:
    """Adds tensors of `dtype` through a buffer that is made once."""

    def __init__(self, memory: Memory, dtype: torch.dtype, most: int = MOST) -> None:
        self._memory, self._dtype = memory, dtype
        self._buffer = memory.buffer(most // dtype.itemsize, dtype)

    def adds(self, x: torch.Tensor) -> bool:
        """Whether `add` takes x."""
        size = x.numel() * x.element_size()
        fits = 0 < size <= self._buffer.nbytes and size % ALIGNED == 0
        return fits and x.dtype == self._dtype and x.data_ptr() % ALIGNED == 0

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """As Carrier, in place. The kernel ends when all ranks have read, so the next sum may
        overwrite the buffer.
        """
        held = self._buffer[: x.numel()]
        held.copy_(x.view(-1))
        self._memory.add(held, x.view(-1))
        return x


class Sum(NamedTuple):
    """A sum that was tried: what this rank gave, and what it found."""

    name: str
    given: torch.Tensor
    found: torch.Tensor


def sums(
    add: Callable[[torch.Tensor], torch.Tensor], rank: int, device: torch.device, dtype: torch.dtype
) -> list[Sum]:
    """Sums by `add`, in place, of numbers drawn for each rank: of SIZES, TURNS one behind the
    other, and replayed ones of a graph on a GPU. Every rank makes as many.
    """
    generator, made = torch.Generator().manual_seed(rank), []
    for count in SIZES:
        given = [torch.randn(count, generator=generator).to(device, dtype) for _ in range(TURNS)]
        made += [Sum(f"a sum of {count}", x, add(x.clone())) for x in given]
    if torch.cuda.is_available():
        held = torch.zeros(SIZES[-1], device=device, dtype=dtype)
        graph, replayed = captured(device, lambda: add(held.clone()))
        for _ in range(REPLAYS):
            x = torch.randn(len(held), generator=generator).to(device, dtype)
            held.copy_(x)
            graph.replay()
            made.append(Sum("a replayed sum", x, replayed.clone()))
    return made


def wrong(made: list[Sum], listed: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """What is wrong with sums beside those of what `listed` [ranks, ...] gives by another way; ""
    where nothing is. Every rank makes as many calls of it, whatever it finds.
    """
    whys = [_wrong(one.name, listed(one.given), listed(one.found), one.found) for one in made]
    return next(filter(None, whys), "")


def _wrong(name: str, parts: torch.Tensor, everywhere: torch.Tensor, found: torch.Tensor) -> str:
    # every addition rounds to half a unit in the last place of what it adds up to at most
    bound = len(parts) * torch.finfo(parts.dtype).eps * parts.double().abs().sum(0)
    off = (found.double() - parts.double().sum(0)).abs()
    if not bool((off <= bound).all()):
        return f"{name} is {float(off.max()):.3g} off"
    return "" if bool((everywhere == everywhere[0]).all()) else f"{name} is not the same everywhere"


def reaches(device: torch.device, ranks: int) -> bool:
    """Whether a card reads the memory of all others: over NVLink, or PCIe where the system lets
    it.
    """
    others = (card for card in range(ranks) if card != device.index)
    return all(torch.cuda.can_device_access_peer(device.index, card) for card in others)


def wanted(device: torch.device, dtype: torch.dtype, ranks: int) -> str:
    """Why a rank's card does without one-shot sums; "" where it may try them."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if dtype not in DTYPES:
        return f"they add no {str(dtype).removeprefix('torch.')}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has none"
    return "" if reaches(device, ranks) else "the cards do not reach each other's memory"


def tried(
    make: Callable[[], Memory],
    dtype: torch.dtype,
    agree: Callable[[bool], bool],
    try_sums: Callable[[OneShot], list[Sum]],
    judge: Callable[[list[Sum]], str],
) -> tuple[OneShot | None, str]:
    """(one-shot sums, ""), or (None, why not): where any rank cannot make the memory or finds a sum
    wrong, none of them uses it. agree: whether all ranks say yes. try_sums, judge: `sums` and
    `wrong`.
    """
    found, made, why = None, None, ""
    try:
        found = OneShot(make(), dtype)
    except Exception as error:  # whatever a driver or an alpha interface says is the finding
        why = f"no symmetric memory: {type(error).__name__}: {first_line(error)}"
    if not agree(found is not None) or found is None:
        return None, why or "another rank has no symmetric memory"
    try:
        made = try_sums(found)
    except Exception as error:
        why = f"a one-shot sum fails: {type(error).__name__}: {first_line(error)}"
    if not agree(made is not None) or made is None:
        return None, why or "a one-shot sum fails on another rank"
    why = judge(made)
    return (found, "") if agree(not why) else (None, why or "another rank found a sum wrong")
