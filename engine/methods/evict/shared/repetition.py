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
    length - first] per layer. bank: the session's. sink: first tokens, which every softmax has.
    """

    def __init__(
        self, runtime: EvictingRuntime, bank: Bank, first: int, length: int, sink: int
    ) -> None:
        self.runtime, self.bank = runtime, bank
        self.first, self.length, self.sink = first, length, sink
        shape, device = (runtime.heads, length - first), runtime.setup.device
        layers = range(runtime.plan.num_layers)
        self.maxima = [torch.zeros(shape, device=device) for _ in layers]

    def of(self, first: int, stop: int) -> Repeating:
        """What the pass that repeats positions first .. stop-1 attends to."""
        return Repeating(self, first, stop)


class Repeating(Runtime):
    """One pass, as engine/forward/prefill.py runs it: its own rows, from position `length` on, are
    in a bank that only it has.
    """

    def __init__(self, found: Repetition, first: int, stop: int) -> None:
        runtime = found.runtime
        super().__init__(runtime.method, runtime.setup)
        self.needs = replace(self.needs, every_query=True)
        self.found, self.first, self.stop = found, first, stop

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        found, out, backend = self.found, [], self.setup.backend
        before = start - found.length
        own_k, own_v = bank.rows(layer, found.length, start + q.shape[1])
        for heads, k, v, _ in found.runtime.live(layer, found.bank, found.length):
            part = found.runtime.queries(q, heads)
            own = own_k[:, heads], own_v[:, heads]
            self._note(layer, heads, part[0], k, own[0][0], before)
            so_far = prefill_dense_lse(part, *own, before, self.scale, backend=backend)
            whole = attend_past(part, k[None], v[None], self.scale, so_far, backend=backend)
            assert whole is not None
            out.append(whole[0].to(q.dtype))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _note(
        self,
        layer: int,
        heads: slice,
        q: torch.Tensor,
        k: torch.Tensor,
        own: torch.Tensor,
        before: int,
    ) -> None:
        """Keep the largest weights that queries q [C, H', D] give to the repeated tokens. k [h, T,
        D]: everything held, the newest `length - first` positions last; own: of the pass, `before`
        of them before q.
        """
        found = self.found
        sink, length = min(found.sink, found.length), found.length
        rows = slice(k.shape[1] - (length - self.first), k.shape[1] - (length - self.stop))
        keys = torch.cat([k[:, :sink], k[:, rows], own], 1)
        count = self.stop - self.first
        weights = column_maxima(q, keys, sink + count + before, self.scale).amax(1)
        at = slice(self.first - found.first, self.stop - found.first)
        mine = found.maxima[layer][heads, at]
        torch.maximum(mine, weights[:, sink : sink + count].clamp(min=TINY), out=mine)
