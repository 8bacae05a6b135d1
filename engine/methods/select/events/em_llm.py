"""EM-LLM: a text is cut into events where a token surprises the model; a step reads the events that
its query likes best, and their neighbours in the text.

Source: Fountas et al., EM-LLM, ICLR 2025 (2407.09450), sections 3.1 to 3.4, by its abstract, as
others quote it, and by its published settings (README of em-llm/EM-LLM-model): 128 first tokens, a
window of 4,096, 2,048 tokens of events, 30% of them for neighbours, events of 8 to 128 tokens that
begin where -log p exceeds mean + 1 standard deviation, 4 tokens that stand for an event. A boundary
may be moved back to where it parts the similarity of keys better (`refine`). Nothing is evicted.

Differs. A prompt is read by full attention, and each step of the answer chooses (there each piece
of 512 tokens of prompts too), at the tokens' true positions (there all that is not local sits at
one distance, as InfLLM's). Which tokens stand for an event is said by the same graph of keys that
moves boundaries, the tokens most like all of the event (there those that received most attention,
which a dense prompt does not leave), per K/V head. Every layer moves boundaries and chooses for
itself, one list for all its heads; boundaries are moved each on its own, between those that
surprise has set (there one after another). The window of surprises, 128 tokens, is a setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import found, integer, is_number, one_of
from engine.base.errors import SettingError
from engine.methods.base import Logits, Runtime, Setup
from engine.methods.select.base import Budgeted, Buffer, Selection
from engine.methods.select.events.boundaries import Boundaries
from engine.methods.select.events.refine import MEASURES, refined, representatives
from engine.methods.select.events.retrieve import listed, retrieved
from engine.methods.select.events.surprise import logits_bytes, surprises
from engine.methods.select.index.base import AT_ONCE, whole_blocks
from engine.methods.select.varying.counted import CountedRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from kernels.attention.sparse import decode_sparse
from kernels.rows.forms import as_bytes, key_floats


@dataclass(frozen=True)
class EMLLM(Budgeted):
    """Budget as Budgeted's, the first tokens included; the window is read beside it. sink: first
    tokens, always read. local: newest tokens, always read. gamma: standard deviations above the
    mean of the `window` tokens before at which a token surprises; infinite: none does. least,
    most: tokens of an event. representatives: tokens that stand for one. refine: "modularity" |
    "conductance" | "none". contiguity: part of the budget for neighbours; reach: events to either
    side of a chosen one that are. dense_layers: first layers that read everything.
    """

    full_prompts = True

    sink: int = 128
    local: int = 4096
    gamma: float = 1.0
    window: int = 128
    least: int = 8
    most: int = 128
    representatives: int = 4
    refine: str = "modularity"
    contiguity: float = 0.3
    reach: int = 1
    dense_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (
            ("sink", 0, None),
            ("window", 2, None),
            ("least", 1, None),
            ("most", self.least, None),
            ("representatives", 1, self.least),
            ("reach", 1, None),
            ("dense_layers", 0, None),
        ):
            integer(name, getattr(self, name), low, high)
        if not is_number(self.gamma) or math.isnan(self.gamma):
            raise SettingError(f"gamma: found {found(self.gamma)}, expected a number")
        if not is_number(self.contiguity) or not 0 <= self.contiguity < 1:
            raise SettingError(
                f"contiguity: found {found(self.contiguity)}, expected a number from 0 to below 1"
            )
        one_of("refine", self.refine, MEASURES)
        integer("local", self.local, 1)
        if self.local < 2 * self.most:
            raise SettingError(
                f"local: found {self.local}, expected at least {2 * self.most}, two of the largest "
                f"events (most={self.most}): what leaves the window must have its event's end"
            )

    @property
    def name(self) -> str:
        return "em_llm"

    @property
    def cannot_draft(self) -> str:
        return "its events form by what surprises, and nobody tells a draft of that"

    def budget(self, length: int) -> int:
        """The first tokens and one event at least."""
        return max(self.sink + math.ceil(self.most / (1 - self.contiguity)), super().budget(length))

    def room(self, budget: int) -> tuple[int, int]:
        """Tokens of a budget for the events that a query likes best, and for neighbours."""
        near = math.floor(self.contiguity * (budget - self.sink))
        return budget - self.sink - near, near

    def boundaries(self) -> Boundaries:
        """Of a text that has no token yet."""
        return Boundaries(self.sink, self.window, self.gamma, self.least, self.most)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself."""
        layers = config.num_layers
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(layers, range(self.dense_layers, layers), *others)

    def validate_switch(self, length: int) -> None:
        """A bank that another method has read does not say what surprised."""
        if length:
            raise SettingError(
                f"em_llm: makes events of what surprises while a text is read, found a session of "
                f"{length} tokens that another method has read; start a new session"
            )

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Where each layer's events begin, what stands for them, when they entered the queue, the
        chosen tokens, and the newest token's logits.
        """
        layers, heads = len(plan.sparse_layers), config.num_kv_heads
        events = max(0, capacity - self.sink) // self.least
        most = min(capacity, self.budget(capacity))
        return {
            "bounds": Buffer((layers, batch, events + 1), torch.int32),
            "keys": Buffer((layers, batch, events, heads, config.head_dim)),
            "queue": Buffer((layers, batch, events), torch.int64),
            "index": Buffer((layers, batch, 1, most), torch.int32),
            "behind": Buffer((config.vocab_size,), torch.float32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """A step has one list for all heads of a layer."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(
            needs,
            whole_layer=False,
            step_rows=needs.selected,
            tail=whole_blocks(self.local),
            sliding=True,
            outputs=True,
            history="rerun",  # a queue, and surprises, which rows do not say
            rebuilt=True,
        )

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        return logits_bytes(config.vocab_size, chunk)

    def again(self, count: int) -> int:
        """The most rows of a layer in host memory that become events in a chunk of `count`."""
        return count + 3 * self.most

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The past, and what of it becomes events."""
        return begin + min(begin, self.again(stop - begin))

    def runtime(self, setup: Setup) -> Runtime:
        return EMLLMRuntime(self, setup)


class EMLLMRuntime(CountedRuntime):
    """Buffers: bounds int32 [layers, B, E + 1], of each event where it begins; keys [layers, B, E,
    Hkv, D], the mean of those that stand for it; queue int64 [layers, B, E] (retrieve.py); index
    int32 [layers, B, 1, K]; behind float32 [vocab]. What becomes an event is committed, so that an
    interrupted step leaves nothing wrong. No CUDA graph: the host knows how many events there are.
    """

    method: EMLLM
    bounds: torch.Tensor
    keys: torch.Tensor
    queue: torch.Tensor
    index: torch.Tensor
    behind: torch.Tensor

    def __init__(self, method: EMLLM, setup: Setup):
        super().__init__(method, setup)
        self.texts = [method.boundaries() for _ in range(setup.batch)]
        self.made = [[0] * setup.batch for _ in self.plan.groups]  # events in the index
        self.bounds[:, :, 0] = method.sink
        self.queue.zero_()
        self.turn = 0  # steps since the prompt's end
        self.reading = False
        self.has_behind = False
        # of the chunk or step under way: its surprises, the logits behind it, {group: queue}
        self._told: torch.Tensor | None = None
        self._next: torch.Tensor | None = None
        self._queues: dict[int, torch.Tensor] = {}

    # ---------------------------------------------------------------- surprise

    def hear(self, ids: Sequence[int], logits: Logits) -> None:
        behind = self.behind if self.has_behind else None
        given = ids, logits, behind, self.setup.config.vocab_size, self.setup.device
        self._told, self._next = surprises(*given)

    def commit(self, count: int) -> None:
        """Of a step that nobody tells of nothing is known until the next one, which pads."""
        if self._told is not None:
            self.texts[0].add(self._told.tolist())
        self.has_behind = self._next is not None
        if self._next is not None:
            self.behind.copy_(self._next)
        for group, queue in self._queues.items():
            self.queue[group, :, : queue.shape[1]] = queue
        self.turn += not self.reading
        self._told, self._next, self._queues = None, None, {}

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Drop what is left of an interrupted chunk."""
        self._told, self._next, self._queues, self.reading = None, None, {}, True

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """An answer begins with an empty queue."""
        super().end_prompt(length, step)
        self.reading, self.turn = False, 0
        self.queue.zero_()

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Full attention. Of a layer in host memory the rows that the chunks before have made whole
        events come over once more, as far as `EMLLM.again` says; the first step has the others.
        """
        group = self.plan.group_of[layer]
        if group is not None and bank.on_host(layer):
            text = self.texts[0]
            if text.known == start:
                self.learn(group, layer, bank, 0, self.method.again(q.shape[1]))
        return super().attend_prompt(layer, q, bank, start)

    @property
    def reads_whole_prompts(self) -> bool:
        """The events may as well be made by the first step."""
        return True

    # ---------------------------------------------------------------- events

    def learn(self, group: int, layer: int, bank: Bank, b: int, room: int | None = None) -> None:
        """Make the events of a sequence that are whole and not there yet, of at most `room` rows of
        the bank.
        """
        text = self.texts[b]
        while (first := self.made[group][b]) < text.whole:
            low, size = text.starts[max(0, first - 1)], AT_ONCE if room is None else room
            stop = first
            while stop < text.whole and text.starts[stop + 2] - low <= size:
                stop += 1
            if stop == first and room is not None:
                return
            stop = max(stop, first + 1)
            high = text.starts[stop + 1]
            k = bank.rows(layer, low, high)[0][b]
            self._absorb(group, b, first, stop, low, k)
            room = None if room is None else room - (high - low)

    def _absorb(self, group: int, b: int, first: int, stop: int, low: int, k: torch.Tensor) -> None:
        """Put events first .. stop-1 into the index. k [Hkv, n, width]: rows from `low` on."""
        method, bounds = self.method, self.bounds[group, b]
        keys = key_floats(k).double()
        sums = torch.nn.functional.pad(keys.cumsum(1), (0, 0, 1, 0))
        starts = [at - low for at in self.texts[b].starts[first : stop + 2]]
        moved = refined(sums, starts, method.least, method.most, method.refine)
        bounds[first + 1 : stop + 1] = moved + low
        own = bounds[first : stop + 1].long() - low
        self.keys[group, b, first:stop] = representatives(
            keys, sums, own, method.representatives
        ).to(self.keys.dtype)
        self.made[group][b] = stop

    # ---------------------------------------------------------------- a step

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], self.chose_at(step)
        assert group is not None, f"layer {layer} does not choose"
        tail = self.tail_start(step)
        for b, n in enumerate(lengths):
            self._pad(b, n - 1)
            self.learn(group, layer, step.bank, b)
        if max(map(self.choosable, lengths)) <= self.k:
            return Selection(None, None, tail)
        counts, queues = torch.empty_like(tail), self.queue[group].clone()
        for b in range(len(lengths)):
            counts[b] = self._choose(group, b, q[b, -1], tail[b], queues[b])
        self._queues[group] = queues
        return Selection(self.index[group], counts, tail)

    def _pad(self, b: int, length: int) -> None:
        """Tokens of which nobody has told do not surprise."""
        if (known := self.texts[b].known) < length:
            self.texts[b].add([0.0] * (length - known))

    def _choose(
        self, group: int, b: int, q: torch.Tensor, tail: torch.Tensor, queue: torch.Tensor
    ) -> torch.Tensor:
        """Write a sequence's list before `tail`, int32 [], and its new queue [E]; returns the
        list's length, int32 []. q [H, D]: all heads together like an event.
        """
        method, count = self.method, self.made[group][b]
        bounds = self.bounds[group, b, : count + 1].minimum(tail)
        sizes, first = bounds.diff(), bounds[:1]  # the first tokens are before every event
        heads = self.keys.shape[3]
        asked = q.float().view(heads, -1, q.shape[-1]).sum(1).flatten()
        scores = self.keys[group, b, :count].float().flatten(1) @ asked
        given = *method.room(self.k), method.reach, queue[:count], self.turn
        read, queue[:count] = retrieved(scores, sizes, *given)
        starts = torch.cat([torch.zeros_like(first), bounds[:-1]])
        taken = torch.cat([first, torch.where(read, sizes, 0)])
        return listed(starts, taken, self.index[group, b, 0])

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Of a layer in host memory the chosen rows come over; the window lies in the ring."""
        if not step.bank.on_host(layer):
            return super().attend_selection(layer, q, step, chosen)
        rows, n = step.bank.picked(layer, *chosen.rows(), step.visible, step), step.lengths[0]
        window = step.bank.rows(layer, self.choosable(n), n)
        k, v = (
            torch.cat([as_bytes(part), as_bytes(newest)], 2).view(part.dtype)
            for part, newest in zip((rows.k, rows.v), window)
        )
        first, last = (torch.full_like(rows.counts, part.shape[2]) for part in (rows.k, k))
        return decode_sparse(
            q,
            k,
            v,
            rows.index,
            rows.counts,
            first,
            last,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
        )

    def tail_start(self, step: Step) -> torch.Tensor:
        """The window."""
        return (step.visible - self.method.local).clamp(min=0)

    def choosable(self, n: int) -> int:
        """Tokens of n that compete for the budget."""
        return max(0, n - self.method.local)

    def beside(self, n: int) -> int:
        return min(n, self.method.local)

    def tokens_read(self, n: int) -> int:
        """At most."""
        return min(self.choosable(n), self.k) + self.beside(n)

    def choosing_bytes(self, n: int) -> int:
        """Where events begin, what stands for them, and the queue."""
        if self.choosable(n) <= self.k:
            return 0
        events = max(0, self.texts[0].events(n) - 2)
        heads, dim = self.keys.shape[3:]
        each = heads * dim * self.keys.element_size() + 4 + 8
        return len(self.plan.sparse_layers) * events * each

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """k, the steps since the prompt's end, the surprises float32 [n], the logits behind the
        newest token, and the queues [layers, E] of an answer that has begun.
        """
        told = torch.tensor(self.texts[0].told.tolist(), dtype=torch.float32)
        behind = self.behind.clone() if self.has_behind else None
        whole = self.texts[0].whole
        queue = self.queue[:, 0, :whole].clone() if self.turn else None
        return self.k, self.turn, told, behind, queue

    def load(self, state: Any, length: int | None) -> None:
        self.k, self.turn, told, behind, queue = state
        self.texts[0].reset(told.tolist())
        self._keep_whole()
        self.has_behind = behind is not None
        if behind is not None:
            self.behind.copy_(behind)
        self.queue.zero_()
        if queue is not None:
            self.queue[:, 0, : queue.shape[1]] = queue
        self._told, self._next, self._queues, self.reading = None, None, {}, False

    def _keep_whole(self) -> None:
        """Events that a text no longer has are made anew."""
        for made in self.made:
            for b, text in enumerate(self.texts):
                made[b] = min(made[b], text.whole)

    def restored(self, state: Any, length: int) -> Any:
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("state")
        k, turn, told, behind, queue = state
        counts = ((k, max(self.needs.selected, self.k)), (turn, length))
        if not all(type(count) is int and 0 <= count <= most for count, most in counts):
            raise ValueError("state")
        of_step = (behind, (self.setup.config.vocab_size,)), (told, (length,))
        for tensor, shape in of_step if behind is not None else of_step[1:]:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
                raise ValueError("state")
            if tensor.shape != shape:
                raise ValueError("state")
        if queue is None:
            return state
        if not isinstance(queue, torch.Tensor) or queue.dtype != torch.int64 or queue.ndim != 2:
            raise ValueError("queue")
        if len(queue) != len(self.queue) or queue.shape[1] > self.queue.shape[2]:
            raise ValueError("queue")
        return state

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for text in self.texts:
            if text.known > length:
                text.cut(length)
                self.has_behind = False
        self._keep_whole()
        self._told, self._next, self._queues = None, None, {}

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        """With the events, which rows alone do not say."""
        self.k, self.turn = other.k, other.turn
        self.texts[sequence].reset(other.texts[0].told)
        for mine, theirs in (
            (self.bounds, other.bounds), (self.keys, other.keys), (self.queue, other.queue)
        ):  # fmt: skip
            count = min(mine.shape[2], theirs.shape[2])
            mine[:, sequence, :count] = theirs[:, 0, :count]
        for made, theirs in zip(self.made, other.made):
            made[sequence] = theirs[0]
        if sequence == 0:
            self.has_behind = other.has_behind
            self.behind.copy_(other.behind)
