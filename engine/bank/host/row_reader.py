"""Reads an offloaded layer's rows from wherever they are: host memory, and past it the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.bank.host.host_rows import HostRows
from engine.bank.host.streams import copy_rows
from engine.bank.host.working_set import WorkingSet
from engine.bank.host.write_back import WriteBack


class RowReader:
    """Copies on the current stream; the caller has waited for the rows. set_of: each offloaded
    layer's working set. What `read` and its like return counts rows of host memory, which come over
    the link; rows of a ring lie on the device already.
    """

    def __init__(self, host: HostRows, writer: WriteBack, set_of: Mapping[int, WorkingSet]) -> None:
        self._host, self._writer, self._set_of = host, writer, set_of
        self.part_bytes = host.part_bytes

    def read(self, layer: int, first: int, stop: int, out: torch.Tensor) -> int:
        """Copy rows first .. stop-1 of a layer to out[0:]; bytes that came over the link."""
        middle = min(max(first, self._writer.host_length), stop)
        if first < middle:
            self._host.read(layer, first, out, 0, middle - first)
        if middle < stop:
            newest = self._set_of[layer].newest(layer, middle, stop)
            copy_rows(out[middle - first : stop - first], newest)
        return (middle - first) * self.part_bytes

    def read_listed(
        self,
        layer: int,
        tokens: torch.Tensor,
        count: torch.Tensor,
        out: torch.Tensor,
        moved: torch.Tensor,
    ) -> None:
        """Copy the rows of tokens[: count[0]], int32 lists of positions in host memory, to out[0:],
        and add their bytes to moved [1]. Nothing visits the host.
        """
        if len(tokens):
            programs = self._host.pool.programs
            self._host.read(layer, tokens, out, 0, count, moved, programs)

    def read_tokens(self, layer: int, tokens: torch.Tensor, out: torch.Tensor) -> int:
        """Copy the rows of `tokens`, an ascending int32 list of positions, to out[0:]; bytes that
        came over the link. The host waits to learn how many of them the ring has.
        """
        old = int((tokens < self._writer.host_length).sum())
        if old:
            programs = self._host.pool.programs
            self._host.read(layer, tokens[:old], out, 0, old, programs=programs)
        if old < len(tokens):
            copy_rows(out[old : len(tokens)], self._set_of[layer].listed(layer, tokens[old:]))
        return old * self.part_bytes

    def read_values(
        self, layer: int, tokens: torch.Tensor, out: torch.Tensor, span: tuple[int, int]
    ) -> int:
        """As `read_tokens`, of the bytes `span` (first, how many) of each row."""
        old, (first, size) = int((tokens < self._writer.host_length).sum()), span
        if old:
            given = out, 0, old
            programs = self._host.pool.programs
            self._host.read(layer, tokens[:old], *given, programs=programs, skip=first)
        if old < len(tokens):
            newer = self._set_of[layer].listed(layer, tokens[old:]).view(torch.uint8)
            copy_rows(out[old:].view(torch.uint8), newer[:, first : first + size])
        return old * size

    def read_group(self, group: Sequence[int], tokens: torch.Tensor, out: torch.Tensor) -> int:
        """Copy what host memory has of `tokens`, an ascending int32 list of positions, of all
        layers of an offload group to out[0:], rows [n, layers, elements], in one copy; how many.
        The host waits to learn that.
        """
        old = int((tokens < self._writer.host_length).sum())
        if old:
            words = out.view(len(out), -1).view(torch.int32)
            programs = self._host.pool.programs
            self._host.read(group[0], tokens[:old], words, 0, old, programs=programs)
        return old

    def read_ring(self, layer: int, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the ring's rows of positions `tokens` of a layer to out [n, elements]."""
        if len(tokens):
            copy_rows(out, self._set_of[layer].listed(layer, tokens))

    def read_selected(self, layer: int, index: torch.Tensor, count: int, out: torch.Tensor) -> int:
        """Copy the rows of index[:count], an int32 list of positions in host memory, to out[0:];
        bytes that came over the link.

        Both the list and the rows are read on the host: the ablation without packed fetches.
        """
        self._host.read(layer, index, out, 0, count, backend="reference")
        return count * self.part_bytes
