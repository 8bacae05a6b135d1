"""InfLLM's block memory: which rows a piece of queries sees, how much local attention each row has
received, what stands for a block.

Source: InfLLM (Xiao et al., 2024), section 3, and thunlp/InfLLM (context_manager.py). Rows stay in
the bank; the published system holds blocks in host memory and at most `cached` of them on the GPU,
least recently used first out: that is kept here as numbers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """What is where when `length` tokens are known: initial rows 0 .. initial-1, then `blocks`
    whole blocks, then the remainder, whose newest `local` rows are the window. A function of the
    length alone.
    """

    initial: int
    blocks: int
    rest: int  # first row of the remainder

    @classmethod
    def at(cls, method, length):
        """The layout at a length: blocks form once they have left the local window whole."""
        initial = min(method.init, max(0, length - method.local))
        blocks = max(0, length - method.init - method.local) // method.block
        return cls(initial, blocks, initial + blocks * method.block)


class BlockMemory:
    """scores float32 [2, layers, B, H, R]: local attention received, row p in slot p % R, twice so
    that a chunk or step that breaks off leaves the committed half as it was; means [layers, B,
    blocks, H, D] in the bank's dtype: the mean representative key of each block and query head,
    before rotation. Rows that were never attended under this method have received nothing; of equal
    rows the first stand for their block.
    """

    def __init__(self, method, setup):
        config = setup.config
        self.method, self.batch = method, setup.batch
        self.slots, blocks = self.sizes(method, setup.capacity)
        layers, heads = config.num_layers, config.num_heads
        self.scores = torch.zeros(2, layers, setup.batch, heads, self.slots, device=setup.device)
        self.means = torch.zeros(
            layers,
            setup.batch,
            blocks,
            heads,
            config.head_dim,
            dtype=setup.dtype,
            device=setup.device,
        )
        # which half is committed
        self.half = [0] * layers
        # (rows attended, blocks formed), committed
        self.known = [[(0, 0)] * setup.batch for _ in range(layers)]
        # {block: True}, last used last
        self.cached = [[{} for _ in range(setup.batch)] for _ in range(layers)]
        self.pending, self.loads = {}, 0

    @staticmethod
    def sizes(method, capacity):
        """(slots of the ring, most blocks) in a bank of `capacity` rows."""
        blocks = Layout.at(method, capacity).blocks
        return (method.local + method.block + method.chunk if blocks else 0), blocks

    @property
    def nbytes(self):
        """Bytes of scores and means."""
        return sum(t.numel() * t.element_size() for t in (self.scores, self.means))

    def open(self, layer):
        """Begin a chunk or step of a layer from what is committed; until `advance` all changes are
        pending.
        """
        half = self.half[layer]
        self.scores[1 - half, layer].copy_(self.scores[half, layer])
        self.pending[layer] = list(self.known[layer]), [[] for _ in range(self.batch)]

    def advance(self):
        """What has been opened is there to stay."""
        for layer, (known, used) in self.pending.items():
            self.half[layer], self.known[layer] = 1 - self.half[layer], known
            for cached, lists in zip(self.cached[layer], used):
                for blocks in lists:
                    self._use(cached, blocks)
        self.pending = {}

    def _use(self, cached, blocks):
        """Blocks are read: those not cached are loaded, in the place of the least recently used."""
        self.loads += sum(block not in cached for block in blocks)
        for block in blocks:
            cached.pop(block, None)
            cached[block] = True
        for block in list(cached)[: max(0, len(cached) - self.method.cached)]:
            del cached[block]

    def rank(self, layer, b, mean_query, layout):
        """Blocks that a piece reads, ascending: the topk by the sum over heads of mean query times
        mean key. mean_query [H, D] float32.
        """
        count = layout.blocks
        if count <= self.method.topk:
            chosen = list(range(count))
        else:
            sums = self.means[layer, b, :count].float().flatten(1) @ mean_query.flatten()
            chosen = torch.topk(sums, self.method.topk).indices.sort().values.tolist()
        self.pending[layer][1][b].append(chosen)
        return chosen

    def collect(self, layer, b, first, start, stop, received):
        """The piece of rows start .. stop-1 has been attended: `received` float32 [H, stop -
        first], by rows first .. stop-1.
        """
        if not self.slots:
            return
        ring, (attended, formed) = (
            self.scores[1 - self.half[layer], layer, b],
            self.pending[layer][0][b],
        )
        new = torch.arange(max(min(attended, start), stop - self.slots), stop, device=ring.device)
        ring[:, new % self.slots] = 0.0
        ring[:, torch.arange(first, stop, device=ring.device) % self.slots] += received
        self.pending[layer][0][b] = stop, formed

    def form(self, layer, b, length, keys):
        """Blocks that are whole at `length` and have not been formed: keys(first, stop) gives rows
        before rotation, float32 [Hkv, n, D].
        """
        ring, (attended, formed) = (
            self.scores[1 - self.half[layer], layer, b],
            self.pending[layer][0][b],
        )
        size, blocks = self.method.block, Layout.at(self.method, length).blocks
        for block in range(formed, blocks):
            first = self.method.init + block * size
            rows = keys(first, first + size)
            received = ring[:, torch.arange(first, first + size, device=ring.device) % self.slots]
            best = received.sort(dim=1, descending=True, stable=True).indices[
                :, : self.method.representatives
            ]
            own = torch.arange(len(ring), device=ring.device).unsqueeze(1) // (
                len(ring) // len(rows)
            )
            self.means[layer, b, block] = rows[own, best].mean(1).to(self.means.dtype)
        self.pending[layer][0][b] = attended, max(formed, blocks)

    def state(self):
        """What is committed of sequence 0: scores [layers, H, R], rows and blocks known, cached
        blocks.
        """
        scores = torch.stack([self.scores[half, layer, 0] for layer, half in enumerate(self.half)])
        return scores, [row[0] for row in self.known], [dict(row[0]) for row in self.cached]

    def load(self, state, b=0):
        """Bring a `state` back for sequence b."""
        self.pending = {}
        for layer, (half, scores, known, cached) in enumerate(zip(self.half, *state)):
            self.scores[half, layer, b] = scores
            self.known[layer][b], self.cached[layer][b] = known, dict(cached)


def attend_far_and_near(q, distant, turned, k, v, far, first, positions, local, scale):
    """One softmax over rows `far` and rows from `first` on: each query sees of the latter what is
    in its window, of the former the rest.

    q, distant [C, H, D]: queries at `positions` and the same turned to the local distance; turned
    float32 [Hkv, n, D]: keys of rows `far` before rotation; k, v [Hkv, T, D]; far, positions int64,
    consecutive positions; first: a row at or before the first query's window. Returns (out [C, H,
    D], attention that rows first .. received, summed over the queries [H, m]), float32. One K/V
    head's weights exist at a time.
    """
    stop, edge = int(positions[-1]) + 1, positions.unsqueeze(1)
    newest = torch.arange(first, stop, device=q.device)
    hidden = torch.cat([far > edge - local, (newest > edge) | (newest <= edge - local)], 1)
    out, received = (
        torch.empty(q.shape, device=q.device),
        torch.empty(q.shape[1], len(newest), device=q.device),
    )
    group = q.shape[1] // len(k)
    for head in range(len(k)):
        own = slice(head * group, (head + 1) * group)
        logits = (
            torch.cat(
                [
                    distant[:, own].transpose(0, 1) @ turned[head].t(),
                    q[:, own].float().transpose(0, 1) @ k[head, first:stop].float().t(),
                ],
                2,
            )
            * scale
        )
        # [G, C, far + newest]
        weights = torch.softmax(logits.masked_fill_(hidden, float("-inf")), -1)
        out[:, own] = (weights @ torch.cat([v[head, far], v[head, first:stop]]).float()).transpose(
            0, 1
        )
        received[own] = weights[:, :, len(far) :].sum(1)
    return out, received
