"""InfLLM: a stream of pieces; each sees the first tokens, a local window, and the blocks of the
past that its mean query is nearest to.

Source: InfLLM (Xiao et al., NeurIPS 2024), section 3, and thunlp/InfLLM (context_manager.py).
Published defaults (llama-3-inf-llm.yaml): blocks of 128, 128 initial tokens, a window of 4096, 16
blocks, 4 representatives, 32 cached, pieces of 512. A block's representatives are, per query head,
the tokens that received most attention while they were in the window; blocks are ranked by the sum
over all query heads of mean query times mean representative, so all heads share one choice. What is
not local sits at RoPE distance `local` (the published code's table begins at 1 and gives local -
1): K before rotation, queries turned to `local`. Prompts and answers are read the same way, so a
session's text must be read under this method from its first token. Pieces end at absolute multiples
of `chunk` and at the end of a chunk of the prefill; a step is a piece of one token. Of a layer in
host memory the device has the first tokens, the `cached` blocks that were read last, and the
remainder with the window, as published. With a number of `blocks` a session keeps so many of each
layer and no row of the others (engine/bank/block_bank.py); a stream without end (`forever`) does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.requirements import require_one_rope
from engine.methods.select.infllm_memory import BlockMemory, Layout, attend_far_and_near
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary, apply_rope
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import BlockCache, Needs
from kernels.kept.far import attend_far, meets_far
from kernels.kept.stream import BINDING, BoundStream, Place, Sizes
from kernels.native.kinds import FLOATS
from kernels.prefill.dense import prefill_dense
from kernels.rows.forms import as_bytes, key_floats

STREAM_BLOCKS = 512  # that a stream without end keeps where nobody says how many


@dataclass(frozen=True)
class InfLLM(Method):
    """block: tokens of a block. init: first tokens, always seen. local: window of a query, itself
    included. topk: blocks that a piece reads. representatives: tokens that stand for a block.
    cached: blocks of a layer in host memory that are on the device. chunk: queries of a piece.
    blocks: those of a layer that are kept, beyond which the one that was read longest ago is
    forgotten; None: all.
    """

    block: int = 128
    init: int = 128
    local: int = 4096
    topk: int = 16
    representatives: int = 4
    cached: int = 32
    chunk: int = 512
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block", 1, None),
            ("init", 0, None),
            ("local", 1, None),
            ("topk", 1, None),
            ("chunk", 1, None),
            ("representatives", 1, self.block),
            ("cached", self.topk, None),
        ):
            integer(name, getattr(self, name), least, most)
        if self.chunk > self.local:
            raise SettingError(
                f"local: found {self.local}, expected at least infllm's chunk of {self.chunk} "
                "queries that are read together; give it a smaller chunk too "
                f"(--set chunk={self.local})"
            )
        if self.blocks is not None:
            integer("blocks", self.blocks, self.topk)

    @property
    def cannot_draft(self) -> str:
        return "it must read the prompt its own way"

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Every layer SPARSE. K is turned back to position 0, which a rotation that depends on the
        length does not allow.
        """
        require_one_rope(self, config)
        if self.blocks is not None and len(config.keeping_layers) < config.num_layers:
            raise SettingError(
                f"blocks: found {self.blocks} for layers that read the rows of others "
                f"({config.family}), where each forgets other ones; leave it out"
            )
        return single_layer_groups(config.num_layers, range(config.num_layers))

    def bounds_distances(self, plan: LayerPlan, positions: int, length: int) -> bool:
        """What is outside the window is seen at its distance."""
        return self.local <= positions

    def streamed(self, config: ModelConfig) -> Method:
        """A number of blocks, and nothing else but first tokens, remainder and window."""
        return replace(self, blocks=STREAM_BLOCKS) if self.blocks is None else self

    def gone(self, length: int, held: int = 0) -> int:
        """Those of whole blocks, as many in each layer."""
        blocks = Layout.at(self, length).blocks
        return 0 if self.blocks is None else self.block * max(0, blocks - self.blocks)

    def forgotten(self, length: int) -> str:
        if not self.gone(length):
            return ""
        return (
            f"from here on every layer forgets the block of {self.block:,} tokens that it read "
            f"longest ago; {self.blocks:,} blocks are held beside the first {self.init:,} tokens "
            f"and the newest {self.local:,}"
        )

    def validate_switch(self, length: int) -> None:
        """A bank that another method has read holds neither this one's hidden states nor its
        scores.
        """
        if length:
            raise SettingError(
                f"infllm: reads a text its own way from the first token, found a session of "
                f"{length} tokens read otherwise; start a new session"
            )

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Device bytes: scores of the window, twice, and one mean key per block and query head. Of
        a layer in host memory the ring keeps the window and what is in no block yet.
        """
        slots, count = BlockMemory.sizes(self, capacity)
        heads = config.num_layers * config.num_heads
        seen = self.init + self.local + (self.topk + 1) * self.block + self.chunk
        needs = Needs(
            selected=min(capacity, seen),  # the most that one query sees
            device_bytes=heads * (8 * slots + count * config.head_dim * itemsize),
            every_query=slots > 0,  # every query's attention counts for the representatives
            tail=self.local + self.block,
            offload=plan.each_layer,
            prompt_rows=min(capacity, self.local + self.block),
            step_rows=self.init + self.topk * self.block,
            cache=self.cache(capacity),
            final_call=None,  # pieces end where a call ends
            history="rerun",  # what tokens have received cannot be taken back
        )
        if self.blocks is None:
            return needs
        table, newest = 16 * config.num_layers * count, self.local + self.block
        rows = config.num_layers * newest * config.kv_bytes(itemsize)
        return replace(
            needs,
            device_bytes=needs.device_bytes + table,
            forgets=True,
            kept=BlockCache(self.init, self.block, count, self.topk),
            retained=min(capacity, self.init + count * self.block + newest),
            point_bytes=heads * 4 * slots + table + rows + 8,  # and the length
        )

    def cache(self, capacity: int) -> BlockCache | None:
        """What the device keeps of a layer in host memory; None where a window holds everything."""
        if capacity <= self.local:
            return None
        blocks = max(1, BlockMemory.sizes(self, capacity)[1])
        held = min(self.cached, blocks)
        return BlockCache(self.init, self.block, held, min(self.topk, held))

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The first tokens, once; for every piece the blocks that it reads, and each once where the
        cache holds all. The window stays on the device.
        """
        if first is not None and stop > self.local:
            return 0  # its output is known
        pieces = range(begin // self.chunk, (stop - 1) // self.chunk + 1)
        blocks = [Layout.at(self, max(begin, i * self.chunk)).blocks for i in pieces]
        read = sum(min(self.topk, count) for count in blocks)
        if self.blocks is None and blocks[-1] <= self.cached:
            read = min(read, blocks[-1])
        fresh = min(self.init, stop) if begin < self.init + self.local + self.chunk else 0
        return fresh + read * self.block

    def runtime(self, setup: Setup) -> Runtime:
        return InfLLMRuntime(self, setup)


class Near(NamedTuple):
    """K and V [Hkv, T, D] of positions low .. low + T - 1 of a layer."""

    low: int
    k: torch.Tensor
    v: torch.Tensor

    def rows(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of positions first .. stop-1: views."""
        part = slice(first - self.low, stop - self.low)
        return self.k[:, part], self.v[:, part]


Turns = tuple[torch.Tensor, torch.Tensor]  # cos and sin float32 [C, R / 2]


class InfLLMRuntime(Runtime):
    """Attention in plain torch, one K/V head's weights at a time: 4 x group x chunk x (what a piece
    sees) bytes. The choice of blocks stays on the device. No CUDA graph: shapes vary with the text.
    """

    method: InfLLM

    def __init__(self, method: InfLLM, setup: Setup):
        super().__init__(method, setup)
        self.memory, self.rotary = BlockMemory(method, setup), Rotary(setup.config, setup.device)
        self.freq = self.rotary.frequencies()
        # layer -> (first position, last position + 1, blocks int64) of sequence 0's newest piece
        self.read: dict[int, tuple[int, int, torch.Tensor]] = {}
        # (first position, last position + 1, turns to the local distance) of the newest piece: all
        # layers have the same; None between chunks and steps
        self._turns: tuple[int, int, Turns] | None = None
        # (first position, last position + 1, the positions beside the chosen blocks') alike
        self._ends: tuple[int, int, tuple[torch.Tensor, ...]] | None = None
        # (layer, stop, output of the last query) of the chunk under way
        self._newest: tuple[int, int, torch.Tensor] | None = None
        self._bound: dict[int, BoundStream] = {}  # by layer
        # whether a layer's step may run in one call
        self._binds = setup.batch == 1 and self.memory.slots > 0 and method.blocks is None

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def k(self) -> int:
        return self.needs.selected

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Drop what is left of an interrupted chunk."""
        self._newest = None

    def chunk_stop(self, first: int, stop: int) -> int:
        """Where blocks are forgotten no more form than there are empty places."""
        if (kept := self.memory.kept) is None or kept.most >= kept.count:
            return stop
        return min(stop, first + (kept.count - kept.most) * self.method.block)

    def commit(self, count: int) -> None:
        self.memory.commit()
        self._newest = self._turns = self._ends = None

    def state(self) -> Any:
        return self.memory.state()

    def savepoint(self) -> Any:
        """With the newest rows, where the bank does not keep them."""
        state, kept = self.memory.state(), self.memory.kept
        if kept is None or self.bank is None:
            return state
        return *state, self.bank.newest_kept(max(stop for stop, _ in state[1]))

    def load(self, state: Any, length: int | None) -> None:
        if self.memory.kept is not None and len(state) > 3:
            *state, newest = state
            assert self.bank is not None
            self.bank.keep_again(newest)
        self.memory.load(state)

    def loadable(self, state: Any) -> bool:
        return self.memory.holds(state)

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        formed = 0 if other.memory.kept is None else other.memory.kept.formed
        self.memory.load(other.memory.state(), sequence, formed)
        self.memory.means[:, sequence] = other.memory.means[:, 0]

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A chunk, piece by piece. The last layer comes twice, with all queries and with the newest
        alone, which counts once.
        """
        stop = start + q.shape[1]
        if q.shape[1] == 1 and self._newest is not None and self._newest[:2] == (layer, stop):
            if stop > self.method.local:
                return self._newest[2]
            return super().attend_prompt(layer, q, bank, start)
        out = self._pieces(layer, q, bank, [start] * len(q), bank.on_host(layer))
        bank.keep_newest(layer, start, stop)
        self._newest = layer, stop, out[:, -1:]
        return out

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        if self._binds and q.shape[1] == 1:
            found = self._attend_in_one_call(layer, q, step)
            if found is not None:
                return found
        return self._pieces(layer, q, step.bank, step.positions[:, 0].tolist(), False)

    def _attend_in_one_call(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor | None:
        """`attend` of a piece of one token; None where this step or this machine is not for it."""
        place = step.once("infllm in one call", lambda: self._place(step))
        memory, bank = self.memory, step.bank
        attended, formed = memory.known[layer][0]
        if place is None or formed < place.blocks or bank.on_host(layer):
            return None
        k, v = bank.kv(layer)
        bound, stop = self._bound.get(layer), place.start + 1
        if bound is None or not bound.of(k, v):
            own = k.dtype == v.dtype and q.dtype in FLOATS and BINDING.usable()
            if not meets_far(self.setup.backend, k) or not own:
                self._binds = False
                return None
            method = self.method
            sizes = Sizes(method.init, method.local, method.block, method.topk)
            given = memory.means[layer, 0], memory.scores[:, layer, 0], self.freq, sizes
            bound = self._bound[layer] = BoundStream(q, k, v, *given, self.scale)
        out, blocks = bound.run(q, place, memory.half[layer], attended)
        memory.collected(layer, stop)
        if Layout.at(self.method, stop).blocks > formed:
            near = self._near(layer, 0, bank, place.start, stop, False)
            self._form(layer, 0, bank, near, stop)
        self.read[layer] = place.start, stop, blocks
        return out

    def _place(self, step: Step) -> Place | None:
        """Where a step of one token stands; None where it sees nothing but its window."""
        start, local = step.lengths[0] - 1, self.method.local
        if start < local or step.bank.forgets:
            return None
        layout = Layout.at(self.method, start)
        by = torch.tensor([local - start])
        cos, sin = (turn[0] for turn in self.rotary.turns_by(by))
        return Place(start, layout.initial, layout.blocks, layout.rest, cos, sin)

    def _pieces(
        self, layer: int, q: torch.Tensor, bank: Bank, starts: list[int], offloaded: bool
    ) -> torch.Tensor:
        """offloaded: a prompt's chunk, whose own rows are not where the older ones are."""
        out, size = torch.empty_like(q), self.method.chunk
        self.memory.open(layer)
        for b, start in enumerate(starts):
            stop = start + q.shape[1]
            near = self._near(layer, b, bank, start, stop, offloaded)
            for first in [start, *range((start // size + 1) * size, stop, size)]:
                last = min(stop, (first // size + 1) * size)
                part = slice(first - start, last - start)
                out[b, part] = self._piece(layer, b, q[b, part], bank, first, near)
        return out

    def _near(self, layer: int, b: int, bank: Bank, start: int, stop: int, offloaded: bool) -> Near:
        """What is near to positions start .. stop-1: their windows, and what is in no block yet. Of
        an offloaded chunk the past is in the ring, and its own rows are taken from where they were
        made.
        """
        low = min(Layout.at(self.method, start).rest, max(0, start - self.method.local + 1))
        if not offloaded:
            k, v = bank.rows(layer, low, stop)
            return Near(low, k[b], v[b])
        parts = [bank.rows(layer, low, start)] if low < start else []
        parts.append(bank.newest_rows(layer, start, stop))
        k, v = (torch.cat([as_bytes(t[b]) for t in side], 1) for side in zip(*parts))
        return Near(low, k.view(bank.dtype), v.view(bank.dtype))

    def _piece(
        self, layer: int, b: int, q: torch.Tensor, bank: Bank, start: int, near: Near
    ) -> torch.Tensor:
        """One piece q [C, H, D] at positions start .. start+C-1: attention, then what its window
        received, then the blocks that form.
        """
        local, stop, memory = self.method.local, start + len(q), self.memory

        self._form(layer, b, bank, near, start)
        layout = Layout.at(self.method, start)
        distant = self._distant(q, start)
        mean = distant[0] if len(q) == 1 else distant.mean(0)
        places, first = memory.rank(layer, b, mean, layout), max(0, start - local + 1)
        blocks = memory.reads(layer, b, places, start)
        far = self._far_rows(start, stop, blocks)
        k, v = near.rows(first, stop)
        if len(q) == 1 and meets_far(self.setup.backend, k):
            # rows that came over, or places, which are in no order
            if bank.on_host(layer) or bank.forgets:
                where, rows = self._far(layer, b, bank, layout, places, near, stop), None
            else:  # far rows stay where they are: to copy them cost more than to read them
                k_all, v_all = bank.rows(layer, 0, stop)
                where, rows = (k_all[b], v_all[b]), far
            given = *where, far, self.freq, k, v, self.scale, rows
            out, received = attend_far(q[0], distant[0], *given)
            out = out[None]
        else:
            far_k, far_v = self._far(layer, b, bank, layout, places, near, stop)
            positions = torch.arange(start, stop, device=q.device)
            turned = self.rotary.rotate_by(key_floats(far_k).transpose(0, 1), -far).transpose(0, 1)
            out, received = attend_far_and_near(
                q, distant, turned, far_v, k, v, far, first, positions, local, self.scale
            )
        memory.collect(layer, b, first, start, stop, received)
        self._form(layer, b, bank, near, stop)
        if b == 0:
            self.read[layer] = start, stop, blocks
        if stop <= local:  # only the window: the dense launcher, to the bit
            k, v = near.rows(0, stop)
            return prefill_dense(
                q[None], k[None], v[None], start, self.scale, backend=self.setup.backend
            )[0]
        return out.to(q.dtype)

    def _form(self, layer: int, b: int, bank: Bank, near: Near, length: int) -> None:
        """Form the blocks that are whole at a length."""

        def plain_keys(first: int, last: int) -> torch.Tensor:
            there = first >= near.low
            k = near.rows(first, last)[0] if there else bank.rows(layer, first, last)[0][b]
            return self.rotary.rotate_by(
                key_floats(k).transpose(0, 1), -torch.arange(first, last, device=k.device)
            ).transpose(0, 1)

        def keep(first: int, place: torch.Tensor) -> None:
            bank.keep_block(layer, b, first, place)

        self.memory.form(layer, b, length, plain_keys, keep)

    def _distant(self, q: torch.Tensor, start: int) -> torch.Tensor:
        """Queries [C, H, D] at start .. start+C-1 turned to the local distance, float32."""
        stop = start + len(q)
        if self._turns is None or self._turns[:2] != (start, stop):
            by = self.method.local - torch.arange(start, stop, device=q.device)
            self._turns = start, stop, self.rotary.turns_by(by)
        return apply_rope(q.float(), *self._turns[2])

    def _far(
        self,
        layer: int,
        b: int,
        bank: Bank,
        layout: Layout,
        places: torch.Tensor,
        near: Near,
        stop: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [Hkv, n, D] of `_far_rows`: first tokens and blocks as the bank has them, the
        remainder from `near`.
        """
        rest = near.rows(layout.rest, max(layout.rest, stop - self.method.local))
        if self.needs.cache is None:
            return rest
        kept = bank.block_rows(layer, layout.initial, places, layout.rest, self.needs.cache)
        parts = ((as_bytes(old[b]), as_bytes(new)) for old, new in zip(kept, rest))
        k, v = (torch.cat(part, 1).view(bank.dtype) for part in parts)
        return k, v

    def _far_rows(self, start: int, stop: int, blocks: torch.Tensor) -> torch.Tensor:
        """Positions that some query of a piece sees outside its window: initial ones, the chosen
        blocks', the remainder's; ascending int64.
        """
        size = self.method.block
        if self._ends is None or self._ends[:2] != (start, stop):
            layout, edge = Layout.at(self.method, start), stop - self.method.local
            spans = (0, layout.initial), (0, size), (layout.rest, max(layout.rest, edge))
            made = (torch.arange(*span, device=self.setup.device) for span in spans)
            self._ends = start, stop, tuple(made)
        initial, inside, rest = self._ends[2]
        chosen = self.method.init + size * blocks
        return torch.cat([initial, (chosen.unsqueeze(1) + inside).flatten(), rest])

    def tail_start(self, step: Step) -> torch.Tensor:
        """The window."""
        return (step.visible - self.method.local).clamp(min=0)

    def chosen_rows(self, layer: int) -> torch.Tensor:
        none = torch.zeros(0, dtype=torch.int64, device=self.setup.device)
        return self._far_rows(*self.read.get(layer, (0, 0, none))).sort().values

    def selections(self) -> dict[int, torch.Tensor]:
        return {layer: self.chosen_rows(layer).cpu() for layer in self.read}

    def choice(self) -> Any:
        return dict(self.read)

    def load_choice(self, choice: Any) -> None:
        self.read = choice

    def rows_read(self, n: int) -> list[int]:
        """Initial tokens, chosen blocks, remainder and window, the same in every layer."""
        layout, method = Layout.at(self.method, n - 1), self.method
        blocks = min(layout.blocks, method.topk) * method.block
        old = layout.initial + blocks + max(0, n - method.local - layout.rest)
        return [old + min(n, method.local)] * self.setup.config.num_layers

    def choosing_bytes(self, n: int) -> int:
        """The mean key of every block and query head, where there are more blocks than are read."""
        blocks, config = Layout.at(self.method, n - 1).blocks, self.setup.config
        size = config.num_heads * config.head_dim * self.memory.means.element_size()
        return config.num_layers * blocks * size if blocks > self.method.topk else 0
