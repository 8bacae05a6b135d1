"""Which blocks of a layer stay where their number is limited: of a full table the one that was read
longest ago goes when a new one forms, of equal ones the oldest.

The paper (InfLLM, Xiao et al., NeurIPS 2024, section 3.3) keeps every block in host memory, and
its cache on the device the blocks that were read last; a stream without end cannot keep every one.
A block that goes leaves its place with all that is in it, and places are taken again in the order
in which they became empty. So a chunk that breaks off has written over nothing that counts, and a
session may go back until `spare` more blocks have formed. No choice visits the host.
"""

from __future__ import annotations

from typing import Any

import torch

SPARE = 4096  # tokens of empty places, at least: as many can be taken back, or break off
FAR = torch.iinfo(torch.int64).max


def places(most: int, block: int, blocks: int) -> int:
    """Places for `most` blocks of so many tokens, in a session in which `blocks` may form."""
    return min(blocks, most + -(-SPARE // block))


class KeptBlocks:
    """Of each layer and sequence: number int64 [B, P], the block in each place, -1 for an empty
    one; when int64 [B, P], the first position of the piece that read it last (the length at which
    it formed), of an empty place the block whose forming emptied it. most: blocks that stay.
    """

    def __init__(
        self, most: int, count: int, layers: int, batch: int, device: torch.device
    ) -> None:
        self.most, self.count = most, count
        order = torch.arange(-count, 0, device=device).expand(batch, count)
        empty = torch.full((batch, count), -1, device=device)
        self.known = [(empty, order)] * layers
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.formed = 0  # the most blocks that had formed since the session was empty

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, once they have changed."""
        return 2 * sum(number.nbytes for number, _ in self.known)

    def open(self, layer: int) -> None:
        """Begin a chunk or step of a layer from what is committed."""
        number, when = self.known[layer]
        self.pending[layer] = number.clone(), when.clone()

    def commit(self, formed: int) -> None:
        """Make the pending changes permanent. formed: blocks that have formed."""
        for layer, tables in self.pending.items():
            self.known[layer] = tables
        self.pending, self.formed = {}, max(self.formed, formed)

    def take(self, layer: int, b: int, block: int, length: int) -> torch.Tensor:
        """The place int64 [1] of a block that forms at `length`."""
        number, when = (table[b] for table in self.pending[layer])
        live = number >= 0
        place = when.masked_fill(live, FAR).argmin(keepdim=True)
        if block >= self.most:
            age = torch.where(live, (when << 31) + number, FAR)
            gone = age.argmin(keepdim=True)
            number.index_fill_(0, gone, -1)
            when.index_fill_(0, gone, block)
        number.index_fill_(0, place, block)
        when.index_fill_(0, place, length)
        return place

    def read(self, layer: int, b: int, chosen: torch.Tensor, start: int) -> torch.Tensor:
        """Note that the piece at `start` reads `chosen` places int64 [n]; the blocks there."""
        self.pending[layer][1][b].index_fill_(0, chosen, start)
        return self.pending[layer][0][b].index_select(0, chosen)

    def empty(self, layer: int, b: int) -> torch.Tensor:
        """Which places hold no block: bool [P]."""
        return self.pending[layer][0][b] < 0

    # ---------------------------------------------------------------- going back

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is committed of sequence 0: number and when, int64 [layers, P] each."""
        number, when = zip(*self.known)
        return torch.stack([t[0] for t in number]), torch.stack([t[0] for t in when])

    def load(self, state: Any, b: int = 0, formed: int = 0) -> None:
        """Go back to a `state` as sequence b. formed: as in `commit`, of what it came from."""
        self.pending, found = {}, []
        for old, *new in zip(self.known, *state):
            tables = tuple(table.clone() for table in old)
            for table, row in zip(tables, new):
                table[b] = row
            found.append((tables[0], tables[1]))
        self.known = found
        self.formed = max(self.formed, formed) if bool((state[0] >= 0).any()) else formed

    def holds(self, formed: int) -> bool:
        """Whether every block of a state at which so many had formed is in its place still."""
        return self.formed - formed <= self.count - min(formed, self.most)
