"""The bank of a session that keeps a number of blocks: of every layer its first tokens, places for
blocks of the past, and a ring of the newest tokens. Nothing of it grows with the text.

Which block lies in which place a method decides (engine/methods/select/kept/blocks.py). A block is
copied to its place when it leaves the window, so that the ring may write over it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.bank.base import Bank, SparseRows, Step, StepRows
from engine.bank.host.cache.cached_blocks import counted
from engine.bank.host.cache.host_places import HostPlaces
from engine.bank.pool.host_pool import HostPool
from engine.bank.row_layout import RowLayout
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing
from engine.base.errors import SettingError
from engine.base.interrupts import put_back
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import BlockCache, Needs
from engine.plan.placement import Placement, part_bytes, ring_size
from kernels.rows.forms import as_bytes


class BlockBank(Bank):
    """K and V on one device, but for the places that `move_to_host` moves. needs: `kept` says the
    first tokens and places, `tail` how many newest tokens a session may ask for. chunk: the most
    that a prompt's chunk writes.

    Layers that read the rows of others have no such bank, nor have sliding windows, recurrent
    layers and latent attention: methods that keep blocks refuse them.
    """

    forgets = lacks = True

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        needs: Needs,
        chunk: int = DEFAULT_CHUNK,
        batch: int = 1,
    ) -> None:
        super().__init__(config, capacity, dtype, device, batch)
        assert needs.kept is not None
        self._kept, self._window = kept, window = needs.kept, needs.tail
        self._config, self._itemsize = config, dtype.itemsize
        self._host: HostPlaces | None = None
        size, shape = ring_size(window, chunk, self.capacity), (batch, self.kv_heads, self.widths)
        self._rings = [
            WindowRing(window, size, shape, self.dtype, self.device) for _ in range(self.num_layers)
        ]
        self._places: list[tuple[torch.Tensor, ...]] = [
            tuple(
                torch.empty(
                    batch, self.kv_heads, kept.rows, width, dtype=self.dtype, device=self.device
                )
                for width in self.widths
            )
            for _ in range(self.num_layers)
        ]
        self._first = [0] * self.num_layers  # of the first tokens those that are in their places

    @property
    def nbytes(self) -> int:
        placed = sum(side.nbytes for sides in self._places for side in sides)
        placed += 0 if self._host is None else self._host.nbytes
        return placed + sum(ring.nbytes for ring in self._rings)

    @property
    def host_nbytes(self) -> int:
        return 0 if self._host is None else self._host.host_nbytes

    def counters(self) -> dict[int, tuple[int, ...]]:
        if self._host is None:
            return {}
        layers = sorted(self._host.layers)
        rows = torch.stack([self._host.cached.counters(layer) for layer in layers]).tolist()
        return dict(zip(layers, map(tuple, rows)))

    def figures(self) -> dict[str, object]:
        if self._host is None:
            return super().figures()
        return super().figures() | dict(
            host_bytes=self.host_nbytes,
            pin_seconds=self._host.pin_seconds,
            bytes_streamed=self._host.cached.streamed,
            **counted(self.counters()),
        )

    def move_to_host(self, placement: Placement, pool: HostPool, backend: str) -> None:
        """Have the places of the placement's layers in host memory. The bank is empty."""
        assert placement.cache is not None
        self.placement, part = placement, part_bytes(self._config, self._itemsize)
        layout = RowLayout(self.kv_heads, self.widths, part, self.dtype, self.device)
        given = self._kept, placement.cache, layout, pool, backend
        self._host = HostPlaces(placement.layers, *given)
        for layer in placement.layers:
            self._places[layer] = ()

    # ---------------------------------------------------------------- writing

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        self._rings[layer].write_chunk(k, v, start, backend)
        self._place_first(layer, start + k.shape[1])

    def _place_first(self, layer: int, stop: int) -> None:
        """Have first tokens below `stop` in their places, before the ring writes over them."""
        have, stop = self._first[layer], min(stop, self._kept.first)
        if have >= stop:
            return
        new, host = self.rows(layer, have, stop), self._host_of(layer)
        if host is not None:
            host.reserve(stop)
            host.write(layer, torch.arange(have, stop, device=self.device), new[0][0], new[1][0])
        else:
            for side, rows in zip(self._places[layer], new):
                side[:, :, have:stop] = rows
        self._first[layer] = stop

    def step_rows(self, layer: int) -> StepRows:
        ring = self._rings[layer]
        return StepRows(ring.k, ring.v, (0, ring.size))

    def before_step(self, n: int) -> None:
        for layer, ring in enumerate(self._rings):
            self._place_first(layer, n - 1)
            ring.note(n)

    def keep_block(self, layer: int, b: int, first: int, place: torch.Tensor) -> None:
        kept, rows = self._kept, self._rows_of(place, 0)
        newest = self.rows(layer, first, first + kept.size)
        host = self._host_of(layer)
        if host is not None:
            # places are first taken in order
            formed = (first - kept.first) // kept.size + 1
            host.reserve(kept.first + min(kept.held, formed) * kept.size)
            host.write(layer, rows, newest[0][0], newest[1][0])
            host.cached.drop(layer, place)
            return
        for side, new in zip(self._places[layer], newest):
            as_bytes(side[b]).index_copy_(1, rows, as_bytes(new[b]))

    def _host_of(self, layer: int) -> HostPlaces | None:
        """What has a layer's places in host memory; None where they are on the device."""
        return self._host if self._host is not None and layer in self._host.layers else None

    def _rows_of(self, places: torch.Tensor, first: int) -> torch.Tensor:
        """Rows int64 of the first tokens and of the blocks in places int64 [n]."""
        inside = torch.arange(self._kept.size, device=places.device)
        rows = (self._kept.first + places.unsqueeze(1) * self._kept.size + inside).flatten()
        return torch.cat([torch.arange(first, device=places.device), rows])

    # ---------------------------------------------------------------- reading

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        ring = self._rings[layer]
        if first < ring.low:
            raise SettingError(
                f"blocks: found rows {first:,} to {stop - 1:,} of layer {layer} asked for, whose "
                f"beginning before {ring.low:,} is gone or in blocks; use a method that keeps all "
                "tokens"
            )
        return ring.views(first, stop)

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(layer, 0, min(stop or self.capacity, self._rings[layer].size))

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        size = size or max(1, stop - start)
        for first in range(start, stop, size):
            yield first, *self.rows(layer, first, min(stop, first + size))

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(layer, first, stop)

    def block_rows(
        self, layer: int, first: int, blocks: torch.Tensor, stop: int, cache: BlockCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Bank's; `blocks` are places."""
        host = self._host_of(layer)
        if host is not None:
            return host.block_rows(layer, first, blocks)
        index = self._rows_of(blocks, first)
        k, v = (as_bytes(side).index_select(2, index) for side in self._places[layer])
        return k.view(self.dtype), v.view(self.dtype)

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        return SparseRows(*self.kv(layer), index, counts, tail_start, step.visible)

    # ---------------------------------------------------------------- going back, copies, end

    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> BlockBank:
        return self

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        with put_back([view for ring in self._rings for view in ring.rows_of(n - 1)]):
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        for ring in self._rings:
            ring.rewind(n)
        self._first = [min(n, known) for known in self._first]
        if self._host is not None and (broken or n < self._kept.first):
            self._host.cached.forget(0)  # a plan may have promised rows that never came

    def newest_kept(self, length: int) -> tuple[torch.Tensor, ...]:
        """(length int64 [1], K and V [layers, B, Hkv, n, width]) of the newest n."""
        first = max(length - self._window, 0)
        rows = [ring.views(first, length) for ring in self._rings]
        return torch.tensor([length]), *(torch.stack(side) for side in zip(*rows))

    def keep_again(self, newest: tuple[torch.Tensor, ...]) -> None:
        length, keys, values = int(newest[0]), *newest[1:]
        for ring, k, v in zip(self._rings, keys, values):
            ring.load(k, v, length - k.shape[2], length)

    def copy_from(self, other: Bank, length: int) -> None:
        assert isinstance(other, BlockBank)
        for ring, theirs in zip(self._rings, other._rings):
            ring.copy_from(theirs, length)
        for mine, others in zip(self._places, other._places):
            for side, new in zip(mine, others):
                side.copy_(new)
        if self._host is not None:
            assert other._host is not None
            self._host.share(other._host)
        self._first = list(other._first)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._rings, self._places = [], []
