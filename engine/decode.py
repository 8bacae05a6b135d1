"""The decode step: one function from new tokens to logits, the same for eager, compiled and graph-captured runs, on CPU and GPU.

A step writes rows at its positions and advances nothing: the session advances. No sync, no index on the host, nothing allocated
whose size grows with the context (kernels write into the session's scratch).
"""

from dataclasses import dataclass, field

import torch

from engine.model import after, before
from engine.plan import TAIL_BLOCK

RING = 128      # queries kept per layer: truncating by up to RING - window tokens restores the window without recomputation


class QueryRing:
    """The newest RING queries of every layer before rotation: [layers, B, RING, H, D], position p in slot p % RING.

    Kept under every method, so that switching methods and resuming work with windowed selectors.
    """

    def __init__(self, config, batch, dtype, device):
        shape = (config.num_layers, batch, RING, config.num_heads, config.head_dim)
        self.slots = torch.zeros(shape, dtype=dtype, device=device)
        self.low = self.high = 0        # positions low .. high-1 are in the ring

    @property
    def nbytes(self):
        """Bytes held."""
        return self.slots.numel() * self.slots.element_size()

    def write(self, layer, raw, positions):
        """raw [B, Q, H, D] at positions [B, Q] int64 (a decode step)."""
        slots = self.slots[layer]
        if slots.shape[0] == 1:
            slots.index_copy_(1, positions[0] % RING, raw)
            return
        rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        slots[rows, positions % RING] = raw

    def commit(self, newest, stop):
        """newest [layers, B, W, H, D]: the last W queries of a chunk that ended at `stop`, written together once the chunk is whole."""
        width = newest.shape[2]
        where = torch.arange(stop - width, stop, device=newest.device) % RING
        self.slots.index_copy_(2, where, newest)

    def newest(self, most=64):
        """A copy of the newest raw queries, at most `most`: [layers, B, W, H, D], as `commit` takes them."""
        first = max(self.low, self.high - most)
        return self.slots.index_select(2, torch.arange(first, self.high, device=self.slots.device) % RING)

    def advanced(self, length, appended):
        """`appended` consecutive queries ending at `length` were stored: they extend what is held, or begin anew after a gap."""
        first = length - appended
        self.low = max(self.low if self.low <= first <= self.high else first, length - RING)
        self.high = length

    def truncated(self, length):
        """Positions from `length` on are forgotten; their slots may hold them still, but nobody may believe it."""
        self.high = min(self.high, length)
        self.low = min(self.low, self.high)

    def hold(self, start, stop):
        """Exactly the queries start .. stop-1 have just been committed (recomputed), or none at all."""
        self.low, self.high = start, stop

    def covers(self, start, stop):
        """Whether positions start .. stop-1 are held."""
        return start >= stop or (self.low <= start and stop <= self.high)

    def copy_from(self, other):
        """Hold what another ring of the same model holds (fork)."""
        self.slots.copy_(other.slots)
        self.low, self.high = other.low, other.high

    def read(self, layer, positions):
        """Queries [B, W, H, D] at positions [B, W] int64."""
        slots = self.slots[layer]
        rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        return slots[rows, positions % RING]


@dataclass
class Step:
    """What every layer of one step shares: computed once from the lengths, on the device."""

    positions: torch.Tensor      # [B, Q] int64
    visible: torch.Tensor        # [B] int32: rows that the last query sees, its own included
    bank: object
    bucket: int                  # rows of the bank that this step's kernels may look at
    ring: QueryRing
    rotary: object
    _tails: dict = field(default_factory=dict)
    _window: dict = field(default_factory=dict)

    def tail_start(self, tail):
        """First tail position per sequence [B] int32, for the first of the step's queries (DESIGN.md, "tail")."""
        if tail not in self._tails:
            n = self.visible - (self.positions.shape[1] - 1)
            self._tails[tail] = ((n // TAIL_BLOCK) * TAIL_BLOCK - tail).clamp_(min=0)
        return self._tails[tail]

    def window_queries(self, layer, window):
        """The last `window` queries of a layer, each rotated to its own position: [B, W, H, D]; before position 0 undefined."""
        if window not in self._window:
            offsets = torch.arange(1 - window, 1, device=self.positions.device)
            positions = (self.positions[:, -1:] + offsets).clamp_(min=0)
            self._window[window] = positions, *self.rotary.at(positions)
        positions, cos, sin = self._window[window]
        return self.rotary.apply(self.ring.read(layer, positions), cos, sin)


class Decoder:
    """Runs decode steps of one session: model, runtime of its method, query ring, and how its pieces are compiled."""

    def __init__(self, model, rotary, runtime, ring, pieces=(before, after)):
        self.model, self.rotary, self.runtime, self.ring = model, rotary, runtime, ring
        self._before, self._after = pieces

    def step(self, tokens, lengths, bank, bucket=None):
        """tokens [B, Q] int64, lengths [B] int32 (tokens already in the bank) -> logits [B, Q, vocab] float32.

        Writes the rows of the new tokens at lengths .. lengths + Q - 1. `bucket`: rows that the kernels may look at, at least
        every length + Q (default: the bank's capacity).
        """
        model, config = self.model, self.model.config
        count = tokens.shape[1]
        positions = lengths.long().unsqueeze(1) + torch.arange(count, device=tokens.device)
        step = Step(positions, lengths + count, bank, bucket or bank.capacity, self.ring, self.rotary)
        cos, sin = self.rotary.at(positions)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        x = model.embed[tokens]
        for number, layer in enumerate(model.layers):
            q, k, v, raw = self._before(layer, x, cos, sin, *sizes)
            bank.write(number, k, v, raw, self.ring, positions)
            x = self._after(layer, x, self.runtime.attend(number, q, step), config.rms_norm_eps)
        return model.logits(x)
