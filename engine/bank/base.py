"""The interface of a context bank: every call that decode, prefill and the methods make.

A bank holds K and V of every layer for every token. DeviceBank keeps all of them on one device.
TieredBank keeps some layers in host memory and brings their rows to the device as they are read.
Some hooks below exist for the second only; as they stand here they do nothing. Callers call them
always and never ask which bank they have, so placement cannot change an answer.

Shapes: B sequences, Q new tokens, T positions, H query heads, Hkv K/V heads, D head dimension. Rows
of a bank in fewer bits are packed (kernels/rows/forms.py): as many bytes where this file says D.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from engine.bank.query_ring import QueryRing
from engine.bank.recurrent.state import RecurrentState
from engine.bank.window_ring import WindowRing
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary, apply_rope
from engine.plan.layers import LayerPlan, tail_start
from engine.plan.needs import BlockCache, Needs
from engine.plan.placement import Placement, reserved_rows
from kernels.attention.scratch import Scratch
from kernels.chain.layer import Reading
from kernels.launch.softmax import Softmax
from kernels.layer.store import store_step
from kernels.rows.forms import as_bytes, row_widths

# makes K and V [B, H, n, D] of all query heads of rows [B, 1, n, width] of latent attention
Opened = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class SparseRows(NamedTuple):
    """The rows that a sparse layer attends to, in the argument order of decode_sparse
    (kernels/attention/sparse.py).

    The layer reads rows index[b, h, : counts[b]] and then rows tail_start[b] .. stop[b] - 1. On the
    device a row number is a token's position. In a working set it is a slot for a selected token
    and a ring row for a token of the tail. The kernel sees no difference.
    """

    k: torch.Tensor  # [B, Hkv, T, D]
    v: torch.Tensor  # [B, Hkv, T, D]
    # int32 [B, 1 or Hkv, K]: rows of the selection (positions or slots); hides tuple.index
    index: torch.Tensor  # type: ignore[assignment]
    counts: torch.Tensor  # int32 [B]: how many of the K are valid, or [B, Hkv]: of each head's
    tail_start: torch.Tensor  # int32 [B]: first row of the tail (position or ring row)
    stop: torch.Tensor  # int32 [B]: one past the last row that the step's last query sees


T = TypeVar("T")


def own_rows(index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The entries of index [h, K] that count, [h, most], -1 behind a head's last: counts [] or [h]
    says how many, of all heads or of each.
    """
    index = index[:, : int(counts.max())]
    if not counts.dim():
        return index
    places = torch.arange(index.shape[1], device=index.device)
    return index.masked_fill(places >= counts.unsqueeze(1), -1)


def of_heads(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copies [B, Hkv, K, width] of each head's own rows of [B, Hkv, T, width]: index int [B, Hkv,
    K].
    """
    b = torch.arange(len(index), device=index.device).view(-1, 1, 1)
    head = torch.arange(index.shape[1], device=index.device).view(1, -1, 1)
    return as_bytes(rows)[b, head, index.long()].view(rows.dtype)


class StepRows(NamedTuple):
    """The rows of a layer that a decode step writes, as kernels/layer/store.py takes them: K and V
    [B, Hkv, T, D] by position, or a ring of its own, held twice (first row, rows).
    """

    k: torch.Tensor
    v: torch.Tensor
    twice: tuple[int, int] | None = None


class PromptRows(NamedTuple):
    """Rows of an offloaded layer that queries of a prompt's chunk read together.

    tokens[: count[0]] are positions below `first` in host memory; behind them every position
    first .. stop-1 is read. The chunk begins at `begin`, which is not below `first`.
    """

    tokens: torch.Tensor  # int32 [M]
    # int32 [1], on the device like tokens; hides tuple.count
    count: torch.Tensor  # type: ignore[assignment]
    first: int
    begin: int
    stop: int


class Bank(ABC):
    """K and V of `batch` sequences of up to `capacity` tokens (on a GPU rounded up to whole blocks
    of 64). Callers pass lengths: rows at and beyond a sequence's length are undefined.
    """

    tiered = False  # whether some layers live in host memory
    forgets = False  # whether it holds no more rows than a store has yet to take
    lacks = False  # whether rows are gone that other methods read, as in a bank that forgets
    # whether a length that a session goes back to may be lost (`holds`), as in rings of windows
    overwrites = False
    placement: Placement | None = None  # which layers do, and what they keep on the device
    recurrent: RecurrentState | None = None  # of the recurrent layers, where there are some
    # whether a decode step finds all rows of every layer where `step_rows` says, and need tell
    # nobody that it has read or written them
    in_place = False
    moves = 0  # how often rows have come to lie elsewhere
    room = 0  # rows of an offloaded layer that may be asked for at once (`gathered`)
    parts: tuple[Bank, ...] = ()  # the banks of a model's parts, each on its device

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        batch: int = 1,
    ) -> None:
        self.num_layers, self.attending = config.num_layers, config.attending_layers
        # the layer whose rows each layer reads
        self.row_layers = tuple(map(config.rows_of, range(config.num_layers)))
        self.keeping = config.keeping_layers
        self.kv_heads = config.num_kv_heads
        self.dtype, self.device = config.row_dtype(dtype), torch.device(device)
        # elements of a head's row of K, and of V; 0 where V is K
        self.widths = row_widths(config.head_dim, self.dtype)
        if config.sides == 1:
            self.widths = self.widths[0], 0
        self.capacity, self.batch = reserved_rows(capacity, self.device.type), batch
        self.overwrites = self.overwrites or bool(config.local_layers)

    # ---------------------------------------------------------------- sizes

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes reserved on the device."""

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory held, blocks shared with other sessions included."""
        return 0

    @property
    def length(self) -> int:
        """Tokens in the bank, with those of the current step. Only a tiered bank counts them."""
        raise NotImplementedError

    def counters(self) -> dict[int, tuple[int, ...]]:
        """Return {first layer of an offload group: (hits, misses, evictions, plans, bytes)}, summed
        since the beginning.
        """
        return {}

    def figures(self) -> dict[str, object]:
        """Return the bank's part of SessionStats, as keyword arguments."""
        row_bytes = self.kv_heads * sum(self.widths) * self.dtype.itemsize
        everything = len(self.keeping) * self.capacity * self.batch * row_bytes + self.ring_bytes
        everything += 0 if self.recurrent is None else self.recurrent.nbytes
        return dict(bank_bytes=self.nbytes, resident=self.nbytes / everything)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings of sliding-window layers."""
        return 0

    # ---------------------------------------------------------------- writing

    @abstractmethod
    def step_rows(self, layer: int) -> StepRows:
        """Where a decode step's rows of a layer go."""

    def write_step(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        q_pre_rope: torch.Tensor,
        step: Step,
        backend: str = "auto",
    ) -> None:
        """Store the results of one layer of a decode step: k, v [B, Q, Hkv, D] at the step's
        positions, and q_pre_rope [B, Q, H, D] in the layer's query ring; of a layer that reads
        another's rows only the query. backend: of the launcher.

        The query goes along because one kernel stores all three. On a GPU no position visits the
        host.
        """
        if self.row_layers[layer] != layer:
            step.query_ring.write(layer, q_pre_rope, step.positions)
            return
        ring, (bank_k, bank_v, twice) = step.query_ring.of(layer), self.step_rows(layer)
        store_step(k, v, q_pre_rope, bank_k, bank_v, ring, step.positions, twice, backend)

    def landed(self, layer: int, step: Step) -> None:
        """Note that a step's rows of a layer are written: a bank that gave them a place of their
        own (`step_rows`) takes them to where they are read.
        """

    @abstractmethod
    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        """Store k, v [B, C, Hkv, D], floats or packed, of a prefill chunk at positions start ..
        start + C - 1; a layer that reads another's rows stores none. backend: that rounds floats,
        where rows are packed.

        Raises OutOfHostMemory before anything has changed.
        """

    # ---------------------------------------------------------------- reading

    def here(self, length: int) -> tuple[Bank, int]:
        """The bank that has what this process holds of the first `length` tokens' rows of layers
        that keep all, and how many those are; rows there are numbered from 0 on.
        """
        return self, length

    @abstractmethod
    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer as [B, Hkv, T, D] views of any strides.

        T is `stop`, or all there is. An offloaded layer is brought over whole; its views hold until
        the next call.
        """

    @abstractmethod
    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Stream positions start .. stop-1 of a layer in order.

        Yields (first position, K, V) with K, V [B, Hkv, <= size, D] on the device. Block views hold
        until the next one is asked for. ahead: the next offloaded layer will be asked for the same
        positions, and holds their rows, so its first block may come already.
        """

    def values(self, layer: int) -> torch.Tensor:
        """Return V [B, Hkv, T, D] of one layer, as `kv`."""
        return self.kv(layer)[1]

    def head_keys(
        self, layer: int, head: int, first: int, stop: int
    ) -> list[tuple[int, torch.Tensor]]:
        """Return [(first position, K [B, 1, n, D])] of one K/V head's positions first .. stop-1, in
        parts that follow each other.
        """
        return [(first, self.kv(layer)[0][:, head : head + 1, first:stop])]

    def gathered(
        self, layer: int, wanted: Sequence[PromptRows], following: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bring rows of an offloaded layer to the device, one of `wanted` (at most `room` rows)
        after the other.

        Yields K, V [1, Hkv, M + stop - first, D]: row i < count holds tokens[i], row M + j position
        first + j. Views hold until the next one is asked for. following: a layer that will be asked
        for the same next.
        """
        raise NotImplementedError

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, Hkv, T, D] of positions first .. stop-1: views that hold until the
        next call.
        """
        k, v = self.kv(layer, stop)
        return k[:, :, first:], v[:, :, first:]

    def listed(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, Hkv, n, D] of the positions `tokens`, int [n] ascending: copies."""
        k, v = (as_bytes(part).index_select(2, tokens) for part in self.kv(layer))
        return k.view(self.dtype), v.view(self.dtype)

    def block_rows(
        self, layer: int, first: int, blocks: torch.Tensor, stop: int, cache: BlockCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, Hkv, first + n * size, D] of the first tokens and of `blocks`, int [n]
        ascending, as `cache` counts them, all below `stop`, which is older than the step: copies.
        An offloaded layer brings over the blocks that it does not keep on the device.
        """
        inside = torch.arange(cache.size, device=blocks.device)
        tokens = (cache.first + blocks.unsqueeze(1) * cache.size + inside).flatten()
        return self.listed(layer, torch.cat([torch.arange(first, device=blocks.device), tokens]))

    def picked(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
    ) -> SparseRows:
        """As `selected`, of a choice that nobody fetched: an offloaded layer brings the rows that
        any head chose, and the host waits for them.
        """
        return self.selected(layer, index, counts, tail_start, step)

    def picked_values(self, layer: int, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return V [B, Hkv, K, D] of a choice per K/V head, index int32 [B, Hkv, K]: copies, of
        anything behind a sequence's first counts [B]. An offloaded layer, of one sequence whose
        entries all count, brings V of the rows that any head chose, and no K; the host waits.
        """
        return of_heads(self.values(layer), index.clamp(min=0))

    def bring(
        self,
        layers: Sequence[int],
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
    ) -> None:
        """Bring what `picked` will be asked for, the same in each of these layers of one group, in
        one copy: an offloaded group's rows. It holds for this step.
        """

    @abstractmethod
    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, Hkv, T, D] of positions first .. stop-1: the chunk or step that was
        written last.
        """

    @abstractmethod
    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        """Return the rows that a sparse layer attends to: a selection and the tail.

        index int32 [B, 1 or Hkv, K], counts [B] and tail_start [B] are positions. fetched: `fetch`
        was told of this selection; else its rows are gathered now, which an offloaded layer waits
        for.
        """

    def window_ring(self, layer: int) -> WindowRing | None:
        """Return where a sliding-window layer keeps its rows; None for a layer that keeps all."""
        return None

    def holds(self, length: int) -> bool:
        """Say whether a session may go back to `length` tokens: the rings have not overwritten what
        it would read.
        """
        return True

    # ---------------------------------------------------------------- where layers live

    def on_host(self, layer: int) -> bool:
        """Whether a layer's K and V live in host memory."""
        return False

    def must_stream(self, layer: int, backend: str) -> bool:
        """Whether dense decode attention must read a layer block by block
        (engine/bank/host/streamed_attention.py).
        """
        return False

    def capturable(self, *, fetches: bool) -> bool:
        """Whether a decode step over this bank can be captured into a CUDA graph. fetches: the
        step's sparse layers read fetched selections.
        """
        return True

    @abstractmethod
    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> Bank:
        """Return the bank that serves another layer plan with the same rows: this one, or a new one
        beside it, whose caller closes the one that is not used any more.

        placement: what a tiered bank offloads from now on (None: as before). Needs one layer's
        bytes on top while it runs. Raises OutOfHostMemory with this bank as it was.
        """

    # ---------------------------------------------------------------- hooks around a prompt, a step

    def preparing(self, n: int) -> AbstractContextManager[None]:
        """Take memory for a prompt that makes the bank n tokens long, beside the reading inside."""
        return contextlib.nullcontext()

    @abstractmethod
    def before_step(self, n: int) -> None:
        """Prepare the step that makes the bank n tokens long. Raises OutOfHostMemory before
        anything has changed.
        """

    def after_step(self, n: int) -> None:
        """Note that the step that makes the bank n tokens long has been issued."""

    @abstractmethod
    def replaying(self, n: int) -> AbstractContextManager[None]:
        """Run steps to length n once more, with n at most the bank's length. All rows are restored
        afterwards, also after an exception.
        """

    def keep_newest(self, layer: int, start: int, stop: int) -> None:
        """Note that a layer has attended to the chunk start .. stop-1, whose newest rows the next
        one asks for (`rows`): an offloaded layer keeps a tail of them on the device.
        """

    def keep_block(self, layer: int, b: int, first: int, place: torch.Tensor) -> None:
        """Have the block at position `first`, which is among the newest rows of sequence b, in
        place int64 [1] of those that stay (Needs.kept). A bank of all rows has it where it is.
        """

    def newest_kept(self, length: int) -> tuple[torch.Tensor, ...]:
        """Copies of the rows before `length` that a bank of blocks must have to go on there."""
        return ()

    def keep_again(self, newest: tuple[torch.Tensor, ...]) -> None:
        """Go back to `newest_kept`; what was kept of the blocks before them is there still."""

    def stage_layer(self, layer: int) -> None:
        """Start copying a whole layer to the device; `kv` will wait for it."""

    def fetch(self, layers: Sequence[int], index: torch.Tensor, counts: torch.Tensor) -> None:
        """Start fetching a selection, index int32 [B, 1, K] and counts [B], for the sparse layers
        of one group.
        """

    def wait_fetched(self, layers: Sequence[int]) -> None:
        """Make the current stream wait for the last `fetch` of a group. Its index tensors may be
        written again afterwards.
        """

    def forget(self, layer: int, n: int) -> None:
        """Note that a layer's rows of positions below n are read no more: an evicting method that
        forgets has its own copies of those that it keeps. A bank of all rows keeps them.
        """

    def keep_heap(self) -> None:
        """Give back what lies free in the heap where it is too much beside rows that wait."""

    def read_from(self, source: Bank) -> None:
        """Read another bank's rows until `settle`: a session changes over to a method that forgets,
        which makes its store of them. A bank that has rows of its own does nothing.
        """

    def settle(self, first: int, length: int) -> None:
        """Copy what no store has taken of the source, positions first .. length-1, and let go of
        it.
        """

    # ---------------------------------------------------------------- going back, copies, end

    @abstractmethod
    def rewind(self, n: int, broken: bool = False) -> None:
        """Drop positions n and beyond. broken: a chunk or step was interrupted somewhere."""

    @abstractmethod
    def copy_from(self, other: Bank, length: int) -> None:
        """Take over the first `length` tokens of another bank of the same model (fork)."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""


class Attends(Protocol):
    """The interface of a runtime (or of a MassMeter around one) to a decode step."""

    @property
    def by_part(self) -> Sequence[Attends]:
        """Those of a model's parts, each on its device; (): it is one."""
        ...

    def carry(self, part: int) -> None:
        """Bring to a part what earlier ones have chosen for its layers in this step."""
        ...

    def received(self, step: Step) -> None:
        """Begin a part's step with what it has received."""
        ...

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [B, Q, H, D], rotated, in one layer -> [B, Q, H, D]."""
        ...

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """As `attend`, in a sliding-window layer."""
        ...


@runtime_checkable
class Foresees(Protocol):
    """What a decode step asks of a runtime that chooses one layer ahead."""

    @property
    def ahead(self) -> tuple[int, ...]:
        """Layers whose queries it wants a layer before."""
        ...

    def foresee(self, layer: int, q: torch.Tensor, step: Step) -> None:
        """Take the queries [B, Q, H, D] that the input of the layer before makes of `layer`."""
        ...


class Facts(Protocol):
    """What `Reads` says of its session."""

    @property
    def scratch(self) -> Scratch:
        """Buffers of the kernels."""
        ...


@runtime_checkable
class Reads(Protocol):
    """What a decode step asks of a runtime whose `attend` a call of C++ may stand for."""

    @property
    def setup(self) -> Facts:
        """Facts of the session."""
        ...

    @property
    def scale(self) -> float:
        """Of logits."""
        ...

    @property
    def softmax(self) -> Sequence[Softmax]:
        """Of every layer."""
        ...

    def chained(self, layer: int) -> Reading | None:
        """What `attend` of one query (`attend_local` in a sliding-window layer) does, for as long
        as the runtime lives; None: more than a Reading says.
        """
        ...

    def chained_at(self, n: int) -> tuple[int, int]:
        """Where some layers choose: (where the tail of n tokens begins, how many of those before it
        are chosen).
        """
        ...


class AttendsPrompt(Protocol):
    """What a chunk of a prompt asks of a runtime."""

    @property
    def by_part(self) -> Sequence[AttendsPrompt]:
        """Those of a model's parts, each on its device; (): it is one."""
        ...

    @property
    def needs(self) -> Needs:
        """What the runtime wants of the engine."""
        ...

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Attention of q [B, C, H, D], rotated, at positions from `start` on -> [B, C, H, D]."""
        ...

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether `attend_prompt` attends to everything in every layer and keeps nothing of it."""
        ...

    def attend_opened(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, opened: Opened
    ) -> torch.Tensor:
        """As `attend_prompt` where `reads_whole_prompts`, q meeting what `opened` makes of rows."""
        ...

    def attend_prompt_local(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, stop: int
    ) -> torch.Tensor:
        """As `attend_prompt`, in a sliding-window layer of a chunk that ends at `stop`."""
        ...


@dataclass
class Step:
    """The inputs that all layers of one step share, computed once from the lengths on the device.

    positions int64 [B, Q]. visible int32 [B]: rows that the last query sees, its own included.
    bucket: rows of the bank that this step's kernels may look at. tokens int64 [B, n]: the newest
    ids, those of the step; at a prompt's end all, where the method asks for them (Needs.ids).
    parts: the same step as each part of a model sees it, on its device.
    """

    positions: torch.Tensor
    visible: torch.Tensor
    bank: Bank
    bucket: int
    query_ring: QueryRing
    rotary: Rotary
    tokens: torch.Tensor | None = None
    parts: tuple[Step, ...] = ()
    _shared: dict[str, Any] = field(default_factory=dict)
    _tails: dict[int, torch.Tensor] = field(default_factory=dict)
    _rings: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    _seen: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    _windows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )

    @property
    def lengths(self) -> list[int]:
        """`visible` on the host, asked for once and not in each layer."""
        return self.once("lengths", self.visible.tolist)

    def once(self, name: str, made: Callable[[], T]) -> T:
        """What layers of the step share, made by the first that asks."""
        if name not in self._shared:
            self._shared[name] = made()
        return self._shared[name]

    def tail_start(self, tail: int) -> torch.Tensor:
        """First tail position per sequence, int32 [B], for the first of the step's queries."""
        if tail not in self._tails:
            self._tails[tail] = tail_start(self.visible - (self.positions.shape[1] - 1), tail)
        return self._tails[tail]

    def tail_in_ring(
        self, tail_start: torch.Tensor, first: int, ring: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(first row, one past the last) int32 [B] of the tail from position tail_start [B] on, in
        a working set whose ring of `ring` rows begins at row `first`. Computed once per step: the
        groups' working sets are alike.
        """
        known = self._rings.get((first, ring))
        if known is None or known[0] is not tail_start:
            at = tail_start % ring + first
            known = tail_start, at, at + (self.visible - tail_start)
            self._rings[first, ring] = known
        return known[1], known[2]

    def in_window(self, window: int, size: int, query: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(first row, one past the last) int32 [B] of the window that the step's query number
        `query` sees in a ring of `size` rows. Computed once per step: layers are alike.
        """
        known = window, size, query
        if known not in self._seen:
            stop = self.visible - (self.positions.shape[1] - 1 - query)
            start = (stop - window).clamp_(min=0)
            at = start % size
            self._seen[known] = at, at + (stop - start)
        return self._seen[known]

    def window_queries(self, layer: int, window: int) -> torch.Tensor:
        """The last `window` queries of a layer, each rotated to its position: [B, W, H, D].
        Undefined before position 0.
        """
        known = window, self.rotary.rope_of(layer)
        if known not in self._windows:
            offsets = torch.arange(1 - window, 1, device=self.positions.device)
            positions = (self.positions[:, -1:] + offsets).clamp_(min=0)
            self._windows[known] = positions, *self.rotary.at(positions, layer=layer)
        positions, cos, sin = self._windows[known]
        return apply_rope(self.query_ring.read(layer, positions), cos, sin)
