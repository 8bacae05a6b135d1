"""Pages of keys and their elementwise extremes: what Quest ranks. They follow from the bank's rows
alone.
"""

import torch

REDUCTIONS = {"max": torch.amax, "mean": torch.mean, "sum": torch.sum}
AT_ONCE = 1024  # pages bounded at a time: their extremes in float32 are 1 MB a K/V head


class PageExtremes:
    """low, high [layers, B, Hkv, pages, D] in the bank's dtype, and the bounds of one layer's
    pages, float32 [B * Hkv, pages].

    A page is learned when a step first needs it, the page of the newest row anew in every step, so
    that nothing has to be undone.
    """

    def __init__(self, layers, size, setup):
        config, pages = setup.config, -(-setup.capacity // size)
        self.at, self.size, self.heads = (
            {layer: i for i, layer in enumerate(layers)},
            size,
            config.num_kv_heads,
        )
        self.low, self.high = torch.empty(
            2,
            len(layers),
            setup.batch,
            self.heads,
            pages,
            config.head_dim,
            dtype=setup.dtype,
            device=setup.device,
        )
        self.bounds = torch.empty(setup.batch * self.heads, pages, device=setup.device)
        self._known = [[0] * setup.batch for _ in layers]  # rows that the extremes cover

    @staticmethod
    def bytes_of(layers, size, capacity, config, itemsize):
        """Bytes of a batch of one: two rows of extremes a page (2 / size of K), and one bound that
        the layers share.
        """
        return (
            -(-capacity // size)
            * config.num_kv_heads
            * (layers * 2 * config.head_dim * itemsize + 4)
        )

    @property
    def nbytes(self):
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (self.low, self.high, self.bounds))

    def forget(self, length):
        """Rows from `length` on are no longer those that were learned; the page that this cuts is
        learned anew by the next step.
        """
        self._known = [[min(rows, length) for rows in layer] for layer in self._known]

    def learn(self, layer, k, lengths):
        """Bring the extremes of the first `lengths` rows of a layer's keys up to date. k [B, Hkv,
        T, D]; lengths: ints >= 1.
        """
        at, size = self.at[layer], self.size
        for b, n in enumerate(lengths):
            low, high, rows = self.low[at, b], self.high[at, b], k[b]
            first, stop = min(self._known[at][b], n - 1) // size, n // size
            if first < stop:
                pages = rows[:, first * size : stop * size].unflatten(1, (-1, size))
                low[:, first:stop], high[:, first:stop] = pages.amin(2), pages.amax(2)
            if n % size:
                low[:, stop], high[:, stop] = (
                    rows[:, stop * size : n].amin(1),
                    rows[:, stop * size : n].amax(1),
                )
            self._known[at][b] = n

    def bound(self, layer, q, pages, reduce):
        """self.bounds: of the first `pages[b]` pages of every sequence and K/V head under queries q
        [B, H, D]; beyond, anything.
        """
        at = self.at[layer]
        for b, count in enumerate(pages):
            for first in range(0, count, AT_ONCE):
                part = slice(first, min(count, first + AT_ONCE))
                self.bounds[b * self.heads : (b + 1) * self.heads, part] = page_bounds(
                    q[b], self.low[at, b, :, part], self.high[at, b, :, part], reduce
                )
        return self.bounds


def page_bounds(q, low, high, reduce):
    """Upper bounds of the unscaled logits of every page: the sum over channels of max(q low, q
    high), reduced over a group's heads.

    q [H, D]; low, high [Hkv, P, D]: elementwise extremes of the pages' keys; computed in float32
    (float64 for float64 q). Returns [Hkv, P].
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32)).view(low.shape[0], -1, q.shape[-1])
    bounds = q.clamp(min=0) @ high.to(q.dtype).transpose(1, 2) + q.clamp(max=0) @ low.to(
        q.dtype
    ).transpose(1, 2)
    return REDUCTIONS[reduce](bounds, dim=1)
