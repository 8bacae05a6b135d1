"""The state of all recurrent layers of one sequence, which is as large after a million tokens as
after one.

It is held as S after `base` tokens and a tail of rows, one for each token since
(kernels/recurrent/delta.py). A step writes rows at its positions and nothing else; `commit` takes
them. So a step can be repeated, drafts can be dropped, and the newest KEPT tokens can always be
taken back. A prompt's chunk leaves what it changed pending, and `commit` puts it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from engine.bank.recurrent.savepoints import Snapshot
from engine.base.interrupts import complete
from engine.model.recurrent import DeltaNet, Mixed, Mixer, Recurrent
from kernels.recurrent.conv import conv_chunk, conv_step
from kernels.recurrent.delta import Tail, folded
from kernels.recurrent.step import Held, net_step

KEPT = 8  # newest tokens whose rows stay apart from S, so that they can be taken back
FOLD = 13  # tokens whose rows go into S together: a step reads S, and only every 13th writes it
MOST = 8  # tokens of one step
# rows of a ring: the tokens apart from S, those of a step, and inputs of a convolution of 4
ROWS = 32


@dataclass(frozen=True)
class _Chunk:
    """What a chunk leaves in one layer: S after `base` tokens, and the rows of the tokens from
    `first`, of the inputs from `seen` on.
    """

    state: torch.Tensor
    tail: Tail
    inputs: torch.Tensor
    base: int
    first: int
    seen: int


class RecurrentState:
    """The recurrent layers' state of `batch` sequences of one length. length: tokens it stands
    after; base: those of them that S holds.
    """

    def __init__(
        self,
        sizes: Recurrent,
        dtype: torch.dtype,
        device: torch.device | str,
        batch: int = 1,
    ) -> None:
        assert KEPT + FOLD - 1 + MOST + sizes.taps - 1 <= ROWS, "a ring is too short for a step"
        self.sizes, layers = sizes, len(sizes.layers)
        self._number = {layer: i for i, layer in enumerate(sizes.layers)}
        heads, keys = (layers, batch, sizes.value_heads), (layers, batch, sizes.key_heads)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self._states = floats(*heads, sizes.key_dim, sizes.value_dim)
        self._inputs = floats(layers, batch, ROWS, sizes.channels).to(dtype)
        self._tails = Tail(
            floats(*keys, ROWS, sizes.key_dim),
            floats(*heads, ROWS, sizes.value_dim),
            floats(*heads, ROWS),
        )
        # for kernels, which read no number of the host
        self._base = torch.zeros(batch, dtype=torch.int64, device=device)
        self.base = self.length = 0
        self._pending: dict[int, _Chunk] = {}

    @property
    def device(self) -> torch.device:
        """Where it is held."""
        return self._base.device

    @property
    def nbytes(self) -> int:
        """Bytes held, but for a pending chunk's."""
        held = (self._states, self._inputs, *self._tails, self._base)
        return sum(t.nbytes for t in held)

    def of(self, layer: int) -> Held:
        """What a layer holds: views."""
        i = self._number[layer]
        return Held(self._states[i], self._inputs[i], Tail(*(t[i] for t in self._tails)))

    # ---------------------------------------------------------------- tokens through a layer

    def step(
        self, layer: int, net: Mixer, mixed: Mixed, positions: torch.Tensor, backend: str
    ) -> torch.Tensor:
        """Run a step's tokens at positions int64 [B, Q]: float32 [B, Q, Hv, dv]. Their rows are
        written; `commit` takes them.
        """
        held = self.of(layer)
        weights = net.conv, net.backend(backend), net.conv_bias
        convolved = conv_step(mixed.qkv, held.inputs, positions, *weights)
        where = held.state, held.tail, self._base, positions
        return net.step(convolved, mixed, *where, backend)

    def whole_step(
        self,
        layer: int,
        net: DeltaNet,
        projected: torch.Tensor,
        rates: torch.Tensor,
        positions: torch.Tensor,
        eps: float,
        backend: str,
    ) -> torch.Tensor:
        """Run a step's tokens from their products to the gated norm, as `net_step` of
        kernels/recurrent/step.py: [B, Q, Hv, dv]. Their rows are written; `commit` takes them.
        """
        where = self._base, positions
        return net_step(projected, rates, net.weights, self.of(layer), *where, eps, backend)

    def chunk(
        self, layer: int, net: Mixer, mixed: Mixed, start: int, keep: bool, backend: str
    ) -> torch.Tensor:
        """Run a prompt's tokens from position `start` on, which is at least `base`: float32
        [B, C, Hv, dv]. keep: `commit` will take what they change.
        """
        assert self.base <= start <= self.length, (self.base, start, self.length)
        held, size, taps = self.of(layer), mixed.qkv.shape[1], self.sizes.taps
        before = self._inputs_before(held.inputs, start)
        weights = net.conv, net.backend(backend), net.conv_bias
        convolved = conv_chunk(mixed.qkv, before, *weights)
        state = folded(held.state, held.tail, self.base, start - self.base, backend)
        stop = start + size
        base = max(self.base, stop - KEPT)
        rows = (stop - max(base, start)) if keep else 0
        out, state, tail = net.chunk(convolved, mixed, state, rows, backend)
        if keep:
            if base < start:  # part of the rows from before stays apart
                state = folded(held.state, held.tail, self.base, base - self.base, backend)
            seen = max(start, base - taps + 1)
            inputs = mixed.qkv[:, seen - start :].clone()
            self._pending[layer] = _Chunk(state, tail, inputs, base, max(base, start), seen)
        return out

    def _inputs_before(self, inputs: torch.Tensor, start: int) -> torch.Tensor:
        """The convolution's inputs before `start` [B, taps - 1, C]; zeros before position 0."""
        back = range(start - self.sizes.taps + 1, start)
        rows = torch.tensor([p % ROWS for p in back], device=inputs.device)
        found = inputs.index_select(1, rows)
        found[:, : sum(p < 0 for p in back)] = 0
        return found

    # ---------------------------------------------------------------- forward and back

    def commit(self, length: int) -> None:
        """Stand after `length` tokens: those of the chunk, or some of the step, that just ran."""
        if self._pending:
            complete(lambda: self._take(length))
            self._pending = {}
            return
        self.length = length
        if length - self.base >= KEPT + FOLD:
            flat = Tail(*(t.flatten(0, 1) for t in self._tails))
            states = folded(self._states.flatten(0, 1), flat, self.base, FOLD)
            complete(partial(self._put, states, self.base + FOLD))

    def _take(self, length: int) -> None:
        """Put a pending chunk in place."""
        for layer, chunk in self._pending.items():
            held = self.of(layer)
            held.state.copy_(chunk.state)
            self._write(held.tail, chunk.tail, chunk.first, 2)
            self._write((held.inputs,), (chunk.inputs,), chunk.seen, 1)
        self.base, self.length = chunk.base, length
        self._base.fill_(self.base)

    @staticmethod
    def _write(
        rings: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], first: int, dim: int
    ) -> None:
        """Write the rows of the positions from `first` on into rings whose rows are in `dim`."""
        at = torch.arange(first, first + rows[0].shape[dim], device=rows[0].device) % ROWS
        for ring, new in zip(rings, rows):
            ring.index_copy_(dim, at, new)

    def _put(self, states: torch.Tensor, base: int) -> None:
        self._states.copy_(states.view_as(self._states))
        self.base = base
        self._base.fill_(base)

    def holds(self, length: int) -> bool:
        """Say whether it can stand after so many tokens at once, and run the last one again."""
        return length == 0 or self.base < length <= self.length

    def rewind(self, length: int) -> None:
        """Drop tokens from `length` on, and what is pending. Where S has taken some of them it
        stands after none.
        """
        self._pending = {}
        if length >= self.length:
            return
        if length and self.holds(length):
            for ring in self._tails:  # a row that is no number would spoil what it has no part in
                at = torch.arange(
                    length, self.base + ROWS - self.sizes.taps + 1, device=ring.device
                )
                ring.index_fill_(3, at % ROWS, 0.0)
            self.length = length
            return
        complete(self._clear)

    def _clear(self) -> None:
        for held in (self._states, self._inputs, *self._tails, self._base):
            held.zero_()
        self.base = self.length = 0

    # ---------------------------------------------------------------- copies

    def snapshot(self) -> Snapshot:
        """Return the state as it stands, on the CPU."""
        first = self.base - self.sizes.taps + 1
        seen = torch.arange(first, self.length, device=self._states.device) % ROWS
        rows = seen[self.base - first :]
        parts = [self._states.clone(), self._inputs.index_select(2, seen)]
        parts += [t.index_select(3, rows) for t in self._tails]
        return Snapshot(self.base, self.length, tuple(t.cpu() for t in parts))

    @property
    def most_rows(self) -> int:
        """The most tokens that stand apart from S between two steps."""
        return KEPT + FOLD - 1

    def require(self, held: Snapshot) -> None:
        """Raise ValueError for a snapshot, from a file, that this state cannot load."""
        rows = held.length - held.base
        mine = self.snapshot_shapes(rows)
        theirs = [(tuple(t.shape), t.dtype) for t in held.tensors]
        if not 0 < rows <= self.most_rows or theirs != mine:
            raise ValueError("recurrent")

    def snapshot_shapes(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of a snapshot with so many tokens in its tail."""
        inputs = *self._inputs.shape[:2], rows + self.sizes.taps - 1, self._inputs.shape[3]
        found = [(tuple(self._states.shape), torch.float32), (inputs, self._inputs.dtype)]
        for t in self._tails:
            found.append(((*t.shape[:3], rows, *t.shape[4:]), t.dtype))
        return found

    def load(self, held: Snapshot, length: int) -> None:
        """Stand where `held` was taken, or up to held.length - held.base - 1 tokens before."""
        assert held.base < length <= held.length

        def put() -> None:
            self._clear()
            states, inputs, *rows = (t.to(self._states.device) for t in held.tensors)
            self._states.copy_(states)
            first = held.base - self.sizes.taps + 1
            self._write((self._inputs,), (inputs[:, :, : length - first],), first, 2)
            tail = tuple(t[:, :, :, : length - held.base] for t in rows)
            self._write(self._tails, tail, held.base, 3)
            self.base, self.length = held.base, length
            self._base.fill_(held.base)

        self._pending = {}
        complete(put)

    def aside(self) -> tuple[int, int, list[torch.Tensor]]:
        """Return a copy of all that is held, on the device, for `put_back`."""
        held = (self._states, self._inputs, *self._tails, self._base)
        return self.base, self.length, [t.clone() for t in held]

    def put_back(self, held: tuple[int, int, list[torch.Tensor]]) -> None:
        """Hold again what `aside` has returned."""
        self.base, self.length, tensors = held
        for to, of in zip((self._states, self._inputs, *self._tails, self._base), tensors):
            to.copy_(of)
        self._pending = {}

    def copy(self) -> RecurrentState:
        """Return another state that holds what this one does."""
        held = self._inputs
        found = RecurrentState(self.sizes, held.dtype, held.device, held.shape[1])
        found.copy_from(self)
        return found

    def copy_from(self, other: RecurrentState) -> None:
        """Hold what another sequence of the same model holds (fork)."""
        mine, theirs = ((s._states, s._inputs, *s._tails, s._base) for s in (self, other))
        for to, of in zip(mine, theirs):
            to.copy_(of)
        self.base, self.length, self._pending = other.base, other.length, {}

    def row(self, position: int) -> list[torch.Tensor]:
        """Return the views that hold one position's rows, of all layers."""
        at = position % ROWS
        return [self._inputs[:, :, at], *(t[:, :, :, at] for t in self._tails)]


def state_bytes(sizes: Recurrent, size: int, batch: int = 1) -> int:
    """Return the bytes that a RecurrentState allocates; size: bytes of the model's elements."""
    state = 4 * sizes.value_heads * sizes.key_dim * sizes.value_dim
    row = 4 * (sizes.key_size + sizes.value_size + sizes.value_heads) + sizes.channels * size
    return len(sizes.layers) * batch * (state + ROWS * row) + 8 * batch


def snapshot_bytes(sizes: Recurrent, size: int, batch: int = 1) -> int:
    """Return the most bytes of a snapshot: its tail is longest right before rows go into S."""
    state = 4 * sizes.value_heads * sizes.key_dim * sizes.value_dim
    rows = KEPT + FOLD - 1
    row = 4 * (sizes.key_size + sizes.value_size + sizes.value_heads)
    inputs = (rows + sizes.taps - 1) * sizes.channels * size
    return len(sizes.layers) * batch * (state + rows * row + inputs)
