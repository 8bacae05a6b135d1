"""The needs of a method in one session.

Methods fill in a `Needs`; the memory plan, the placement, the step runner and the session read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.plan.layers import TAIL_BLOCK

MOST_WINDOW = 64  # past queries that a selection or a prompt's end may read
# stores that a session which forgets keeps to go back to, at most: each is as large as the store
STORES = 2
RING = 128  # newest queries that a session keeps: going back by RING - MOST_WINDOW runs none again


@dataclass(frozen=True)
class BlockCache:
    """What the device keeps of a layer in host memory that is read by whole blocks: its `first`
    tokens, and `held` blocks of `size` tokens behind them, of which one read takes up to `read`.
    """

    first: int
    size: int
    held: int
    read: int

    @property
    def rows(self) -> int:
        """Rows that a layer keeps on the device."""
        return self.first + self.held * self.size

    def blocks(self, capacity: int) -> int:
        """Blocks that `capacity` tokens may have, at least one."""
        return max(1, (capacity - self.first) // self.size)


@dataclass(frozen=True)
class NearKeys:
    """Which K/V heads of which layers do without the K of distant tokens: heads[layer], ascending.
    They hold that of the `first` tokens and of the `recent` ones that a query sees.
    """

    first: int
    recent: int
    heads: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Heads of all layers."""
        return sum(map(len, self.heads))


@dataclass(frozen=True)
class Needs:
    """The needs of one method in one session (Method.needs).

    selected: most tokens of one selection. device_bytes: the runtime's own buffers
    (Runtime.nbytes). store_bytes: most bytes that an evicting method keeps beside the bank;
    store_note: after what.
    retained: tokens that it keeps per K/V head; retained_bytes: K and V bytes of those after one
    step. window: past queries, before rotation, that a selection reads. prompt_window: those that
    the end of a prompt reads. prompt_rows: most rows of the past that one block of a prompt reads
    of a layer in host memory where it does not read all. step_rows: most rows of a layer in host
    memory that a step brings over; None: all, or what it fetches. tail: newest tokens that sparse
    layers always read. offload: layer groups that may live in host memory, each fetched together.
    staged_layers: whole offloaded layers held on the device at once. whole_layer: an offloaded
    layer is read whole, in prompts or steps, through one buffer on the device. fetches: sparse
    layers read what `bank.fetch` was told to bring; otherwise the host waits for what they read.
    cuda_graph: a step visits the host nowhere, so it can be captured. every_query: prefill calls
    the last layer with all queries of a chunk (it normally computes only the last one). one_chunk:
    a prefill call is one chunk, however long. final_call: tokens that the last prefill call of a
    prompt must hold; None: a prompt must be read in one call. own_prompts: prompts are read
    otherwise than by full attention, so that their queries cannot be computed again. history: how
    truncate goes back: "bank" sets the length, "store" restores an evicting store and re-runs the
    steps since, "rerun" re-runs the steps over the bank. queries: most tokens of one step. sliding:
    it knows sliding-window layers. capped: it knows a cap on attention's logits, and sinks.
    recurrent: it knows layers without attention, whose state only their tokens lead to. latent: it
    knows rows of latent attention, where V is K and one row serves all heads. again: rows
    of every layer that a pass of a prompt's end makes and drops (Runtime.passes); 0: there is none.
    ids: the end of a prompt is told all token ids.
    outputs: it hears of every token and the logits behind it (Runtime.hear), for which the last
    layer of a prompt is computed whole.
    cache: blocks that the device keeps of each layer in host memory (Bank.block_rows). kept: first
    tokens and places for blocks that the bank of a session that forgets has of each layer, beside
    its newest `tail` tokens (engine/bank/block_bank.py); None: such a bank keeps no block.
    near: K that is freed; None: none.
    piece: most tokens of a chunk (Runtime.chunk_stop); None: as many as the plan has.
    ahead: layers that choose by the input of the layer before (Runtime.foresee), each above 0.
    row_scores: bytes of scores of a prompt, of all layers, that each row has which waits for a cut.
    leaves_rows: in a session that forgets, rows of a chunk wait for a store; else none outlives the
    step that makes it, and all that there are then are `store_bytes`.
    draft_weights: bytes of a copy of the model's weights that its drafts read.
    rebuilt: rows and Runtime.state say all, although steps run again on the way back: a file may
    hold the session.
    """

    selected: int = 0
    device_bytes: int = 0
    store_bytes: int = 0
    store_note: str = ""
    draft_weights: int = 0
    retained: int = 0
    retained_bytes: int = 0
    window: int = 0
    prompt_window: int = 0
    prompt_rows: int = 0
    step_rows: int | None = None
    tail: int = TAIL_BLOCK
    offload: tuple[tuple[int, ...], ...] = ()
    staged_layers: int = 0
    whole_layer: bool = False
    fetches: bool = False
    cuda_graph: bool = False
    every_query: bool = False
    one_chunk: bool = False
    final_call: int | None = 0
    own_prompts: bool = False
    history: Literal["bank", "store", "rerun"] = "bank"
    queries: int = 1
    sliding: bool = False
    capped: bool = False
    recurrent: bool = False
    latent: bool = False
    forgets: bool = False
    waiting: int = 0
    point_bytes: int = 0
    row_scores: int = 0
    proportional: bool = False
    again: int = 0
    ids: bool = False
    outputs: bool = False
    cache: BlockCache | None = None
    near: NearKeys | None = None
    kept: BlockCache | None = None
    piece: int | None = None
    ahead: tuple[int, ...] = ()
    leaves_rows: bool = True
    rebuilt: bool = False

    def waiting_rows(self, chunk: int) -> int:
        """The most rows of a layer that wait for a store that forgets, those of a chunk among them.
        Segments and chunks are counted from one place, a prompt's beginning: where a chunk begins,
        all of a segment but what both divide by waits at most.
        """
        if not self.leaves_rows:
            return 0
        return chunk + max(0, self.waiting - math.gcd(self.waiting, chunk))

    @property
    def lacks(self) -> bool:
        """Whether rows go that other methods read."""
        return self.forgets or self.near is not None
