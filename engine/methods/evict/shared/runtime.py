"""Methods that give tokens up for good: a store per layer (engine/methods/evict/shared/store.py),
and attention that reads the store only.

A method writes its settings (an `Evicting`) and one hook, `EvictingRuntime.rank`.

The bank may live in host memory: answers read it while nothing is cut, and going back does. With
`forget` it holds no more than what the store has yet to take (engine/bank/chunk_bank.py).

Until the first cut everything is in the bank: a first prompt is read by full attention, or as the
method says. The cut makes the store; from then on the bank's older K and V are not read. A later
prompt's own tokens stay in the bank until that prefill ends and are attended to beside the store. A
chunk or step changes nothing before `commit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.ragged import Ragged, copied, joined
from engine.methods.evict.shared.saved_rows import checked_layers
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence, best
from engine.methods.evict.shared.windows import spread, window_positions, window_rows_bytes
from engine.model.rope import apply_rope
from kernels.attention.dense import decode_dense
from kernels.kept.step import kept_step, steps
from kernels.launch.softmax import Softmax
from kernels.native.own_pages import Joins
from kernels.prefill.dense import prefill_dense

Chooser = Callable[[Sequence, int, list[Part], Any], list[tuple[Part, torch.Tensor]]]


class EvictingRuntime(Runtime):
    """One session's stores. Prefill is for one sequence; decode steps take a ragged batch
    (`copy_from`), one sequence after the other. No CUDA graph: tokens are counted on the host.
    """

    method: Evicting
    # whether a savepoint has the number of a part's rows alone, where the store keeps those
    counts_kept = False

    def __init__(self, method: Evicting, setup: Setup):
        super().__init__(method, setup)
        self.heads = setup.config.num_kv_heads
        self.evicting = setup.plan.partial_layers  # the layers that see every token, ascending
        self.sequences = [Sequence() for _ in range(setup.batch)]
        self.reading = False  # whether a prompt is being read
        self.total: float = 0  # the length at which that prompt ends; infinite while it goes on
        self.bank: Bank | None = None
        # (sequence, layer, part number) -> scores of the chunk or step under way
        self.pending: dict[Any, Any] = {}
        self._in_one_call: bool | None = None  # asked in the first step
        self.joins = Joins()  # of a chunk under way: a store and the rows behind it

    # ---------------------------------------------------------------- what a method says

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """Score every token of a part [h, T], higher is kept longer; inf: always.

        step: the newest token's, at a prompt's end and where `trim` ranks after a step of the
        answer; None where the first step of an answer cuts.
        """
        raise NotImplementedError

    def layer_budgets(self, length: int, step: Step) -> list[int]:
        """Budget of each layer that evicts, ascending, at the end of a prompt of `length` tokens,
        before it is cut.
        """
        return self.method.budgets(self.plan, length)

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """[(part, index [h, n] of its tokens to keep)], by default those that rank best."""
        budget = sequence.budgets[layer]
        return [
            (part, best(self.rank(sequence, layer, part, step), part.positions, budget))
            for part in parts
        ]

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        start: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Attention of a chunk q [1, C, H', D] at positions from `start` on to k, v [h, T, D];
        query j sees rows < first + j + 1. softmax: a cap, and the sinks of these query heads.
        """
        given = self.scale, self.setup.backend
        return prefill_dense(q, k[None], v[None], first, *given, softmax=softmax)

    def attend_step(
        self,
        sequence: Sequence,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor | None,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Attention of one query [1, 1, H', D] at position `at` to k, v [h, T, D], its own last;
        positions [h, T], None: 0, 1, ... softmax as in `attend_rows`. Heads that hold different
        counts attend otherwise (engine/methods/evict/shared/ragged.py).
        """
        lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
        return decode_dense(
            q,
            k[None],
            v[None],
            lengths,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=softmax,
        )

    def attend_in_one_call(
        self,
        sequence: Sequence,
        layer: int,
        rows: Rows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """`attend_step` of what `rows` holds with the new token, whose k, v [h, 1, D] it puts there
        first (kernels/kept/step.py). A class that has its own `attend_step` has its own of this
        too, or puts and attends in two steps.
        """
        return kept_step(q, k, v, rows.store(), at, self.scale, softmax)[0]

    def in_one_call(self) -> bool:
        """Whether steps run by `attend_in_one_call`: C++ does here what `attend_step` says."""
        of_step = next(c for c in type(self).__mro__ if "attend_step" in vars(c))
        if "attend_in_one_call" not in vars(of_step):
            return False
        setup, config = self.setup, self.setup.config
        kinds = setup.dtype, config.row_dtype(setup.dtype), config.head_dim
        return steps(setup.backend, *kinds, setup.device.type)

    def softmax_of(self, layer: int, heads: slice) -> Softmax:
        """What is particular in a layer's softmax, of the query heads of a slice of K/V heads."""
        group = self.setup.config.group
        return self.softmax[layer].of_heads(slice(heads.start * group, heads.stop * group))

    def observe(
        self,
        b: int,
        layer: int,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        start: int,
    ) -> None:
        """Note that q [C, H', D] at positions from `start` on attended to k [h, T, D] of part
        `number` of sequence b.
        """

    def add_scores(self, b: int, sequence: Sequence, count: int) -> None:
        """Add the scores that a chunk or step of `count` tokens left pending; its tokens are not
        counted yet.
        """

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """A layer's store after a step: as it is, or without what is over the budget."""
        return rows

    # ---------------------------------------------------------------- what is held

    def budgets(self, length: int) -> list[int]:
        """Budget of each layer at `length` tokens; 0 where it does not evict."""
        return spread(self.plan, self.method.budgets(self.plan, length), 0)

    @property
    def k(self) -> int:
        """Tokens that a K/V head keeps, mean over the layers that evict: the budget of the answer
        under way.
        """
        budgets = self.sequences[0].budgets
        return sum(budgets) // len(self.evicting) if budgets else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the stores and of a prompt's scores."""
        total = 0
        for sequence in self.sequences:
            for layer in sequence.layers or ():
                total += sum(rows.nbytes for rows in layer)
                total += layer.table.nbytes if isinstance(layer, Ragged) else 0
            total += sum(t.numel() * t.element_size() for t in sequence.sums or ())
        return total

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the method needs between steps: the stores', the bank's while
        nothing is cut, and those of sliding windows.
        """
        config, size = self.setup.config, self.setup.dtype.itemsize
        token = len(config.keeping_layers) * config.kv_bytes(size)
        uncut = sum(token * s.length for s in self.sequences if s.layers is None)
        uncut += sum(window_rows_bytes(config, s.length, size) for s in self.sequences)
        return uncut + sum(
            rows.kv_bytes for s in self.sequences for layer in s.layers or () for rows in layer
        )

    def positions(self, layer: int, sequence: int = 0) -> list[list[int]]:
        """Positions that each K/V head of a layer holds: one ascending list per head."""
        held = self.sequences[sequence]
        if layer not in self.evicting:
            return window_positions(self.setup.config, layer, held.length)
        if held.layers is None:
            return [list(range(held.length))] * self.heads
        return [
            sorted(head[: rows.held].tolist())
            for rows in held.layers[layer]
            for head in rows.positions
        ]

    def rows_read(self, n: int) -> list[int]:
        """Of the step that made the bank n tokens long, mean over heads."""
        sequence, seen = self.sequences[0], self.setup.config.rows_seen(n)
        if sequence.layers is not None:
            for layer in self.evicting:
                parts = sequence.layers[layer]
                seen[layer] = sum(rows.held * len(rows.positions) for rows in parts) // self.heads
        return seen

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.reading, self.total, self.pending = True, math.inf if more else stop, {}

    def live(
        self, layer: int, bank: Bank, stop: int, b: int = 0
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor, int]]:
        """[(heads, k, v [h, T, D], held)]: what a layer attends to, its store and then the bank's
        tokens from `since` to `stop`; until the next call.
        """
        sequence = self.sequences[b]
        if sequence.layers is not None and sequence.since == stop:
            return [(rows.heads, *rows.kv(), rows.held) for rows in sequence.layers[layer]]
        k, v = (t[b] for t in bank.rows(layer, sequence.since, stop))
        if sequence.layers is None:
            return [(slice(0, self.heads), k, v, 0)]
        stored = sequence.layers[layer]
        both = self.joined([(rows, k[rows.heads], v[rows.heads]) for rows in stored])
        return [(rows.heads, *pair, rows.held) for rows, pair in zip(stored, both)]

    def joined(
        self, parts: list[tuple[Rows, torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(k, v [h, T, D])] of what is held and of new k, v [h, n, D] behind it, until the next
        call.
        """
        pairs = [pair for rows, *new in parts for pair in zip(rows.kv(), new)]
        made = self.joins.joined(pairs)
        return list(zip(made[::2], made[1::2]))

    def queries(self, q: torch.Tensor, heads: slice) -> torch.Tensor:
        """The query heads of a slice of K/V heads: q [B, C, H, D] -> [B, C, G * h, D]."""
        group = self.setup.config.group
        if heads.stop - heads.start == self.heads:
            return q
        return q[:, :, heads.start * group : heads.stop * group]

    def newest_queries(
        self, sequence: Sequence, layer: int, heads: slice, count: int, step: Step
    ) -> torch.Tensor:
        """The newest `count` queries of a sequence, rotated, of the query heads of a slice of K/V
        heads: [count, G * h, D]. A method that asks for them at a prompt's end says so in
        Needs.prompt_window; in an answer they must be of its own steps.
        """
        b = next(i for i, other in enumerate(self.sequences) if other is sequence)
        length = sequence.length
        at = torch.arange(length - count, length, device=step.positions.device).unsqueeze(0)
        # a prompt's tokens have the frequencies of its whole length
        total = length if length == sequence.prompt else None
        q = step.query_ring.read(layer, at)[b : b + 1]
        return self.queries(apply_rope(q, *step.rotary.at(at, total, layer)), heads)[0]

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A chunk attends to the store and to this prompt's tokens."""
        self.bank, out, since = bank, [], self.sequences[0].since
        for number, (heads, k, v, held) in enumerate(self.live(layer, bank, start + q.shape[1])):
            part = self.queries(q, heads)
            given = held + start - since, start, self.softmax_of(layer, heads)
            out.append(self.attend_rows(layer, part, k, v, *given))
            self.observe(0, layer, number, part[0], k, held + start - since, start)
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Cut, where this is when the method cuts; else add this prompt's tokens to the store."""
        self.reading, sequence = False, self.sequences[0]
        if step is None:
            return
        self.bank = step.bank
        sequence.read_to(length, self.budgets(length))
        sequence.allot(spread(self.plan, self.layer_budgets(length, step), 0))
        if self.method.cut == "prefill":
            self.fold(0, step, self.choose)
        elif sequence.layers is not None:
            self.fold(0, step, None)
        self.joins.drop()

    def fold(self, b: int, step: Step | None, choose: Chooser | None) -> None:
        """Make a sequence's store again from what it attends to: what `choose` keeps, or (None) all
        of it.
        """
        sequence = self.sequences[b]
        layers: list[list[Rows]] = [[] for _ in range(self.plan.num_layers)]
        assert self.bank is not None
        for layer in self.evicting:
            layers[layer] = self._made(b, layer, step, choose)
            if self.method.forget:
                # layer by layer, so that no more than one layer's rows are held twice
                sequence.replace(layer, layers[layer])
                self.bank.forget(layer, sequence.length)
        sequence.keep(layers)

    def _made(self, b: int, layer: int, step: Step | None, choose: Chooser | None) -> list[Rows]:
        """A layer's new store."""
        sequence, parts = self.sequences[b], []
        assert self.bank is not None
        for number, (heads, k, v, held) in enumerate(
            self.live(layer, self.bank, sequence.length, b)
        ):
            positions = sequence.positions(layer, number, held, len(k), k.device)
            scores = None
            if self.method.scored and sequence.sums is not None:
                scores = sequence.sums[layer][heads, :, : k.shape[1]]
            parts.append(Part(heads, k, v, positions, scores))
        if choose is None:
            chosen = [(part, everything(part)) for part in parts]
        else:
            chosen = choose(sequence, layer, parts, step)
        most = self.method.max_rows(sequence.budgets[layer])
        found = [Rows.gather(part, index, most) for part, index in chosen]
        return joined(self.method, found, self.softmax[layer])

    # ---------------------------------------------------------------- a step

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """One new token per sequence attends to its store and itself."""
        self.bank, self.reading = step.bank, False
        if len(self.sequences) == 1:
            return self._attend(0, layer, q, step)
        return torch.cat(
            [self._attend(b, layer, q[b : b + 1], step) for b in range(len(self.sequences))]
        )

    def _attend(self, b: int, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        sequence = self.sequences[b]
        at = sequence.length
        if sequence.layers is None:
            k, v = (t[b] for t in step.bank.rows(layer, 0, at + 1))
            softmax = self.softmax[layer]
            whole = self.attend_step(sequence, layer, q, k, v, None, at, softmax)
            self.observe(b, layer, 0, q[0], k, at, at)
            return whole
        out, (k, v), parts = [], step.bank.rows(layer, at, at + 1), sequence.layers[layer]
        if self._in_one_call is None:
            self._in_one_call = self.in_one_call()
        if isinstance(parts, Ragged) and parts.plain and self._in_one_call:
            return parts.step(q, k[b], v[b], at, self.scale)
        if isinstance(parts, Ragged):
            parts.put(k[b, :, 0], v[b, :, 0], at)
            return parts.attend(q, self.scale, self.setup)
        for number, rows in enumerate(parts):
            part, held = self.queries(q, rows.heads), rows.held + 1
            softmax = self.softmax_of(layer, rows.heads)
            if self._in_one_call:
                new = k[b, rows.heads], v[b, rows.heads]
                found = self.attend_in_one_call(sequence, layer, rows, part, *new, at, softmax)
            else:
                rows.put(k[b, rows.heads, 0], v[b, rows.heads, 0], at)
                mine = rows.k[:, :held], rows.v[:, :held], rows.positions[:, :held]
                found = self.attend_step(sequence, layer, part, *mine, at, softmax)
            out.append(found)
            self.observe(b, layer, number, part[0], rows.k[:, :held], rows.held, at)
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def commit(self, count: int) -> None:
        """Count what was read or written, add its scores, and evict."""
        for b, sequence in enumerate(self.sequences):
            sequence.lengthen(count)
            self.add_scores(b, sequence, count)
            if not self.reading:
                self._evict(b, sequence)
            elif self.method.forget:
                self.forget_read(b, sequence)
        self.pending = {}
        self.joins.drop()

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """Forget rows of the prompt under way that its chunks to come will not attend to; by
        default none: it is cut at its end.
        """

    def _evict(self, b: int, sequence: Sequence) -> None:
        # the first step after a prompt that was not cut, or of a session without one
        if sequence.layers is None:
            if not sequence.budgets:
                sequence.allot(self.budgets(sequence.length))
            self.fold(b, None, self.choose if self.method.cut == "first_step" else None)
            return
        sequence.stored()
        for layer, (budget, parts) in enumerate(zip(sequence.budgets, sequence.layers)):
            if isinstance(parts, Ragged):
                sequence.replace(layer, parts.counted())
                continue
            for number, rows in enumerate(parts):
                rows.held += 1
                parts[number] = self.trim(rows, budget, sequence, layer)
                parts[number].make_room(self.method.max_rows(budget))

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """Positions, scores and budgets, and how far a prompt is that goes on; K and V too where no
        bank holds them. None where a session that forgets cannot come back here: rows wait for a
        cut, or the step that cuts is yet to come.
        """
        return self.state_of(lambda layer, rows: rows.state(self.method.forget))

    def state_of(self, state: Callable[[int, Rows], Any]) -> Any:
        """`state`, made of this of the store's parts: (layer, part) -> what `rebuilt` takes."""
        held = self.sequences[0]
        if not self.has_state():
            return None
        layers = None
        if held.layers is not None:
            layers = [[state(i, rows) for rows in layer] for i, layer in enumerate(held.layers)]
        prompt = held.since, held.prompt, self.reading, self.total
        return held.length, prompt, list(held.budgets), layers, cloned(held.sums)

    def has_state(self) -> bool:
        held = self.sequences[0]
        return not (self.method.forget and held.length) or self._settled(held)

    def _settled(self, sequence: Sequence) -> bool:
        """Whether a sequence's store has what it takes of every token so far, and has been cut."""
        if sequence.layers is None or sequence.since < sequence.length:
            return False
        most = map(self.method.max_rows, sequence.budgets)
        full = zip(most, sequence.layers)
        return all(m is None or rows.held < m for m, parts in full for rows in parts)

    def restored(self, state: Any, length: int) -> Any:
        """Of a session that forgets, whose file has the store itself."""
        at, (since, prompt, reading, total), budgets, layers, sums = state
        counts = at, since, prompt, *budgets
        if any(type(count) is not int or count < 0 for count in counts) or reading is not False:
            raise ValueError("state")
        if not (at == since == length and prompt <= length and sums is None and total >= 0):
            raise ValueError("state")
        if layers is None:
            if length:
                raise ValueError("layers")
            return state
        evicting = tuple(layer for layer, budget in enumerate(budgets) if budget)
        if len(budgets) != self.plan.num_layers or evicting != self.evicting:
            raise ValueError("budgets")
        scores = self.method.scores_of(self.setup.config)
        layers = checked_layers(layers, self.setup, scores, length, self.counts_kept)
        return at, (since, prompt, reading, total), list(budgets), layers, None

    def load(self, state: Any, length: int | None) -> None:
        """Make the stores of a state again, from it or from the bank, bit for bit."""
        at, (since, prompt, reading, total), budgets, layers, sums = state
        found = Sequence(at, since, prompt, None, list(budgets), cloned(sums))
        if layers is not None:
            found.layers = []
            for layer, parts in enumerate(layers):
                most = self.method.max_rows(budgets[layer])
                rebuilt = [
                    self.rebuilt(layer, number, part, most) for number, part in enumerate(parts)
                ]
                found.layers.append(joined(self.method, rebuilt, self.softmax[layer]))
        self.sequences[0], self.pending = found, {}
        self.reading, self.total = reading, total

    def rebuilt(self, layer: int, number: int, state: Any, most: int | None) -> Rows:
        """Part `number` of a layer's store, from its state and the bank."""
        return Rows.rebuild(state, partial(self._bank_rows, layer), most)

    def _bank_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.bank is not None
        k, v = self.bank.kv(layer)
        return k[0], v[0]

    def waiting_from(self, length: int) -> int:
        return self.sequences[0].since if length else 0

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        theirs: Sequence = other.sequences[0]
        layers = None
        if theirs.layers is not None:
            layers = [copied(parts) for parts in theirs.layers]
        self.sequences[sequence] = replace(
            theirs, layers=layers, sums=cloned(theirs.sums), budgets=list(theirs.budgets)
        )
        self.reading, self.total = other.reading, other.total


def everything(part: Part) -> torch.Tensor:
    """Index [h, T] of all tokens of a part."""
    heads, count = part.positions.shape
    return torch.arange(count, device=part.positions.device).expand(heads, -1)


def cloned(sums: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
    """Copies of a prompt's scores, one tensor per layer."""
    return None if sums is None else [t.clone() for t in sums]
