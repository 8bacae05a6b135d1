"""The placement: the layers of a context bank in host memory, and their buffers on the device. A
pure function of model, method and bytes, decided before anything is allocated.

Sparse layers may live in host memory, one offload group at a time, because a group's K and V travel
together; where layers read some of everything in each step, those that read all of it stay on the
device. Where every layer reads all of it, any layer may live in host memory, and comes over whole
in every step. On the device a group keeps slots for fetched rows and a ring of its newest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK
from engine.plan.needs import RING, BlockCache, NearKeys, Needs
from kernels.prefill.dense import COPIED_BLOCK
from kernels.rows.forms import DTYPES as PACKED
from kernels.rows.forms import row_widths
from kernels.tier.lru_slots import slots_bytes

# tokens a session can be truncated by without re-reading, on top of one aborted chunk
LEAST_SPARE = 512
ROUND = 64


# Tokens of one of the two device blocks through which an offloaded layer streams back: 134 MB at
# 4 KB a row. As many as cuDNN's attention reads at a time (kernels/prefill/dense.py). With 65536 an
# 8B model took 34.07 KiB of device memory per token at 2^20 tokens; smaller blocks mean more
# partial results to merge.
STREAM_BLOCK = COPIED_BLOCK
# slots per selected token: hit rates saturate near four times a step's selection
SLOTS = 4
ROW_ALIGN = 64  # bytes: a host sector
COPIED = 16  # bytes: what a copy of rows moves is a multiple of it


@dataclass(frozen=True)
class Placement:
    """The offloaded part of a bank.

    offload_groups: layers that live in host memory; the layers of one group share a row. budget:
    most tokens of a selection (0: nothing is selected, layers are read whole). slots: fetched
    tokens held per group. ring: newest tokens held per group, a tail and RING. block: rows of a
    stream block. chunk: rows of a staging buffer. staged_layers: whole layers staged on the device
    (brutal offload). whole_rows: rows of the buffer through which a layer longer than a stream
    block is read whole. reuse: whether slots survive a step. by_layer: a fetch copies layer by
    layer instead of a group at once. cache: blocks that each layer keeps on the device. kept: of a
    bank of blocks its places, which are all that lies in host memory; None: a bank of all rows.
    """

    offload_groups: tuple[tuple[int, ...], ...]
    budget: int
    slots: int
    ring: int
    block: int
    chunk: int
    staged_layers: int = 0
    whole_rows: int = 0
    reuse: bool = True
    by_layer: bool = False
    cache: BlockCache | None = None
    kept: BlockCache | None = None

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
        tokens = tokens if self.kept is None else self.kept.rows
        blocks = -(-tokens // TAIL_BLOCK)
        return blocks * TAIL_BLOCK * len(self.layers) * part_bytes(config, size)

    def device_items(self, config: ModelConfig, size: int, capacity: int) -> dict[str, int]:
        """Return {name: bytes} of the offloaded layers' device buffers, as TieredBank allocates
        them, to the byte.
        """
        part, groups = part_bytes(config, size), self.offload_groups
        if self.kept is not None:
            assert self.cache is not None
            held, read, layers = self.cache.held, self.cache.read, len(self.layers)
            return {
                "slots": layers * (self.cache.rows * part + 8),
                "maps": layers * slots_bytes(self.kept.held, held, read)
                + 8 * -(-self.kept.rows // TAIL_BLOCK),
                "staging": part * self.kept.size,
            }
        slots = sum((self.slots + 2 * self.ring) * len(group) * part + 8 for group in groups)
        state = len(groups) * slots_bytes(capacity, self.slots, self.budget) if self.budget else 0
        if self.cache is not None:
            blocks, held, read = self.cache.blocks(capacity), self.cache.held, self.cache.read
            slots += len(self.layers) * (self.cache.rows * part + 8)
            state += len(self.layers) * slots_bytes(blocks, held, read)
        return {
            "slots": slots,
            "maps": state + 8 * -(-capacity // TAIL_BLOCK),
            "staging": 8
            + part * (2 * self.chunk + 2 * self.block + self.whole_rows)
            + part * self.staged_layers * capacity,
        }

    def describe(self) -> str:
        """Describe the offloaded layers in one line."""
        tail = self.ring - 2 * TAIL_BLOCK
        if self.kept is not None and self.cache is not None:
            kept = f"{self.cache.first} first tokens and {self.cache.held} blocks"
            where = f"{self.kept.held} blocks of {self.kept.size} tokens"
            return (
                f"of layers {_spans(self.offload_groups)} {where} in host memory, {kept} of them "
                "on the device"
            )
        kept = f"{self.slots} slots and a tail of {tail} per group"
        if not self.slots:
            kept = f"a tail of {tail} per layer"
        if self.cache is not None:
            cache = f"{self.cache.held} blocks of {self.cache.size}"
            kept = f"{self.cache.first} first tokens, {cache} and {kept}"
        return f"layers {_spans(self.offload_groups)} in host memory, {kept} on the device"


def _spans(groups: tuple[tuple[int, ...], ...]) -> str:
    """Name the layers of groups, single ones that follow each other together."""
    spans: list[list[int]] = []
    joins = False  # whether the span before may grow: single layers only
    for group in groups:
        alone = len(group) == 1
        if alone and joins and spans[-1][1] + 1 == group[0]:
            spans[-1][1] = group[0]
        else:
            spans.append([group[0], group[-1]])
        joins = alone
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


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


def value_span(k_bytes: int, v_bytes: int) -> tuple[int, int]:
    """Return (first byte, bytes) of the part of a row that copies move for its V alone: whole words
    of kernels/tier/gather.py around V, which lies behind K.
    """
    first = k_bytes // COPIED * COPIED
    return first, -(-(k_bytes + v_bytes) // COPIED) * COPIED - first


def value_bytes(config: ModelConfig, size: int) -> int:
    """Return the bytes that one token's V in one layer takes over the link, as `part_bytes` those
    of K and V.
    """
    both = config.kv_bytes(size)
    k, v = both // 2, both // 2
    if config.bank != "model":
        dtype = PACKED[config.bank]
        k, v = (
            config.num_kv_heads * w * dtype.itemsize for w in row_widths(config.head_dim, dtype)
        )
    return value_span(k, v)[1]


def _sparing(needs: Needs, row_layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of Needs.offload, each without layers that read another's rows, and without those
    whose rows a layer reads that selects otherwise than the group.
    """
    found = []
    for group in needs.offload if row_layers else ():
        elsewhere = {rows for i, rows in enumerate(row_layers) if i not in group}
        kept = (layer for layer in group if row_layers[layer] == layer)
        found.append(tuple(i for i in kept if not needs.selected or i not in elsewhere))
    return tuple(group for group in found if group) if row_layers else needs.offload


def full_placement(
    needs: Needs,
    capacity: int,
    chunk: int,
    slots: float = SLOTS,
    by_layer: bool = False,
    row_layers: tuple[int, ...] = (),
) -> Placement | None:
    """Return the placement that offloads every layer that a method can spare (Needs.offload), or
    None where it can spare none. row_layers: as in ModelConfig.

    slots: slots per selected token, at least 1. 0 turns reuse off: every step fetches its whole
    selection.
    """
    groups = _sparing(needs, row_layers)
    if not groups or (needs.kept is not None and needs.cache is None):
        return None
    budget = needs.selected if needs.fetches else 0
    held = min(max(budget, math.ceil(budget * max(1, slots))), max(budget, capacity))
    ring = -(-needs.tail // TAIL_BLOCK) * TAIL_BLOCK + 2 * TAIL_BLOCK
    block = min(max(STREAM_BLOCK, needs.prompt_rows + chunk), capacity)
    return Placement(
        groups,
        budget,
        held,
        ring,
        block,
        min(chunk, capacity),
        min(needs.staged_layers, len(groups)),
        capacity if needs.whole_layer and capacity > block else 0,
        slots > 0,
        by_layer,
        needs.cache,
        needs.kept,
    )


def fitting(placement: Placement, fits: Callable[[Placement | None], bool]) -> Placement | None:
    """Return the placement with as many groups back on the device as `fits(placement)` says that
    the device holds, or None where it holds all of them.

    Groups go back smallest first: that returns the most, so that the fewest fetches are waited for.
    """
    if fits(None):
        return None
    order, groups = sorted(placement.offload_groups, key=len), placement.offload_groups

    def without(count: int) -> Placement:
        back = set(order[:count])
        return placement.keeping(group for group in groups if group not in back)

    low, high = 0, len(order) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(without(middle)) else (low, middle - 1)
    return without(low)


def near_rows(near: NearKeys, chunk: int, capacity: int) -> int:
    """Return the rows of K of a head that holds the first and the newest tokens only."""
    return min(capacity, near.first + ring_size(near.recent, chunk, capacity))


def ring_size(window: int, chunk: int, capacity: int) -> int:
    """Return the tokens that a ring holds: the window, a chunk (or LEAST_SPARE) and RING, at
    most the capacity.
    """
    size = window + max(min(chunk, capacity), LEAST_SPARE) + RING
    return min(-(-size // ROUND) * ROUND, capacity)
