"""Buffers on the device through which the matrices of streamed layers pass, one after the other.

Each streamed layer has one packed buffer in host memory and a fixed place in the ring: the i-th in
buffer i modulo their number. Its matrices are views of that buffer, so kernels, compiled pieces and
CUDA graphs see addresses that never change. A pass begins with the copies of the first layers; the
copy into a buffer is issued when the layer that had it is done, behind all of its work.

A pass leaves nothing behind that a later one relies on: it starts with copies of its own and ends
joined. So a captured step holds its own copies, forked from the capturing stream and joined to it,
and never waits for an event from outside its capture, which CUDA refuses
(cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureUnjoined).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from engine.bank.host.streams import SideStream, wait
from engine.bank.pool.pinned_memory import ordinary
from engine.base.device import current
from engine.forward.staged.host import HostMemory
from engine.forward.staged.lying import Matrix, lying_in, places, require_movable, tensors, view
from engine.forward.staged.lying import moved as made_of
from engine.forward.staged.staging import BUFFERS
from engine.model.llama import Layer, Llama
from engine.model.parts.parted import joined_parts
from engine.model.share.matrix import Joined

T = TypeVar("T")


def bring(buffer: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy a layer's packed matrices into a buffer, uint8, on the current stream."""
    with torch.inference_mode():  # a model that was loaded in this mode runs outside of it too
        buffer[: len(memory)].copy_(memory, non_blocking=True)


class WeightRing:
    """The streamed layers of a model, and where their matrices pass through.

    memory: {layer: its packed matrices in host memory, uint8}. buffers: uint8 on the device, each
    as long as the longest. pinned: whether copies run beside the host's work, and can be captured.
    """

    def __init__(
        self,
        memory: Mapping[int, torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        pinned: bool = True,
    ) -> None:
        self.pinned, self.streamed = pinned, 0  # bytes that came over
        self._memory, self._buffers, self._device = dict(memory), list(buffers), device
        self._order = sorted(memory)
        self._stream = SideStream(device)
        self._turn = object()  # the pass under way
        self._arrived: dict[int, torch.cuda.Event | None] = {}  # of its copies

    @property
    def bytes(self) -> int:
        """Bytes in host memory, which a whole pass brings over."""
        return sum(map(len, self._memory.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(map(len, self._buffers))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that stream, ascending."""
        return tuple(self._order)

    def buffer(self, layer: int) -> torch.Tensor:
        """The buffer that a streamed layer passes through."""
        return self._buffers[self._order.index(layer) % len(self._buffers)]

    def turns(self, layers: Sequence[T], first: int = 0) -> Iterator[tuple[int, T]]:
        """Go through layers from `first` on in order: (number, layer), the matrices of each in
        place for all work that is issued before the next is asked for. Only one pass at a time.
        """
        wanted = [number for number in self._order if first <= number < len(layers)]
        self._turn = turn = object()
        self._arrived = {}
        ahead = iter(wanted)
        for _ in self._buffers:
            self._issue(next(ahead, None))
        try:
            for number in range(first, len(layers)):
                self.arrive(number)
                yield number, layers[number]
                if number in self._memory:
                    self._issue(next(ahead, None))
        finally:
            # race: a pass that breaks off would leave copies that nobody waits for, and a capture
            # a stream that is not joined
            if self._turn is turn:
                for event in self._arrived.values():
                    wait(event, self._device)

    def arrive(self, number: int) -> None:
        """Have work issued from now on find a layer's matrices: of the pass's next streamed layer,
        or of one that stays.
        """
        # race: products would read weights that are still arriving
        wait(self._arrived.get(number), self._device)

    def place(self, number: int) -> None:
        """Put a layer's matrices in place outside of a pass; nothing for one that stays."""
        if number in self._memory:
            for event in self._arrived.values():
                # race: a copy of a pass that broke off would land after this one
                wait(event, self._device)
            bring(self.buffer(number), self._memory[number])

    def replayed(self, layers: int) -> None:
        """Count a pass through the first `layers` layers that a graph made."""
        self.streamed += sum(len(m) for number, m in self._memory.items() if number < layers)

    def _issue(self, number: int | None) -> None:
        """Start the copy of a layer, behind all work issued so far."""
        if number is None:
            return
        # race: the layer that had this buffer before may still be multiplied by
        with self._stream.after_main():
            bring(self.buffer(number), self._memory[number])
        self._arrived[number] = self._stream.record_event()
        if not _capturing(self._device):  # a capture moves nothing
            self.streamed += len(self._memory[number])


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def left_on_host(name: str, matrix: Matrix, layers: Sequence[int]) -> Matrix:
    """Return a matrix as it arrives, its target `name`, in host memory if its layer streams: the
    device never holds more than one of these.
    """
    number = name.partition(".")[0]
    if not number.isdigit() or int(number) not in layers:
        return matrix
    require_movable(matrix)
    return made_of(matrix, lambda tensor: tensor.cpu())


def staged(model: Llama, layers: Sequence[int], host: HostMemory | None = None) -> Llama:
    """Return a model whose `layers` stream, from one whose matrices of these lie in host memory.
    The memory of those is given back layer by layer. Raises OutOfHostMemory.
    """
    device, host = model.device, host or HostMemory(model.device)
    found = {number: _parts(model.layers[number]) for number in layers}
    lies = {number: places(parts) for number, parts in found.items()}
    longest = max(size for _, size in lies.values())
    count = min(BUFFERS, len(layers))
    buffers = [_buffer(longest, device) for _ in range(count)]
    memory = {}
    for i, number in enumerate(sorted(layers)):
        parts, (starts, size) = found.pop(number), lies[number]
        memory[number] = packed = host.take(size)
        for part, start in zip(parts, starts, strict=True):
            view(packed, start, part).copy_(part)
        views = [view(buffers[i % count], at, part) for at, part in zip(starts, parts)]
        model.layers[number] = _made_of(model.layers[number], views)
    host.report()
    return replace(model, staged=WeightRing(memory, buffers, device, host.pinned))


def staged_parts(model: Llama, layers: Sequence[int]) -> Llama:
    """As `staged`, of a model in parts, which gives its layers up: each part has a ring of its own
    on its device.
    """
    model.layers.clear()  # or the matrices would be there twice
    made, first = [], 0
    for part in model.parts:
        stop = first + len(part.layers)
        own = [layer - first for layer in layers if first <= layer < stop]
        with current(part.device):
            made.append(staged(part, own) if own else part)
        first = stop
    return joined_parts(model, made)


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return ordinary(size)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _parts(layer: Layer) -> list[torch.Tensor]:
    """What a layer's matrices consist of, in the order in which `_made_of` takes it."""
    found: list[torch.Tensor] = []

    def note(matrix: Matrix | Joined) -> Matrix | Joined:
        assert not isinstance(matrix, Joined)  # of one process
        found.extend(tensors(matrix))
        return matrix

    layer.mapped(note)
    return found


def _made_of(layer: Layer, parts: list[torch.Tensor]) -> Layer:
    """The same layer, its matrices made of these tensors."""
    rest = iter(parts)

    def lying(matrix: Matrix | Joined) -> Matrix | Joined:
        assert not isinstance(matrix, Joined)
        return lying_in(matrix, [next(rest) for _ in tensors(matrix)])

    return layer.mapped(lying)
