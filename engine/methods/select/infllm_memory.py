"""InfLLM's block memory: which tokens a piece of queries sees, how much local attention each token
has received, what stands for a block.

Source: InfLLM (Xiao et al., 2024), section 3, and thunlp/InfLLM (context_manager.py). K and V stay
in the bank; of blocks in host memory it keeps the last `cached` that were read on the device
(engine/bank/host/cache/cached_blocks.py). Where the number of blocks is limited, each lies in a
place of a table (engine/methods/select/kept/blocks.py); without a limit in that of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.methods.base import Setup
from engine.methods.select.kept.blocks import KeptBlocks, places
from kernels.rows.forms import floats, key_floats


class MemorySettings(Protocol):
    """The settings of InfLLM that decide where a memory's blocks lie; tokens, but for `topk`
    (blocks).
    """

    @property
    def init(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def representatives(self) -> int: ...
    @property
    def blocks(self) -> int | None: ...


@dataclass(frozen=True)
class Layout:
    """Where everything is at a length: initial tokens 0 .. initial-1, then `blocks` whole blocks,
    then the remainder with the window of the newest `local` tokens. A function of the length alone.
    """

    initial: int
    blocks: int
    rest: int  # first position of the remainder

    @classmethod
    def at(cls, method: MemorySettings, length: int) -> Layout:
        """The layout at a length: blocks form once they have left the local window whole."""
        initial = min(method.init, max(0, length - method.local))
        blocks = max(0, length - method.init - method.local) // method.block
        return cls(initial, blocks, initial + blocks * method.block)


class BlockMemory:
    """scores float32 [2, layers, B, H, R]: local attention received, position p in slot p % R,
    twice so that an interrupted chunk or step leaves the committed half as it was. means [layers,
    B, places, H, D] in the bank's dtype: the mean representative key of each block and query head,
    before rotation. kept: which block lies in which place, where their number is limited. Tokens
    that were never attended under this method have received nothing; of equal ones the first stand
    for their block.
    """

    def __init__(self, method: MemorySettings, setup: Setup):
        config = setup.config
        self.method, self.batch = method, setup.batch
        self.slots, count = self.sizes(method, setup.capacity)
        layers, heads = config.num_layers, config.num_heads
        self.scores = torch.zeros(2, layers, setup.batch, heads, self.slots, device=setup.device)
        self.means = torch.zeros(
            layers,
            setup.batch,
            count,
            heads,
            config.head_dim,
            dtype=setup.dtype,
            device=setup.device,
        )
        self.kept: KeptBlocks | None = None
        if method.blocks is not None:
            given = count, layers, setup.batch, setup.device
            self.kept = KeptBlocks(method.blocks, *given)
        # which half is committed
        self.half = [0] * layers
        # (tokens attended, blocks formed), committed
        self.known = [[(0, 0)] * setup.batch for _ in range(layers)]
        # layer -> known, of the chunk or step under way
        self.pending: dict[int, list[tuple[int, int]]] = {}

    @staticmethod
    def sizes(method: MemorySettings, capacity: int) -> tuple[int, int]:
        """(slots of the ring, places for blocks) in a session of `capacity` tokens."""
        blocks = Layout.at(method, capacity).blocks
        if method.blocks is not None:
            blocks = places(method.blocks, method.block, blocks)
        return (method.local + method.block + method.chunk if blocks else 0), blocks

    @property
    def nbytes(self) -> int:
        """Bytes of scores, means and the table of places."""
        held = sum(t.numel() * t.element_size() for t in (self.scores, self.means))
        return held + (0 if self.kept is None else self.kept.nbytes)

    def open(self, layer: int) -> None:
        """Begin a chunk or step of a layer from what is committed; changes are pending until
        `commit`.
        """
        half = self.half[layer]
        self.scores[1 - half, layer].copy_(self.scores[half, layer])
        self.pending[layer] = list(self.known[layer])
        if self.kept is not None:
            self.kept.open(layer)

    def commit(self) -> None:
        """Make the pending changes permanent."""
        for layer, known in self.pending.items():
            self.half[layer], self.known[layer] = 1 - self.half[layer], known
        self.pending = {}
        if self.kept is not None:
            self.kept.commit(self.formed)

    @property
    def formed(self) -> int:
        """Blocks that have formed in any layer and sequence."""
        return max(formed for row in self.known for _, formed in row)

    def rank(self, layer: int, b: int, mean_query: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Places of the blocks that a piece reads, int64 ascending: the topk by the sum over heads
        of mean query times mean key. mean_query [H, D] float32.
        """
        count, most = layout.blocks, self.method.blocks
        if count <= self.method.topk:
            return torch.arange(count, device=mean_query.device)
        if most is None or count <= most:  # each in the place of its number
            sums = self.means[layer, b, :count].float().flatten(1) @ mean_query.flatten()
            return torch.topk(sums, self.method.topk).indices.sort().values
        assert self.kept is not None
        sums = self.means[layer, b].float().flatten(1) @ mean_query.flatten()
        sums = sums.masked_fill_(self.kept.empty(layer, b), float("-inf"))
        return torch.topk(sums, self.method.topk).indices.sort().values

    def reads(self, layer: int, b: int, chosen: torch.Tensor, start: int) -> torch.Tensor:
        """Note that the piece at `start` reads these places; their blocks, int64 [n]."""
        return chosen if self.kept is None else self.kept.read(layer, b, chosen, start)

    def collect(
        self, layer: int, b: int, first: int, start: int, stop: int, received: torch.Tensor
    ) -> None:
        """Add the attention of the piece start .. stop-1: `received` float32 [H, stop - first], by
        tokens first .. stop-1.
        """
        if not self.slots:
            return
        ring = self.scores[1 - self.half[layer], layer, b]
        attended, formed = self.pending[layer][b]
        for slots, _ in self._runs(max(min(attended, start), stop - self.slots), stop):
            ring[:, slots] = 0.0
        for slots, tokens in self._runs(first, stop):
            ring[:, slots] += received[:, tokens]
        self.pending[layer][b] = stop, formed

    def collected(self, layer: int, stop: int) -> None:
        """Note that a step of one token, which makes sequence 0 `stop` tokens long, has left in the
        half that is not committed all that `open` and `collect` would.
        """
        self.pending[layer] = [(stop, self.known[layer][0][1])]

    def _runs(self, first: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Where tokens first .. stop-1, at most one per slot, lie in the ring: (slots, which
        of these tokens), twice where they pass its end.
        """
        begin = first
        while begin < stop:
            slot = begin % self.slots
            end = min(stop, begin + self.slots - slot)
            yield slice(slot, slot + end - begin), slice(begin - first, end - first)
            begin = end

    def form(
        self,
        layer: int,
        b: int,
        length: int,
        keys: Callable[[int, int], torch.Tensor],
        keep: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Form the blocks that are whole at `length`: keys(first, stop) gives K before rotation,
        float32 [Hkv, n, D]; keep(first, place int64 [1]) is told where the block at position
        `first` goes, if their number is limited.
        """
        attended, formed = self.pending[layer][b]
        size, blocks = self.method.block, Layout.at(self.method, length).blocks
        if formed >= blocks:
            return
        ring = self.scores[1 - self.half[layer], layer, b]
        for block in range(formed, blocks):
            first = self.method.init + block * size
            rows = keys(first, first + size)
            received = ring[:, torch.arange(first, first + size, device=ring.device) % self.slots]
            best = received.sort(dim=1, descending=True, stable=True).indices[
                :, : self.method.representatives
            ]
            heads = torch.arange(len(ring), device=ring.device).unsqueeze(1)
            kv_head = heads // (len(ring) // len(rows))
            mean = rows[kv_head, best].mean(1).to(self.means.dtype)
            if self.kept is None:
                self.means[layer, b, block] = mean
            else:
                place = self.kept.take(layer, b, block, length)
                self.means[layer, b].index_copy_(0, place, mean[None])
                keep(first, place)
        self.pending[layer][b] = attended, blocks

    def state(self) -> Any:
        """What is committed of sequence 0: scores [layers, H, R], tokens and blocks known, and the
        table of places where there is one.
        """
        scores = torch.stack([self.scores[half, layer, 0] for layer, half in enumerate(self.half)])
        known = [row[0] for row in self.known]
        return (scores, known) if self.kept is None else (scores, known, self.kept.state())

    def load(self, state: Any, b: int = 0, formed: int = 0) -> None:
        """Go back to a `state` as sequence b. formed: the most blocks that had formed in the
        session that it is of, where that is another.
        """
        self.pending, (all_scores, all_known, *kept) = {}, state
        for layer, (half, scores, known) in enumerate(zip(self.half, all_scores, all_known)):
            self.scores[half, layer, b] = scores
            self.known[layer][b] = known
        if self.kept is not None:
            self.kept.load(kept[0], b, formed)

    def holds(self, state: Any) -> bool:
        """Whether the blocks of a `state` of this session are all there still."""
        if self.kept is None:
            return True
        return self.kept.holds(max(formed for _, formed in state[1]))


def attend_far_and_near(
    q: torch.Tensor,
    distant: torch.Tensor,
    turned: torch.Tensor,
    far_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    far: torch.Tensor,
    first: int,
    positions: torch.Tensor,
    local: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over positions `far` and those from `first` on: each query sees of the latter
    what is in its window, of the former the rest.

    q, distant [C, H, D]: queries at `positions` and the same turned to the local distance; turned
    float32 [Hkv, n, D]: K of `far` before rotation; far_v [Hkv, n, D]: its V; k, v [Hkv, m, D]: of
    positions first, first + 1, ...; far, positions int64, the latter consecutive; first: a position
    at or before the first query's window. Returns (out [C, H, D], attention that tokens first ..
    received, summed over the queries [H, m]), float32. One K/V head's weights exist at a time.
    """
    stop, edge = int(positions[-1]) + 1, positions.unsqueeze(1)
    newest = torch.arange(first, stop, device=q.device)
    hidden = torch.cat([far > edge - local, (newest > edge) | (newest <= edge - local)], 1)
    out = torch.empty(q.shape, device=q.device)
    received = torch.empty(q.shape[1], len(newest), device=q.device)
    group = q.shape[1] // len(k)
    for head in range(len(k)):
        own = slice(head * group, (head + 1) * group)
        logits = (
            torch.cat(
                [
                    distant[:, own].transpose(0, 1) @ turned[head].t(),
                    q[:, own].float().transpose(0, 1) @ key_floats(k[head]).t(),
                ],
                2,
            )
            * scale
        )
        # [G, C, far + newest]
        weights = torch.softmax(logits.masked_fill_(hidden, float("-inf")), -1)
        out[:, own] = (weights @ floats(torch.cat([far_v[head], v[head]]))).transpose(0, 1)
        received[own] = weights[:, :, len(far) :].sum(1)
    return out, received
