"""The placement: which layers of a context bank live in host memory, and what they keep on the
device. A pure function of model, method and bytes, decided before anything is allocated.

Layers that read everything in each step stay on the device. Sparse layers may live in host memory,
one offload group at a time, because a group's K and V travel together. On the device a group keeps
slots for fetched rows and a ring of its newest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.plan.layers import TAIL_BLOCK
from engine.plan.needs import Needs
from kernels.prefill import CUDNN_BLOCK
from kernels.slots import slots_bytes

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

# Tokens of one of the two device blocks through which an offloaded layer streams back: 134 MB at
# 4 KB a row. As many as cuDNN's attention reads at a time (kernels/prefill.py). With 65536 an 8B
# model took 34.07 KiB of device memory per token at 2^20 tokens; smaller blocks mean more partial
# results to merge.
STREAM_BLOCK = CUDNN_BLOCK
# slots per selected token: hit rates saturate near four times a step's selection
SLOTS = 4
ROW_ALIGN = 64  # bytes: a host sector


@dataclass(frozen=True)
class Placement:
    """The offloaded part of a bank.

    offload_groups: layers that live in host memory; the layers of one group share a row. budget:
    most tokens of a selection (0: nothing is selected, layers are read whole). slots: fetched
    tokens held per group. ring: newest tokens held per group, a tail and 128. block: rows of a
    stream block. chunk: rows of a staging buffer. staged_layers: whole layers staged on the device
    (brutal offload). reuse: whether slots survive a step. by_layer: a fetch copies layer by layer
    instead of a group at once.
    """

    offload_groups: tuple[tuple[int, ...], ...]
    budget: int
    slots: int
    ring: int
    block: int
    chunk: int
    staged_layers: int = 0
    reuse: bool = True
    by_layer: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers in host memory, ascending."""
        return tuple(sorted(layer for group in self.offload_groups for layer in group))

    def keeping(self, groups: Iterable[tuple[int, ...]]) -> Placement:
        """Return this placement with only these groups offloaded."""
        return replace(self, offload_groups=tuple(groups))

    def host_bytes(self, config: ModelConfig, size: int, tokens: int) -> int:
        """Return the bytes of host memory that `tokens` tokens take: whole blocks of padded rows.
        size: bytes of an element.
        """
        blocks = -(-tokens // TAIL_BLOCK)
        return blocks * TAIL_BLOCK * len(self.layers) * part_bytes(config, size)

    def device_items(self, config: ModelConfig, size: int, capacity: int) -> dict[str, int]:
        """Return {name: bytes} of what the offloaded layers keep on the device: what TieredBank
        allocates, to the byte.
        """
        part, groups = part_bytes(config, size), self.offload_groups
        slots = sum((self.slots + 2 * self.ring) * len(group) * part + 8 for group in groups)
        state = len(groups) * slots_bytes(capacity, self.slots, self.budget) if self.budget else 0
        return {
            "slots": slots,
            "maps": state + 8 * -(-capacity // TAIL_BLOCK),
            "staging": 8 + part * (2 * self.chunk + 2 * self.block + self.staged_layers * capacity),
        }

    def describe(self) -> str:
        """Say in one line what went to the host."""
        spans = ", ".join(
            f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0])
            for group in self.offload_groups
        )
        tail = self.ring - 2 * TAIL_BLOCK
        return (
            f"layers {spans} in host memory, {self.slots} slots and a tail of {tail} per group "
            "on the device"
        )


def reserved_rows(tokens: int, device_type: str) -> int:
    """Return the rows that a bank, and every buffer as long, reserves for so many tokens.

    On a GPU whole blocks of 64: Triton compiles a kernel once more for sizes and strides that are
    no multiples of 16, in the middle of an answer where the last bucket begins.
    """
    return tokens if device_type == "cpu" else -(-tokens // TAIL_BLOCK) * TAIL_BLOCK


def part_bytes(config: ModelConfig, size: int) -> int:
    """Return the bytes of one token's K and V in one layer, padded to whole host sectors. size:
    bytes of an element.
    """
    return -(-config.kv_bytes(size) // ROW_ALIGN) * ROW_ALIGN


def full_placement(
    needs: Needs, capacity: int, chunk: int, slots: float = SLOTS, by_layer: bool = False
) -> Placement | None:
    """Return the placement that offloads every layer that a method can spare (Needs.offload), or
    None where it can spare none.

    slots: slots per selected token, at least 1. 0 turns reuse off: every step fetches its whole
    selection.
    """
    groups = needs.offload
    if not groups:
        return None
    budget = needs.selected if needs.fetches else 0
    held = min(max(budget, math.ceil(budget * max(1, slots))), max(budget, capacity))
    ring = -(-needs.tail // TAIL_BLOCK) * TAIL_BLOCK + 2 * TAIL_BLOCK
    return Placement(
        groups,
        budget,
        held,
        ring,
        min(max(STREAM_BLOCK, needs.prompt_rows + chunk), capacity),
        min(chunk, capacity),
        min(needs.staged_layers, len(groups)),
        slots > 0,
        by_layer,
    )


def fitting(placement: Placement, fits: Callable[[Placement | None], bool]) -> Placement | None:
    """Return the placement with as many groups back on the device as `fits(placement)` allows, or
    None where all of them fit there.

    Groups go back smallest first: that returns the most, so that the fewest fetches are waited for.
    """
    kept = list(placement.offload_groups)
    for group in sorted(placement.offload_groups, key=len):
        fewer = [other for other in kept if other is not group]
        candidate = placement.keeping(fewer) if fewer else None
        if not fits(candidate):
            break
        kept = fewer
    return placement.keeping(kept) if kept else None
