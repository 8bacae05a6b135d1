"""What window, StreamingLLM and LM-Infinite share: the first `sink` tokens and the newest ones are
kept, chosen by position alone.

The three differ in how far away the sinks seem (hook G). A query sees the newest w tokens at their
true distance; a sink that is further than the method allows is seen at a clipped distance, by
turning query and key (Rotary.rotate_by) from where they were rotated to. Prompts are
read in the same way, so a token's rows are those of a model that never saw more.
"""

from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.evict.base import Evicting, EvictingRuntime, everything
from engine.methods.evict.store import best, worst
from engine.methods.settings import whole
from engine.model.rope import Rotary
from kernels.column_sums import tile_floats
from kernels.prefill import prefill_dense


@dataclass(frozen=True)
class Windowed(Evicting):
    """Budget tokens | share: sinks and window together. sink: first tokens that are always seen;
    window = budget - sink.
    """

    named = False
    own_prefill = True
    in_parts = False  # a budget by share is reckoned before the prompt is read
    # whether a sink's distance is changed, which dynamic rope does not allow
    clips = True

    def sinks(self, budget, length):
        """How many of a budget's tokens are sinks; length as in `budget`."""
        return 0

    def plan(self, config):
        """As Evicting's; dynamic rope has no clipped distance."""
        if self.clips and config.rope.kind == "dynamic":
            raise SettingError(
                f"{self.name}: clips distances, which this model's dynamic rope does not allow; use another method"
            )
        return super().plan(config)

    def most(self, budget):
        """The budget, and the step under way."""
        return budget + 1

    def course(self, budget, length, generated):
        """The oldest of the window goes when a new one comes; the store is made once."""
        base = min(length, budget)
        return base, min(base + generated, budget)

    def plain(self, sinks, window):
        """Positions below this see everything where it is."""
        raise NotImplementedError

    def far(self, q, k, at, sinks, window, rotary):
        """Logits float32 [h, G, C, s] of queries q [C, h, G, D] at positions `at` [C] on sinks k
        [h, s, D] beyond the window, unscaled.
        """
        raise NotImplementedError

    def runtime(self, setup):
        """The store of one session."""
        return WindowedRuntime(self, setup)


class WindowedRuntime(EvictingRuntime):
    """Attention to sinks and window, query block by query block."""

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.rotary = Rotary(setup.config, setup.device)

    def sizes(self, length):
        """(sinks, window) after a prompt of `length` tokens."""
        budget = self.method.budget(self.plan, length)
        sinks = self.method.sinks(budget, length)
        return sinks, budget - sinks

    def attend_rows(self, layer, q, k, v, first, start):
        """What sees everything as it is goes the plain way, the rest in blocks of queries."""
        sinks, window = self.sizes(self.total)
        count = min(q.shape[1], max(0, self.method.plain(sinks, window) - start))
        if count == q.shape[1]:
            return super().attend_rows(layer, q, k, v, first, start)
        # rows of the store, before those of this prompt
        kept = first - (start - self.sequences[0].since)
        positions = torch.arange(self.sequences[0].since, start + q.shape[1], device=q.device)
        # in order of position, which blocks of rows rely on
        if kept:
            old, order = torch.sort(self.sequences[0].layers[layer][0].positions[0, :kept].long())
            positions = torch.cat([old, positions])
            k, v = (torch.cat([t[:, order], t[:, kept:]], 1) for t in (k, v))
        out = (
            [
                prefill_dense(
                    q[:, :count],
                    k[None, :, : first + count],
                    v[None, :, : first + count],
                    first,
                    self.scale,
                    backend=self.setup.backend,
                )
            ]
            if count
            else []
        )
        block = max(16, tile_floats(q.device) // (q.shape[2] * (window + sinks + 64)))
        for at in range(count, q.shape[1], block):
            part = q[:, at : at + block]
            low = int(torch.searchsorted(positions, start + at - window, right=True))
            rows = slice(max(low, sinks), first + at + part.shape[1])
            out.append(self.attend_window(part, k, v, positions, rows, start + at, sinks, window))
        return torch.cat(out, 1)

    def attend_step(self, sequence, layer, q, k, v, positions, at):
        """One query: the plain way while it sees everything as it is."""
        if positions is None:
            return super().attend_step(sequence, layer, q, k, v, positions, at)
        sinks = self.method.sinks(sequence.budgets[layer], sequence.prompt)
        window = sequence.budgets[layer] - sinks
        if at < self.method.plain(sinks, window):
            return super().attend_step(sequence, layer, q, k, v, positions, at)
        return self.attend_window(
            q, k, v, positions[0].long(), slice(sinks, k.shape[1]), at, sinks, window
        )

    def attend_window(self, q, k, v, positions, rows, start, sinks, window):
        """Softmax over the first rows, the sinks, and `rows`: q [1, C, H', D] at positions from
        `start`; positions [T] of k, v.
        """
        heads, count, dim = k.shape[0], q.shape[1], q.shape[3]
        folded = q[0].float().view(count, heads, -1, dim)
        at = torch.arange(start, start + count, device=q.device)
        near = torch.einsum("chgd,htd->hgct", folded, k[:, rows].float())
        age = at.unsqueeze(1) - positions[rows]
        near = near.masked_fill((age < 0) | (age >= window), float("-inf"))
        far = self.method.far(folded, k[:, :sinks].float(), at, sinks, window, self.rotary)
        far = far.masked_fill(positions[:sinks] > at.unsqueeze(1), float("-inf"))
        weights = torch.softmax(torch.cat([far, near], -1) * self.scale, -1)
        values = torch.cat([v[:, :sinks], v[:, rows]], 1).float()
        return torch.einsum("hgct,htd->chgd", weights, values).reshape(q.shape).to(q.dtype)

    def choose(self, sequence, layer, parts, step):
        """The sinks and the newest."""
        (part,), (sinks, _) = parts, self.sizes(sequence.length)
        positions = part[3]
        if positions.shape[1] <= sequence.budgets[layer]:
            return [(part, everything(part))]
        keys = positions.float().masked_fill(positions < sinks, float("inf"))
        return [(part, best(keys, positions, sequence.budgets[layer]))]

    def trim(self, rows, budget, sequence):
        """The oldest token that is no sink goes."""
        if rows.held <= budget:
            return rows
        sinks = self.method.sinks(budget, sequence.prompt)
        positions = rows.positions[:, : rows.held]
        rows.drop(
            worst(
                positions.masked_fill(positions < sinks, torch.iinfo(positions.dtype).max),
                positions,
            )
        )
        return rows


def checked_sink(value, tokens):
    """Raise SettingError unless `sink` is an int >= 0 that leaves a window of one token at least."""
    whole("sink", value, 0)
    if tokens is not None and value >= tokens:
        raise SettingError(
            f"sink: found {value}, expected fewer than the budget of {tokens} tokens"
        )
