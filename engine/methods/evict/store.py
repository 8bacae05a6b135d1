"""The retained store: keys and values that an evicting method has kept, really copied, so that what
it claims to hold is what is allocated.

A layer's store is a list of `Rows`, one per run of K/V heads that keep equally many tokens (one for
all heads, or one per head where budgets differ: Ada-KV). The session's bank itself still stands
while the engine runs: it is the peak, it lets a session go back and go on under another method, and
attention does not read it; `resident` is the store.
"""

import torch

# rows by which a store grows: copying it every 16 steps costs an eighth of reading it; small beside
# 3% of a short text
ROOM = 16


def reserved(base, held, most=None):
    """Rows of a store that held `base` tokens when it was made and holds `held` now: whole ROOMs on
    top of base, room for one more token in any case, at most `most` (None: no limit).
    """
    rows = base + -(-(held - base + 1) // ROOM) * ROOM
    return rows if most is None else max(held + 1, min(rows, most))


def row_bytes(config, itemsize, scored):
    """Bytes of one retained token in one K/V head: key, value, position (int32), and a float32
    score per query head if `scored`.
    """
    return 2 * config.head_dim * itemsize + 4 + (4 * config.group if scored else 0)


class Rows:
    """What h K/V heads of one sequence and layer have kept: k, v [h, R, D], positions [h, R] int32,
    scores [h, G, R] float32 or None.

    heads: slice of the layer's K/V heads; the first `held` rows count; base: `held` when the store
    was made.
    """

    def __init__(self, heads, k, v, positions, scores, held):
        self.heads, self.k, self.v, self.positions, self.scores, self.held, self.base = (
            heads,
            k,
            v,
            positions,
            scores,
            held,
            held,
        )

    @property
    def kv_bytes(self):
        """Bytes of keys and values."""
        return 2 * self.k.numel() * self.k.element_size()

    @property
    def nbytes(self):
        """Bytes held: keys and values, positions, scores."""
        return self.kv_bytes + sum(
            t.numel() * t.element_size() for t in (self.positions, self.scores) if t is not None
        )

    @classmethod
    def gather(cls, heads, k, v, positions, scores, index, most=None):
        """New Rows from those at index [h, n] int64 of k, v [h, T, D], positions [h, T], scores [h,
        G, T] or None.
        """
        count, wide = index.shape[1], index.unsqueeze(-1)
        size = reserved(count, count, most)
        found = cls(
            heads,
            *(t.new_empty(t.shape[0], size, t.shape[2]) for t in (k, v)),
            positions.new_empty(len(index), size),
            None if scores is None else scores.new_zeros(*scores.shape[:2], size),
            count,
        )
        for mine, theirs in ((found.k, k), (found.v, v)):
            mine[:, :count] = theirs.gather(1, wide.expand(-1, -1, theirs.shape[2]))
        found.positions[:, :count] = positions.gather(1, index)
        if scores is not None:
            found.scores[:, :, :count] = scores.gather(
                2, index.unsqueeze(1).expand(-1, scores.shape[1], -1)
            )
        return found

    def keep(self, index, most=None):
        """New Rows of those at index [h, n] int64."""
        return Rows.gather(self.heads, self.k, self.v, self.positions, self.scores, index, most)

    def put(self, k, v, position):
        """Write a new token's k, v [h, D] behind the others; it counts once `held` says so."""
        self.k[:, self.held], self.v[:, self.held] = k, v
        self.positions[:, self.held] = position
        if self.scores is not None:
            self.scores[:, :, self.held] = 0.0

    def make_room(self, most=None):
        """Grow so that one more token can be put."""
        more = reserved(self.base, self.held, most) - self.positions.shape[1]
        if more > 0:
            grown = [
                torch.cat([t, t.new_zeros(*t.shape[:1], more, *t.shape[2:])], 1)
                for t in (self.k, self.v, self.positions)
            ]
            self.k, self.v, self.positions = grown
            if self.scores is not None:
                self.scores = torch.cat(
                    [self.scores, self.scores.new_zeros(*self.scores.shape[:2], more)], 2
                )

    def drop(self, slots):
        """Forget one row per head: slots [h] int64. The last row takes its place."""
        last, heads = self.held - 1, torch.arange(len(slots), device=slots.device)
        for part in (self.k, self.v, self.positions):
            part[heads, slots] = part[:, last].clone()  # one head: the two may be one place
        if self.scores is not None:
            self.scores[heads, :, slots] = self.scores[:, :, last].clone()
        self.held = last

    def snapshot(self):
        """(heads, positions [h, held], scores or None, base): what `rebuild` needs beside the bank."""
        scores = None if self.scores is None else self.scores[:, :, : self.held].clone()
        return self.heads, self.positions[:, : self.held].clone(), scores, self.base

    @classmethod
    def rebuild(cls, state, k, v, most=None):
        """The Rows of a snapshot from the bank's own rows k, v [Hkv, T, D] of that layer, bit for
        bit.
        """
        heads, positions, scores, base = state
        count, index = positions.shape[1], positions.long()
        size = reserved(base, count, most)
        found = cls(
            heads,
            *(t.new_empty(len(positions), size, t.shape[2]) for t in (k, v)),
            positions.new_empty(len(positions), size),
            None if scores is None else scores.new_zeros(*scores.shape[:2], size),
            count,
        )
        for mine, theirs in ((found.k, k[heads]), (found.v, v[heads])):
            mine[:, :count] = theirs.gather(1, index.unsqueeze(-1).expand(-1, -1, theirs.shape[2]))
        found.positions[:, :count], found.base = positions, base
        if scores is not None:
            found.scores[:, :, :count] = scores
        return found

    def clone(self):
        """A copy that shares nothing."""
        copy = Rows(
            self.heads,
            self.k.clone(),
            self.v.clone(),
            self.positions.clone(),
            None if self.scores is None else self.scores.clone(),
            self.held,
        )
        copy.base = self.base
        return copy


def best(keys, positions, count):
    """Indices int64 [h, count] of the largest keys [h, T], ascending by position [h, T]; of equal
    keys the newer token's wins.
    """
    newest = torch.argsort(positions, dim=1, descending=True)
    order = torch.sort(keys.gather(1, newest), dim=1, descending=True, stable=True).indices[
        :, :count
    ]
    chosen = newest.gather(1, order)
    return chosen.gather(1, torch.argsort(positions.gather(1, chosen), dim=1))


def worst(keys, positions):
    """Index int64 [h] of the smallest of keys [h, T]; of equal keys the older token's."""
    least = keys.amin(1, keepdim=True)
    return positions.masked_fill(keys != least, torch.iinfo(positions.dtype).max).argmin(1)


def reduce_group(scores, how):
    """Scores per query head [h, G, T] to one per K/V head [h, T]: "max", "mean" or "sum" over the
    group (METHODS.md section 1).
    """
    return scores.amax(1) if how == "max" else scores.mean(1) if how == "mean" else scores.sum(1)
