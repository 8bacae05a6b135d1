"""What tokens of a prompt weigh while the model repeats them (KVzip).

The repeated tokens attend to everything that a session holds and to their own pass; nothing of the
session changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.bank.base import Bank
from engine.methods.base import Runtime
from engine.methods.evict.shared.runtime import EvictingRuntime
from kernels.prefill.dense import attend_past, prefill_dense_lse
from kernels.select.column_sums import column_maxima

TINY = 1e-38  # a score of 0 would be that of a token without one


class Repetition:
    """The scores that the passes over positions first .. length-1 find: `maxima`, float32 [Hkv,
    length - first] per layer.
    """

    def __init__(
        self, layers: int, heads: int, first: int, length: int, device: torch.device
    ) -> None:
        self.first, self.length = first, length
        shape = heads, length - first
        self.maxima = [torch.zeros(shape, device=device) for _ in range(layers)]


class Repeating(Runtime):
    """One pass, as engine/forward/prefill.py runs it, which repeats positions first .. stop-1 of
    what `session` holds, with `held` its bank. The pass's own rows, from position `length` on, are
    in a bank that only it has. sink: first tokens, which every softmax has.
    """

    def __init__(
        self,
        session: EvictingRuntime,
        held: Bank,
        found: Repetition,
        sink: int,
        first: int,
        stop: int,
    ) -> None:
        super().__init__(session.method, session.setup)
        self.needs = replace(self.needs, every_query=True)
        self.session, self.held, self.found = session, held, found
        self.sink, self.first, self.stop = min(sink, found.length), first, stop

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        found, out, backend = self.found, [], self.setup.backend
        before = start - found.length
        own_k, own_v = bank.rows(layer, found.length, start + q.shape[1])
        for heads, k, v, _ in self.session.live(layer, self.held, found.length):
            part = self.session.queries(q, heads)
            own = own_k[:, heads], own_v[:, heads]
            so_far = prefill_dense_lse(part, *own, before, self.scale, backend=backend)
            near, far = self._rows(k.shape[1])
            so_far = self._merged(part, k, v, near, so_far)
            self._note(layer, heads, part[0], k[:, near[1]], so_far[1][0])
            out.append(self._merged(part, k, v, far, so_far)[0].to(q.dtype))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _rows(self, count: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Of `count` rows, the newest positions last: the sink's and those that are repeated, over
        which weights are taken with the pass's own; and all others.
        """
        first, stop = (count - self.found.length + at for at in (self.first, self.stop))
        near = slice(0, self.sink), slice(first, stop)
        return near, (slice(self.sink, first), slice(stop, count))

    def _merged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: tuple[slice, slice],
        so_far: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and log-sum-exp so far, with these rows of k, v [h, T, D]."""
        for some in rows:
            past = k[None, :, some], v[None, :, some]
            whole = attend_past(q, *past, self.scale, so_far, backend=self.setup.backend)
            assert whole is not None
            so_far = whole
        return so_far

    def _note(
        self, layer: int, heads: slice, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Keep the largest weights that q [C, H', D] gives to the repeated rows k [h, n, D]."""
        at = slice(self.first - self.found.first, self.stop - self.found.first)
        mine = self.found.maxima[layer][heads, at]
        weights = column_maxima(q, k, lse, self.scale)
        torch.maximum(mine, weights.clamp(min=TINY), out=mine)
