"""What of a context bank lives where: a pure function of model, method and bytes, decided before
anything is allocated.

Layers that read everything in each step stay on the device. Sparse layers may live in host memory,
a whole group at a time (a group's rows travel together); on the device they keep a working set of
slots and the tail.
"""

import math
from dataclasses import dataclass

from engine.plan.layers import TAIL_BLOCK
from kernels.slots import slots_bytes

# Tokens of one of the two device blocks through which a layer's past streams back: 201 MB at 4 KB a
# row. With 65536 an 8B model took 34.07 KiB of device memory per token at 2^20 tokens; smaller
# blocks mean more partial results to merge.
STREAM_BLOCK = 49152
# slots per budgeted token: hit rates saturate near four times a step's set (KERNELS.md 2.1)
SLOTS = 4
ROW_ALIGN = 64  # bytes of every row part: one host sector


@dataclass(frozen=True)
class Placement:
    """The offloaded part of a bank. packs: layers that live in host memory, those of one pack side
    by side in a row.

    budget: most tokens of a selection (0: nothing is selected, rows only stream); slots: per pack;
    ring: tokens of the newest rows kept on the device (a tail and 128); block, chunk: rows of a
    stream block and of a staging slot; stages: whole layers staged on the device (brutal offload);
    reuse: whether slots survive a step; by_layer: a load per layer instead of per group.
    """

    packs: tuple
    budget: int
    slots: int
    ring: int
    block: int
    chunk: int
    stages: int = 0
    reuse: bool = True
    by_layer: bool = False

    @property
    def layers(self):
        """All layers in host memory, ascending."""
        return tuple(sorted(layer for pack in self.packs for layer in pack))

    def keeping(self, packs):
        """The same with only these packs offloaded."""
        return Placement(
            tuple(packs),
            self.budget,
            self.slots,
            self.ring,
            self.block,
            self.chunk,
            self.stages,
            self.reuse,
            self.by_layer,
        )

    def host_bytes(self, config, size, tokens):
        """Bytes of host memory that `tokens` tokens take: whole blocks of padded rows."""
        blocks = -(-tokens // TAIL_BLOCK)
        return blocks * TAIL_BLOCK * len(self.layers) * part_bytes(config, size)

    def device_items(self, config, size, capacity):
        """{name: bytes} that the offloaded layers keep on the device; what TieredBank allocates, to
        the byte.
        """
        part = part_bytes(config, size)
        slots = sum((self.slots + 2 * self.ring) * len(pack) * part + 8 for pack in self.packs)
        state = (
            len(self.packs) * slots_bytes(capacity, self.slots, self.budget) if self.budget else 0
        )
        return {
            "slots": slots,
            "maps": state + 8 * -(-capacity // TAIL_BLOCK),
            "staging": part * (2 * self.chunk + 2 * self.block + self.stages * capacity),
        }

    def device_bytes(self, config, size, capacity):
        """Sum of `device_items`."""
        return sum(self.device_items(config, size, capacity).values())

    def describe(self):
        """One line: what went to the host."""
        spans = ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in self.packs)
        return f"layers {spans} in host memory, {self.slots} slots and a tail of {self.ring - 128} per group on the device"


def part_bytes(config, size):
    """Bytes of one token's K and V in one layer, padded to whole host sectors."""
    return -(-config.kv_bytes(size) // ROW_ALIGN) * ROW_ALIGN


def full_placement(config, method, layers, size, capacity, chunk, slots=SLOTS, by_layer=False):
    """Placement with everything offloaded that `method` lets go (Method.packs), or None where that
    is nothing.

    slots: slots per budgeted token, at least 1; 0 turns reuse off (every step fetches its whole
    selection).
    """
    packs = method.packs(layers)
    if not packs:
        return None
    budget = method.budget_capacity(layers, capacity) if method.selects else 0
    many = min(max(budget, math.ceil(budget * max(1, slots))), max(budget, capacity))
    ring = -(-getattr(method, "tail", TAIL_BLOCK) // TAIL_BLOCK) * TAIL_BLOCK + 2 * TAIL_BLOCK
    return Placement(
        packs,
        budget,
        many,
        ring,
        min(STREAM_BLOCK, capacity),
        min(chunk, capacity),
        min(method.stages, len(packs)),
        slots > 0,
        by_layer,
    )


def fitting(placement, fits):
    """The placement with as much as possible back on the device: groups return while
    `fits(placement)` holds, smallest first.

    Smallest first returns the most groups, so that the fewest loads are waited for. None where
    everything fits on the device.
    """
    kept = list(placement.packs)
    for pack in sorted(placement.packs, key=len):
        fewer = [p for p in kept if p is not pack]
        candidate = placement.keeping(fewer) if fewer else None
        if not fits(candidate):
            break
        kept = fewer
    return placement.keeping(kept) if kept else None
