"""Launch shapes of Triton kernels: tiles, warps, registers, index widths, and the card that they
are for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.launch.triton import tl, triton

# rows of one program: partial results are 1.6 % of the bytes (group 4, bf16), with 256 3.1 %
DENSE_SPLIT = 512
# with them an SM holds three programs of 128 threads, as many as its shared memory does
MOST_REGISTERS = 168
PROCESSORS = 132  # SMs of an H100 or H200, taken where no card is there to ask


class Card(NamedTuple):
    """The facts of a GPU that launches depend on. capability: such as (9, 0); processors: SMs."""

    capability: tuple[int, int]
    processors: int = PROCESSORS


_IMAGINED: list[Card] = []


def card(device: torch.device) -> Card | None:
    """Return the card of a CUDA device of this machine; for any other device the one that is
    `imagined`, or None.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return _IMAGINED[-1] if _IMAGINED else None
    return _asked(device)


@functools.cache
def _asked(device: torch.device) -> Card:
    found = torch.cuda.get_device_properties(device)
    return Card(torch.cuda.get_device_capability(device), found.multi_processor_count)


def processors(device: torch.device) -> int:
    """Count a card's SMs; PROCESSORS for a device that is no card."""
    found = card(device)
    return PROCESSORS if found is None else found.processors


@contextlib.contextmanager
def imagined(which: Card) -> Iterator[None]:
    """Launch on tensors without memory as on this card, to see what would be launched."""
    _IMAGINED.append(which)
    try:
        yield
    finally:
        _IMAGINED.pop()


@dataclass(frozen=True)
class Config:
    """Launch shape of one kernel: tile and padded sizes, warps and software-pipeline stages."""

    block: int  # bank rows of one tile
    # packed (query, head of the group) rows, a power of two >= 16 (the tensor cores' least)
    rows: int
    dim: int  # head_dim padded to a power of two >= 16
    warps: int
    stages: int
    queries: int  # queries packed in one tile

    def launch(self, group: int, head_dim: int, registers: int = MOST_REGISTERS) -> dict[str, int]:
        """Return what a launch takes of this shape, for `group` heads per kv head. registers: what
        ptxas is told that a thread may take, 0: nothing.

        For one query at most MOST_REGISTERS a thread: told so, ptxas takes what it needs up to
        there. Left alone it aims at 96 and spills 24 bytes of some kernels (head_dim 64, group 8).
        Heads of more than 256 have up to 255: sparse rows of latents spill 8 bytes under 168.
        """
        few = registers > 0 and self.queries == 1 and torch.version.hip is None
        return dict(
            QT=self.queries,
            G=group,
            M=self.rows,
            D=head_dim,
            DP=self.dim,
            num_warps=self.warps,
            num_stages=self.stages,
            **(dict(maxnreg=registers if self.dim <= 256 else 255) if few else {}),
        )


def power_of_two(x: int) -> int:
    """Round x >= 1 up to a power of two."""
    return 1 << (x - 1).bit_length()


def needs_wide(*strides: int) -> bool:
    """Tell whether offsets inside one split of DENSE_SPLIT rows pass 31 bits.

    strides: elements from row to row. The engine's own banks never need it.
    """
    return max(strides) * DENSE_SPLIT >= 2**31


@triton.jit
def softmax_step(scores, values, m, total, acc, scale=None):
    """Take one tile into an online softmax.

    scores [M, N], -inf where masked; values [N, D], to be multiplied by scale [N] or None; m and
    total [M] and acc [M, D] are carried.
    """
    top, total, p, shrink = softmax_weights(scores, m, total)
    weights = p if scale is None else p * scale[None, :]
    acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return top, total, acc


@triton.jit
def softmax_weights(scores, m, total):
    """Take the scores [M, N] of one tile into an online softmax: returns the new m and total [M],
    the weights [M, N] and what to multiply sums so far by [M].
    """
    top = tl.maximum(m, tl.max(scores, 1))
    # a row that has seen nothing yet must not make NaN
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
    shrink = tl.exp2((m - base) * 1.4426950408889634)
    return top, total * shrink + tl.sum(p, 1), p, shrink
