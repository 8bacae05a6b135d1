"""The newest queries of every layer before rotation, kept under every method."""

import torch

# queries kept per layer: truncating by up to RING - window tokens restores the window without
# recomputation
RING = 128


class QueryRing:
    """The newest RING queries of every layer before rotation: [layers, B, RING, H, D], position p
    in slot p % RING.

    Kept under every method, so that switching methods and resuming work with windowed selectors.
    """

    def __init__(self, config, batch, dtype, device):
        shape = (config.num_layers, batch, RING, config.num_heads, config.head_dim)
        self.slots = torch.zeros(shape, dtype=dtype, device=device)
        self.low = self.high = 0  # positions low .. high-1 are in the ring

    @property
    def nbytes(self):
        """Bytes held."""
        return self.slots.numel() * self.slots.element_size()

    def write(self, layer, q_pre_rope, positions):
        """raw [B, Q, H, D] at positions [B, Q] int64 (a decode step)."""
        slots = self.slots[layer]
        if slots.shape[0] == 1:
            slots.index_copy_(1, positions[0] % RING, q_pre_rope)
            return
        rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        slots[rows, positions % RING] = q_pre_rope

    def commit(self, newest, stop):
        """newest [layers, B, W, H, D]: the last W queries of a chunk that ended at `stop`, written
        together once the chunk is whole.
        """
        width = newest.shape[2]
        where = torch.arange(stop - width, stop, device=newest.device) % RING
        self.slots.index_copy_(2, where, newest)

    def newest(self, most=64):
        """A copy of the newest q_pre_rope queries, at most `most`: [layers, B, W, H, D], as
        `commit` takes them.
        """
        first = max(self.low, self.high - most)
        return self.slots.index_select(
            2, torch.arange(first, self.high, device=self.slots.device) % RING
        )

    def advanced(self, length, appended):
        """`appended` consecutive queries ending at `length` were stored: they extend what is held,
        or begin anew after a gap.
        """
        first = length - appended
        self.low = max(self.low if self.low <= first <= self.high else first, length - RING)
        self.high = length

    def truncated(self, length):
        """Positions from `length` on are forgotten; their slots may hold them still, but nobody may
        believe it.
        """
        self.high = min(self.high, length)
        self.low = min(self.low, self.high)

    def hold(self, start, stop):
        """Exactly the queries start .. stop-1 have just been committed (recomputed), or none at
        all.
        """
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
