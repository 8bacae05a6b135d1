"""What a layer plan costs a text: KL of its next-token distributions against full attention's, over
a passage of it, from one reading.

A reading leaves K and V of the text in a bank. A passage is some consecutive positions whose tokens
are taken as decode steps took them: all before them was read densely. Its rows go through a layer
together. That is what the steps do one by one: a row's K and V depend on the rows before it in the
same layer only by attention, which is causal. tests/tools/test_passages.py holds both to the same
selections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from engine.bank.base import Bank
from engine.forward.recurrent.mixer import beside, recur_chunk
from engine.model.llama import Llama, post_attention, pre_attention
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan, Role, tail_start
from kernels.launch.softmax import Softmax
from kernels.select.topk import select_topk

# float32 attention weights that exist at a time: 256 MB; a longer context takes fewer rows at once
WEIGHTS = 1 << 26

# (weights float32 [Hkv, G, R, n] of a filter layer, first tail position int64 [R]) -> the rows that
# each of R queries lends to its group: bool [1 or Hkv, R, n]; those in the tail are ignored
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# (filter layer, sparse layer, what was chosen bool [1 or Hkv, R, n]) -> what the sparse layer reads
Lend = Callable[[int, int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class MaxOverHeads:
    """OmniKV's selector `last`: the k rows older than the tail with the largest weight under any
    head, ties to the lower position.
    """

    k: int

    def __call__(self, weights: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """bool [1, R, n] (see Choose)."""
        scores = weights.amax((0, 1))
        rows, n = scores.shape
        stop = starts.int()
        low, most = torch.zeros_like(stop), torch.full_like(stop, self.k)
        index = torch.empty(rows, max(1, min(self.k, n)), dtype=torch.int32, device=stop.device)
        select_topk(scores, low, stop, most, index, torch.empty_like(stop))
        chosen = torch.zeros(rows, n + 1, dtype=torch.bool, device=stop.device)
        # column n takes the places that were not filled
        chosen.scatter_(1, torch.where(index < 0, n, index).long(), True)
        return chosen[None, :, :n]


@dataclass
class Trace:
    """A passage under one plan.

    kl float32 [P], nats; same bool [P], whether the most likely tokens agree. does: what each layer
    did (`doings`). inputs: hidden states [1, P, hidden] before each layer, and chosen: what each
    filter layer chose, bool [1 or Hkv, P, n]; made: k and v [1, P, Hkv, D] of layers whose rows
    others read; all empty where they were not kept.
    """

    does: tuple[int, ...]
    kl: torch.Tensor
    same: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """A sliding-window layer's rows before a passage, k and v [Hkv, m, D], and which of those and
    of the passage's own rows each query does not see: bool [P, m + P].
    """

    k: torch.Tensor
    v: torch.Tensor
    hidden: torch.Tensor


DENSE, CHOOSES = -1, -2


def doings(plan: LayerPlan) -> tuple[int, ...]:
    """What each layer does: DENSE, CHOOSES (dense, and chooses for its group), or the number of the
    filter layer that it reads by.
    """
    found = []
    for role, group in zip(plan.roles, plan.group_of):
        if role is Role.SPARSE and group is not None:
            found.append(plan.groups[group].filter_layer)
        elif role is Role.FILTER and group is not None and plan.groups[group].layers:
            found.append(CHOOSES)
        else:
            found.append(DENSE)
    return tuple(found)


class Passage:
    """Positions start .. stop-1 of a text whose rows up to `start` are in a bank.

    ids: the whole text; tail: as in OmniKV. Several passages may share a bank: they read it only.
    The rows that sliding-window layers see before it are copied, because their rings go on, and so
    is the state of recurrent layers, which must stand at `start`.
    `choose` and `lend` are what is chosen in filter layers and what becomes of it in sparse ones.
    Holds float32 [P, vocab] and what its traces hold. Not thread-safe.
    """

    def __init__(
        self,
        model: Llama,
        rotary: Rotary,
        bank: Bank,
        ids: list[int],
        start: int,
        stop: int,
        tail: int,
        choose: Choose,
        lend: Lend | None = None,
    ):
        self.model, self.bank, self.start, self.stop = model, bank, start, stop
        self.choose, self.lend = choose, lend
        device = model.device
        self.tokens = torch.tensor([ids[start:stop]], device=device)
        positions = torch.arange(start, stop, device=device)
        self.turns = rotary.of_layers(positions[None])
        # rows 0 .. n-1 are those that the newest query sees; query i sees rows up to its own
        self.tails = tail_start(positions + 1, tail)
        self.newer = torch.arange(stop, device=device) > positions[:, None]
        self.windows = self._windows(positions)
        self.state = None if bank.recurrent is None else bank.recurrent.copy()
        self.softmax = model.config.softmax(model.sinks)
        self.reference = torch.zeros(())
        with torch.inference_mode():
            full = self._forward((DENSE,) * model.config.num_layers, None, None)
        self.reference = torch.log_softmax(full, -1)

    def run(self, plan: LayerPlan, parent: Trace | None = None, keep: bool = False) -> Trace:
        """The passage under a plan. parent: a kept trace of this passage; layers below the first
        that differs from it are not computed again. keep: the trace can be a parent.
        """
        does = doings(plan)
        trace = Trace(does, torch.zeros(()), torch.zeros(()))
        with torch.inference_mode():
            found = torch.log_softmax(self._forward(does, parent, trace if keep else None), -1)
            wanted = self.reference
            trace.kl = (wanted.exp() * (wanted - found)).sum(-1).clamp_(min=0.0).cpu()
            trace.same = (wanted.argmax(-1) == found.argmax(-1)).cpu()
        return trace

    def _forward(
        self, does: tuple[int, ...], parent: Trace | None, trace: Trace | None
    ) -> torch.Tensor:
        """Logits float32 [P, vocab]."""
        model, config = self.model, self.model.config
        x, more = model.begun(self.tokens)
        first, chosen, made = 0, dict[int, torch.Tensor](), {}
        if parent is not None:
            layers = range(config.num_layers)
            first = next((i for i in layers if does[i] != parent.does[i]), config.num_layers - 1)
            x, chosen, made = parent.inputs[first], dict(parent.chosen), dict(parent.made)
        if trace is not None and parent is not None:
            trace.inputs.extend(parent.inputs[:first])
        for number, layer in model.turns(first):
            if trace is not None:
                trace.inputs.append(x)
            mixed = None
            x, predicted = model.entered(number, x)
            if layer.mixer is not None:
                mixed = recur_chunk(model, number, x, self.state, self.start, False, "auto")
                if layer.mixer_out is None:
                    x = post_attention(layer, x, mixed, config.rms_norm_eps)
                    continue
            cos, sin = self.turns[number]
            q, k, v, _ = pre_attention(layer, x, cos, sin, *config.sizes_of(number))
            if number in config.row_layers:
                made[number] = k, v
            k, v = made.get(config.rows_of(number), (k, v))
            if number in self.windows:
                out = self._local(number, q[0], k[0], v[0])
            elif does[number] >= 0:
                rows = chosen[does[number]]
                if self.lend is not None:
                    rows = self.lend(does[number], number, rows)
                out = self._sparse(number, q[0], k[0], v[0], rows)
            else:
                picks = does[number] == CHOOSES
                out, found = self._dense(number, q[0], k[0], v[0], picks)
                if found is not None:
                    chosen[number] = found
            attended = out[None] if mixed is None else beside(config, out[None], mixed)
            x = post_attention(layer, x, attended, config.rms_norm_eps)
            x = model.refined(number, x, None if more is None else more[:, :, number], predicted)
        if trace is not None:
            trace.chosen = {f: chosen[f] for f in set(does) if f >= 0}
            trace.made = made
        return model.logits(x[0])

    def _windows(self, positions: torch.Tensor) -> dict[int, Window]:
        """What each sliding-window layer sees before the passage."""
        found = {}
        for layer in self.model.config.local_layers:
            ring = self.bank.window_ring(layer)
            assert ring is not None, f"layer {layer} keeps no window"
            low = max(0, self.start - ring.window + 1)
            k, v = (t[0].clone() for t in ring.views(low, self.start))
            rows = torch.arange(low, self.stop, device=positions.device)
            at = positions[:, None]
            found[layer] = Window(k, v, (rows > at) | (rows <= at - ring.window))
        return found

    def _local(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q [P, H, D] to the window of each row."""
        window = self.windows[layer]
        keys, values = _joined(window.k, k), _joined(window.v, v)
        weights = _weights(q, keys, window.hidden, self.model.config.scale, self.softmax[layer])
        return _mix(weights, values, q.dtype)

    def _dense(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, picks: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of q [P, H, D] to everything; what was chosen, where `picks`."""
        old_k, old_v = (t[0] for t in self.bank.kv(layer, self.start))
        keys, values, scale = _joined(old_k, k), _joined(old_v, v), self.model.config.scale
        outs, found = [], []
        for part in self._parts(q.shape[1]):
            hidden = self.newer[part, self.start :]
            weights = _weights(q[part], keys, hidden, scale, self.softmax[layer])
            outs.append(_mix(weights, values, q.dtype))
            if picks:
                found.append(self.choose(weights, self.tails[part]))
        return torch.cat(outs), torch.cat(found, 1) if picks else None

    def _sparse(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of q [P, H, D] to what each row's group chose and its tail. The rows that any
        query reads are gathered once.
        """
        positions = torch.arange(self.stop, device=q.device)
        old = positions < self.tails[:, None]
        hidden = torch.where(old, ~chosen, self.newer)
        read = torch.nonzero(~hidden.flatten(0, 1).all(0)).flatten()
        # the passage's own rows stay, though a short one may leave some unread
        read = read[read < self.start]
        hidden = torch.cat([hidden[..., read], hidden[..., self.start :]], -1)
        old_k, old_v = (t[0] for t in self.bank.kv(layer, self.start))
        keys = _joined(old_k.index_select(1, read), k)
        values, scale = _joined(old_v.index_select(1, read), v), self.model.config.scale
        outs = []
        for part in self._parts(q.shape[1]):
            weights = _weights(q[part], keys, hidden[:, part], scale, self.softmax[layer])
            outs.append(_mix(weights, values, q.dtype))
        return torch.cat(outs)

    def _parts(self, heads: int) -> Iterator[slice]:
        """The rows in blocks whose attention weights fit in WEIGHTS."""
        size = max(1, WEIGHTS // (heads * self.stop))
        for first in range(0, self.stop - self.start, size):
            yield slice(first, min(first + size, self.stop - self.start))


def _joined(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Rows [Hkv, n, D] and new ones [P, Hkv, D] -> float32 [Hkv, n + P, D]."""
    return torch.cat([old.float(), new.transpose(0, 1).float()], 1)


def _weights(
    q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scale: float, softmax: Softmax
) -> torch.Tensor:
    """Softmaxed attention of q [R, H, D] to keys [Hkv, n, D]: float32 [Hkv, G, R, n]. hidden: which
    of the last m keys are left out, bool [R, m] or [1 or Hkv, R, m]. scale: of q . k.
    softmax: of the layer.
    """
    rows, heads, dim = q.shape
    kv_heads, n, _ = keys.shape
    packed = q.float().view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    logits = torch.bmm(packed * scale, keys.transpose(1, 2)).view(kv_heads, -1, rows, n)
    softmax.capped(logits)
    hidden = hidden if hidden.dim() == 2 else hidden[:, None]
    logits[..., n - hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    if softmax.sinks is None:
        return torch.softmax(logits, -1)
    # the heads of a K/V head before the rows, as the sinks lie
    flat = logits.transpose(1, 2).transpose(0, 1).flatten(1, 2)
    weights = softmax.weights(flat).view(rows, kv_heads, -1, n)
    return weights.permute(1, 2, 0, 3)


def _mix(weights: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weights [Hkv, G, R, n] over values [Hkv, n, D] -> [R, H, D]."""
    kv_heads, group, rows, _ = weights.shape
    out = torch.bmm(weights.flatten(1, 2), values).view(kv_heads, group, rows, -1)
    return out.permute(2, 0, 1, 3).reshape(rows, kv_heads * group, -1).to(dtype)
