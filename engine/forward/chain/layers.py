"""Which layers of a session's decode steps run one behind another in one call of the C++ kernels
(kernels/chain/layers.py): those whose weights it knows and whose attention is what their runtime
says in `chained`. Whatever else a layer is, or a step, its pieces are called from Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch

from engine.bank.base import Attends, Bank, Reads, Step
from engine.bank.query_ring import QueryRing
from engine.forward.ahead.queries import foreseeing
from engine.forward.chain.weights import taken, weights_of
from engine.forward.layer import LayerForm
from engine.forward.native_layer import NativeLayer
from engine.model.llama import Llama
from kernels.chain.layer import ChainedLayer, Now
from kernels.chain.layers import Chain, chains

# who sets one of these on a runtime, as a test or a meter does, is asked in every layer
HOOKS = "attend", "attend_dense", "attend_local"
Turns = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (cos, sin) of each layer


class LayerChain:
    """The chained layers of one decoder's steps of one token, of one sequence."""

    def __init__(
        self, model: Llama, form: LayerForm, runtime: Attends, query_ring: QueryRing
    ) -> None:
        self._model, self._form, self._ring = model, form, query_ring
        self._runtime = cast(Reads, runtime)
        whole = model.staged is None and model.altup is None and model.per_layer is None
        # a method that chooses a layer ahead is told between layers
        whole = whole and not model.parts and not foreseeing([runtime])
        self._able = type(form) is NativeLayer and whole and isinstance(runtime, Reads)
        self.finishes = False  # whether a run that ends with the last layer makes logits
        self._chain: Chain | None = None
        self._places: dict[int, int] = {}  # {layer: its number in the chain}
        self._ends: dict[int, int] = {}  # {first layer of a run: the one behind its last}
        self._ropes: list[int] = []  # a layer of each rope
        # whose rows they read, and how often those had moved then
        self._bank: weakref.ref[Bank] | None = None
        self._moves = -1

    def ready(self, step: Step) -> bool:
        """Whether some layers of a step run in a chain."""
        if not self._able or step.tokens is None or step.tokens.shape != (1, 1):
            return False
        if not vars(self._runtime).keys().isdisjoint(HOOKS):
            return False
        bank = step.bank
        if self._bank is None or self._bank() is not bank or self._moves != bank.moves:
            self._bank, self._moves = weakref.ref(bank), bank.moves
            self._found(step)
        return self._chain is not None

    def end(self, number: int) -> int:
        """The layer behind the last one of the run that begins at `number`; 0: none does."""
        return self._ends.get(number, 0)

    def __call__(self, number: int, x: torch.Tensor, turns: Turns, step: Step) -> torch.Tensor:
        """Run what begins at layer `number` on x [1, 1, hidden]: x behind `end`, or logits float32
        [1, 1, vocab] behind the last layer of a model where it `finishes`.
        """
        chain, n = self._chain, step.lengths[0]
        assert chain is not None
        first = self._places[number]
        own = [turns[layer] for layer in self._ropes]
        angles = [(cos.contiguous(), sin.contiguous()) for cos, sin in own]
        now = Now(n, *self._runtime.chained_at(n), step.positions, angles)
        return chain(x.contiguous(), first, first + self._ends[number] - number, now)

    def _found(self, step: Step) -> None:
        """Find the chained layers over a step's bank."""
        self._chain, self._places, self._ends, self._ropes = None, {}, {}, []
        self.finishes = False
        if not step.bank.in_place:
            return
        ropes: dict[int, int] = {}
        found: list[ChainedLayer] = []
        begin = 0
        for number in range(len(self._model.layers)):
            rope = step.rotary.rope_of(number)
            layer = self._chained(number, step, len(ropes) if rope not in ropes else ropes[rope])
            if layer is None:
                begin = number + 1
                continue
            if rope not in ropes:
                ropes[rope] = len(ropes)
                self._ropes.append(number)
            self._places[number], self._ends[begin] = len(found), number + 1
            found.append(layer)
        if found:
            form, dtype, last = self._form, self._model.dtype, len(self._model.layers)
            assert isinstance(form, NativeLayer)
            ends = self._model.config.ends[1] and begin < last
            head = taken(form.head, dtype) if ends else None
            self.finishes = head is not None
            given = None if head is None else (head, self._model.norm)
            scratch = self._runtime.setup.scratch
            self._chain = Chain(found, dtype, *form.norms, given, step.bank.capacity, scratch)

    def _chained(self, number: int, step: Step, angles: int) -> ChainedLayer | None:
        """A layer as a chain takes it; None: it takes it not."""
        runtime, bank, dtype = self._runtime, step.bank, self._model.dtype
        weights = weights_of(self._form.model.layers[number], dtype)
        heads, kv_heads, dim, _ = self._model.config.sizes_of(number)
        if weights is None or not kv_heads:
            return None
        reading, ring = runtime.chained(number), self._ring.of(number)
        if reading is None:
            return None
        k, v, _ = bank.step_rows(number)
        k, v, softmax = k[0], v[0], runtime.softmax[number]
        if not ring.is_contiguous() or not chains(k, v, softmax, dtype, dim):
            return None
        window = bank.window_ring(number)
        seen, held_rows = (0, 0) if window is None else (window.window, window.size)
        found = weights(
            k=k,
            v=v,
            ring=ring[0],
            heads=heads,
            reading=reading,
            scale=runtime.scale,
            softmax=softmax,
            window=seen,
            size=held_rows,
            angles=angles,
        )
        whole = found.qkv.outputs == (heads + 2 * kv_heads) * dim
        return found if whole else None  # else layers take k for v
