"""What all evicting methods share: a budget, a store per layer (engine/methods/evict/store.py), and
attention that reads the store only.

Until the first cut everything is in the bank ("whole"): a first prompt is read by full attention,
or as the method says. The cut makes the store; from then on the bank's older rows are not read. A
later prompt's own rows stand in the bank until that prefill ends and are attended to beside the
store. A chunk or step changes nothing before `advance`: one that breaks off has not happened.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from engine.errors import SettingError
from engine.methods.base import Method, Runtime
from engine.methods.evict.store import Rows, reserved, row_bytes
from engine.methods.settings import one_budget, portion, whole
from engine.plan.layers import LayerPlan, Role
from kernels.dense_decode import decode_dense
from kernels.prefill import prefill_dense

GROUP_RULES = ("max", "mean", "sum")


@dataclass(frozen=True)
class Evicting(Method):
    """Budget: tokens | share, at most one, per K/V head and layer; share is of the bank's length at
    the end of the latest prefill. Where neither is given the method's published default holds.
    """

    tokens: int | None = None
    share: float | None = None

    named = False
    evicts = True
    scored = False  # whether a float32 score per query head is kept with every row
    # when a first prompt is cut: at its end, or after the "first_step" of the answer
    cut = "prefill"
    least = 1  # tokens that a head keeps whatever the budget

    # whether a prompt is read in a way of its own, so that a session read otherwise cannot go on
    # with it
    own_prefill = False

    def __post_init__(self):
        one_budget(self, "tokens", "share")
        if self.tokens is not None:
            whole("tokens", self.tokens, self.least)
        elif self.share is not None:
            portion("share", self.share)
        else:
            for name, value in self.default_budget().items():
                object.__setattr__(self, name, value)

    def default_budget(self):
        """The published budget: {"tokens": n} or {"share": x}."""
        return {"share": 0.2}

    def plan(self, config):
        """Every layer reads what it has retained."""
        return LayerPlan((Role.RETAINED,) * config.num_layers, (), (None,) * config.num_layers)

    def budget(self, plan, length):
        """Tokens that a K/V head keeps, mean over heads and layers; length: of the bank at the end
        of the latest prefill.
        """
        return (
            self.tokens
            if self.tokens is not None
            else max(self.least, math.floor(self.share * length))
        )

    def budgets(self, plan, length):
        """The same per layer: a list of ints."""
        return [self.budget(plan, length)] * plan.num_layers

    def most(self, budget):
        """Rows that a store of this budget never exceeds, one for the step under way included; None
        where what is generated stays.
        """
        return None

    def course(self, budget, length, generated):
        """(base, held) of a layer's rows, mean over its heads, after a prompt of `length` and
        `generated` tokens.
        """
        kept = min(length, budget)
        return kept, kept + generated

    def rows_reserved(self, plan, prompt, generated=0):
        """Rows that the stores of all layers hold per K/V head, in use or not, after one prompt and
        `generated` tokens.
        """
        return sum(
            reserved(*self.course(budget, prompt, generated), self.most(budget))
            for budget in self.budgets(plan, prompt)
        )

    def kv_bytes(self, plan, config, itemsize, prompt, generated=0):
        """Bytes of keys and values that are needed then: the stores', or the bank's where nothing
        is cut yet.
        """
        if self.cut == "first_step" and generated == 0:
            return config.num_layers * prompt * config.kv_bytes(itemsize)
        return self.rows_reserved(plan, prompt, generated) * config.kv_bytes(itemsize)

    def held_bytes(self, plan, config, itemsize, prompt, generated=0):
        """Bytes of the stores then, positions and scores included: exactly what a session allocates
        beside its bank (U2).
        """
        rows = self.rows_reserved(plan, prompt, generated)
        return rows * config.num_kv_heads * row_bytes(config, itemsize, self.scored)

    def store_bytes(self, plan, config, itemsize, capacity):
        """The most that a session of `capacity` tokens may come to hold: for the memory plan."""
        rows = sum(
            min(capacity, budget) + capacity + 1 if self.most(budget) is None else self.most(budget)
            for budget in self.budgets(plan, capacity)
        )
        return rows * config.num_kv_heads * row_bytes(config, itemsize, self.scored)

    def check_switch(self, length):
        """A method that reads prompts in a way of its own finds rows in the bank that it would not
        have written.
        """
        if self.own_prefill:
            raise SettingError(
                f"{self.name}: reads prompts in a way of its own, and this session has read {length} tokens already; make "
                f"a session with it"
            )


@dataclass
class Sequence:
    """What one sequence of a runtime has retained. layers: per layer its list of Rows; None while
    everything is in the bank.

    length: tokens so far; since: first position that is in the bank only (a prompt under way);
    prompt: length at the end of the latest prefill; budgets: per layer; sums: per layer the scores
    [Hkv, G, rows] of everything that is attended to while a prompt is read or nothing is cut yet.
    """

    length: int = 0
    since: int = 0
    prompt: int = 0
    layers: list | None = None
    budgets: list = field(default_factory=list)
    sums: list | None = None


class EvictingRuntime(Runtime):
    """One session's stores. Prefill is for one sequence; decode steps take a ragged batch
    (`copy_from`), one sequence after the other.
    """

    differs = True
    evicts = True
    capturable = False  # rows are counted on the host

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.plan = setup.plan
        self.heads = setup.config.num_kv_heads
        self.sequences = [Sequence() for _ in range(setup.batch)]
        self.reading, self.total, self.bank, self.pending = False, 0, None, {}

    # ---------------------------------------------------------------- what is held

    @property
    def k(self):
        """Tokens that a K/V head keeps, mean over layers: the budget of the answer under way."""
        budgets = self.sequences[0].budgets
        return sum(budgets) // len(budgets) if budgets else 0

    @property
    def nbytes(self):
        """Bytes of rows, positions and scores."""
        total = 0
        for sequence in self.sequences:
            total += sum(rows.nbytes for layer in sequence.layers or () for rows in layer)
            total += sum(t.numel() * t.element_size() for t in sequence.sums or ())
        return total

    @property
    def kv_bytes(self):
        """Bytes of keys and values that the method needs between steps: the stores', and the bank's
        rows while nothing is cut.
        """
        config = self.setup.config
        row = config.num_layers * config.kv_bytes(self.setup.dtype.itemsize)
        whole = sum(row * s.length for s in self.sequences if s.layers is None)
        return whole + sum(
            rows.kv_bytes for s in self.sequences for layer in s.layers or () for rows in layer
        )

    def positions(self, layer, sequence=0):
        """Positions that each K/V head of a layer holds: one ascending list per head."""
        held = self.sequences[sequence]
        if held.layers is None:
            return [list(range(held.length))] * self.heads
        return [
            sorted(head[: rows.held].tolist())
            for rows in held.layers[layer]
            for head in rows.positions
        ]

    def rows_read(self, n):
        """Rows per layer that the step which made the bank n tokens long has read, mean over heads."""
        sequence = self.sequences[0]
        if sequence.layers is None:
            return [n] * self.plan.num_layers
        return [
            sum(rows.held * len(rows.positions) for rows in layer) // self.heads
            for layer in sequence.layers
        ]

    # ---------------------------------------------------------------- reading a prompt

    def begin_prefill(self, start, stop, more=False):
        """A prompt ends at `stop`, or (more) far behind it."""
        self.reading, self.total, self.pending = True, math.inf if more else stop, {}

    def live(self, layer, bank, stop, sequence=0):
        """[(heads, k, v [h, T, D], held)]: what a layer attends to, its store and then the bank's
        rows from `since` to `stop`.
        """
        own = self.sequences[sequence]
        k, v = (t[sequence, :, own.since : stop] for t in bank.kv(layer))
        if own.layers is None:
            return [(slice(0, self.heads), k, v, 0)]
        if own.since == stop:
            return [
                (rows.heads, rows.k[:, : rows.held], rows.v[:, : rows.held], rows.held)
                for rows in own.layers[layer]
            ]
        return [
            (
                rows.heads,
                torch.cat([rows.k[:, : rows.held], k[rows.heads]], 1),
                torch.cat([rows.v[:, : rows.held], v[rows.heads]], 1),
                rows.held,
            )
            for rows in own.layers[layer]
        ]

    def queries(self, q, heads):
        """The query heads of a slice of K/V heads: q [B, C, H, D] -> [B, C, G * h, D]."""
        group = self.setup.config.group
        return q[:, :, heads.start * group : heads.stop * group]

    def prefill_attend(self, layer, q, bank, start):
        """A chunk attends to the store and to this prompt's rows."""
        self.bank, out, since = bank, [], self.sequences[0].since
        for number, (heads, k, v, held) in enumerate(self.live(layer, bank, start + q.shape[1])):
            part = self.queries(q, heads)
            out.append(self.attend_rows(layer, part, k, v, held + start - since, start))
            self.observe(0, layer, number, part[0], k, held + start - since, start)
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def attend_rows(self, layer, q, k, v, first, start):
        """Attention of a chunk q [1, C, H', D] at positions from `start` on to rows k, v [h, T, D];
        query j sees rows < first + j + 1.
        """
        return prefill_dense(q, k[None], v[None], first, self.scale, backend=self.setup.backend)

    def observe(self, sequence, layer, number, q, k, first, start):
        """What scoring methods note: q [C, H', D] at positions from `start` on has attended to rows
        k [h, T, D] of part `number`.
        """

    def end_prefill(self, length, step=None):
        """The cut, where it is made here; else this prompt's rows join the store."""
        self.reading, sequence = False, self.sequences[0]
        if step is None:
            return
        self.bank, sequence.length, sequence.prompt = step.bank, length, length
        sequence.budgets = self.method.budgets(self.plan, length)
        if self.method.cut == "prefill":
            self.fold(0, step, self.choose)
        elif sequence.layers is not None:
            self.fold(0, step, None)

    def fold(self, b, step, choose):
        """Make a sequence's store anew from what is attended to: what `choose` keeps, or (None) all
        of it.
        """
        sequence, layers = self.sequences[b], []
        length = sequence.length
        for layer in range(self.plan.num_layers):
            parts = []
            for number, (heads, k, v, held) in enumerate(self.live(layer, self.bank, length, b)):
                fresh = torch.arange(
                    sequence.since, length, dtype=torch.int32, device=k.device
                ).expand(len(k), -1)
                if held:
                    fresh = torch.cat(
                        [sequence.layers[layer][number].positions[:, :held], fresh], 1
                    )
                scores = (
                    None if sequence.sums is None else sequence.sums[layer][heads, :, : k.shape[1]]
                )
                parts.append((heads, k, v, fresh, scores))
            if choose is None:
                chosen = [(part, everything(part)) for part in parts]
            else:
                chosen = choose(sequence, layer, parts, step)
            most = self.method.most(sequence.budgets[layer])
            layers.append([Rows.gather(*part, index, most) for part, index in chosen])
        sequence.layers, sequence.since, sequence.sums = layers, length, None

    def choose(self, sequence, layer, parts, step):
        """[(part, index [h, n])] to keep; parts: [(heads, k, v [h, T, D], positions [h, T], scores
        [h, G, T] or None)].
        """
        raise NotImplementedError

    # ---------------------------------------------------------------- decoding

    def attend(self, layer, q, step):
        """Attention of one new token per sequence to its store and itself."""
        self.bank, self.reading = step.bank, False
        return torch.cat(
            [self._attend(b, layer, q[b : b + 1], step) for b in range(len(self.sequences))]
        )

    def _attend(self, b, layer, q, step):
        sequence, (k, v) = self.sequences[b], step.bank.kv(layer)
        at = sequence.length
        if sequence.layers is None:
            rows = k[b, :, : at + 1], v[b, :, : at + 1]
            self.observe(b, layer, 0, q[0], rows[0], at, at)
            return self.attend_step(sequence, layer, q, *rows, None, at)
        out = []
        for number, rows in enumerate(sequence.layers[layer]):
            rows.put(k[b, rows.heads, at], v[b, rows.heads, at], at)
            part, held = self.queries(q, rows.heads), rows.held + 1
            out.append(
                self.attend_step(
                    sequence,
                    layer,
                    part,
                    rows.k[:, :held],
                    rows.v[:, :held],
                    rows.positions[:, :held],
                    at,
                )
            )
            self.observe(b, layer, number, part[0], rows.k[:, :held], rows.held, at)
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def attend_step(self, sequence, layer, q, k, v, positions, at):
        """Attention of one query [1, 1, H', D] at position `at` to rows k, v [h, T, D], its own
        last; positions [h, T], None: 0, 1, ...
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
        )

    def advance(self, count):
        """Count what was read or written, commit scores, and evict."""
        for b, sequence in enumerate(self.sequences):
            sequence.length += count
            self.commit(b, sequence, count)
            if not self.reading:
                self._evict(b, sequence)
        self.pending = {}

    def _evict(self, b, sequence):
        # the first step after a prompt that was not cut, or of a session without one
        if sequence.layers is None:
            sequence.budgets = sequence.budgets or self.method.budgets(self.plan, sequence.length)
            self.fold(b, None, self.choose if self.method.cut == "first_step" else None)
            return
        sequence.since = sequence.length
        for budget, parts in zip(sequence.budgets, sequence.layers):
            for number, rows in enumerate(parts):
                rows.held += 1
                parts[number] = self.trim(rows, budget, sequence)
                parts[number].make_room(self.method.most(budget))

    def commit(self, b, sequence, count):
        """Add the scores that a chunk or step of `count` tokens has left pending; rows are not
        counted yet.
        """

    def trim(self, rows, budget, sequence):
        """The Rows after a step: as they are, or without what is over the budget."""
        return rows

    # ---------------------------------------------------------------- going back, copies

    def snapshot(self):
        """Positions, scores and budgets: rows come back from the bank."""
        held = self.sequences[0]
        layers = (
            None
            if held.layers is None
            else [[rows.snapshot() for rows in layer] for layer in held.layers]
        )
        return (
            held.length,
            held.prompt,
            list(held.budgets),
            layers,
            None if held.sums is None else [t.clone() for t in held.sums],
        )

    def restore(self, state, length):
        """The stores of a snapshot, gathered from the bank, bit for bit."""
        at, prompt, budgets, layers, sums = state
        found = Sequence(
            at, 0, prompt, None, list(budgets), None if sums is None else [t.clone() for t in sums]
        )
        if layers is not None:
            found.since, found.layers = at, []
            for layer, parts in enumerate(layers):
                k, v = (t[0] for t in self.bank.kv(layer))
                found.layers.append(
                    [Rows.rebuild(part, k, v, self.method.most(budgets[layer])) for part in parts]
                )
        self.sequences[0], self.reading, self.pending = found, False, {}

    def copy_from(self, other, sequence=0):
        """Hold for one sequence what another runtime of one sequence holds."""
        theirs = other.sequences[0]
        layers = (
            None
            if theirs.layers is None
            else [[rows.clone() for rows in parts] for parts in theirs.layers]
        )
        sums = None if theirs.sums is None else [t.clone() for t in theirs.sums]
        self.sequences[sequence] = replace(
            theirs, layers=layers, sums=sums, budgets=list(theirs.budgets)
        )


def everything(part):
    """Index [h, T] of all rows of a part."""
    positions = part[3]
    return torch.arange(positions.shape[1], device=positions.device).expand(len(positions), -1)
