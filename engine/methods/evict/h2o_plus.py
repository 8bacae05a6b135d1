"""H2O+: H2O that evicts while it reads, so that a prompt longer than the device holds can be read
at all.

Source: the OmniKV paper, appendix C (its baseline above 60K tokens and 30B parameters); METHODS.md
row `h2o_plus` and item 28. The prompt is read in segments counted from its own beginning; after
each, and after the last, every head keeps the newest and the heaviest of its budget. A segment's
queries see what is kept and their own segment. At no time does a head hold more than budget +
segment tokens.
"""

from dataclasses import dataclass, field, replace

import torch

from engine.errors import SettingError
from engine.methods.evict.accumulated_scores import AccumulatingRuntime
from engine.methods.evict.h2o import H2O
from engine.methods.evict.store import Rows, best
from engine.methods.settings import whole
from kernels.prefill import prefill_dense

AUTO = ("auto", "auto_70b")


@dataclass(frozen=True)
class H2OPlus(H2O):
    """segment: tokens, or the published rules for n tokens of prompt: "auto" (128e6 / n^1.05, 20
    above 150,000), "auto_70b" (2e5 / n).
    """

    cut: str = "prefill"
    segment: int | str = 500

    own_prefill = True
    in_parts = False  # segments are counted from the prompt's beginning

    def __post_init__(self):
        super().__post_init__()
        if self.segment not in AUTO:
            whole("segment", self.segment, 1)
        if self.cut != "prefill":
            raise SettingError(
                f"cut: found {self.cut!r}, expected 'prefill' (h2o_plus cuts while it reads)"
            )

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "h2o_plus"

    def default_budget(self):
        """The paper's 30%."""
        return {"share": 0.3}

    def segment_of(self, length):
        """Tokens of a segment of a prompt that ends at `length`."""
        if self.segment == "auto":
            return 20 if length > 150_000 else max(1, int(128_000_000 // length**1.05))
        return max(1, 200_000 // length) if self.segment == "auto_70b" else self.segment

    def runtime(self, setup):
        """The store of one session."""
        return H2OPlusRuntime(self, setup)


@dataclass
class Under:
    """A layer under way through a prompt: rows kept (None: none yet), first position of the
    segment, scores [Hkv, G, held + segment].
    """

    rows: object
    since: int
    scores: object = field(default=None, repr=False)


class H2OPlusRuntime(AccumulatingRuntime):
    """Segments of a chunk one after the other, each layer for itself; nothing holds before
    `advance`.
    """

    def begin_prefill(self, start, stop, more=False):
        """Every layer begins with what it has kept."""
        self.reading, self.total, self.pending, self.start = True, stop, {}, start
        self.budget, self.segment = (
            self.method.budget(self.plan, stop),
            self.method.segment_of(stop),
        )
        layers = self.sequences[0].layers
        self.under = [
            Under(layers[n][0] if layers else None, self.sequences[0].since)
            for n in range(self.plan.num_layers)
        ]
        for under in self.under:
            under.scores = under.rows.scores[:, :, : under.rows.held] if under.rows else None

    def prefill_attend(self, layer, q, bank, start):
        """A chunk, cut at the ends of segments."""
        self.bank = bank
        # the last query once more, for its output: it was answered before the cut
        if layer in self.pending:
            return self.pending[layer][1]
        under, out, at, stop = self.under[layer], [], start, start + q.shape[1]
        while at < stop:
            end = min(stop, self.start + ((at - self.start) // self.segment + 1) * self.segment)
            k, v = (torch.cat(parts, 1) for parts in zip(*self._rows(layer, under, end)))
            first, part = k.shape[1] - (end - at), q[:, at - start : end - start]
            out.append(
                prefill_dense(part, k[None], v[None], first, self.scale, backend=self.setup.backend)
            )
            newest = prefill_dense(
                part[:, -1:],
                k[None],
                v[None],
                k.shape[1] - 1,
                self.scale,
                backend=self.setup.backend,
            )
            new = self.added(0, layer, 0, part[0], k, first, at)
            if under.scores is not None:
                new[:, :, : under.scores.shape[2]] += under.scores
            under, at = replace(under, scores=new), end
            if (end - self.start) % self.segment == 0:
                under = self._cut(layer, under, k, v, end)
        self.pending[layer] = under, newest
        return torch.cat(out, 1)

    def _rows(self, layer, under, end):
        """[(k, v)] [Hkv, T, D]: what is kept, then the segment up to `end`."""
        fresh = tuple(t[0, :, under.since : end] for t in self.bank.kv(layer))
        return (
            [(under.rows.k[:, : under.rows.held], under.rows.v[:, : under.rows.held]), fresh]
            if under.rows
            else [fresh]
        )

    def _cut(self, layer, under, k, v, end):
        """What is left of a layer after a segment that ends at `end`."""
        positions = torch.arange(under.since, end, dtype=torch.int32, device=k.device).expand(
            len(k), -1
        )
        if under.rows:
            positions = torch.cat([under.rows.positions[:, : under.rows.held], positions], 1)
        scores = k.new_zeros(len(k), self.setup.config.group, k.shape[1], dtype=torch.float32)
        if under.scores is not None:
            scores[:, :, : under.scores.shape[2]] = under.scores
        index = best(self.keys(scores, positions, end, self.budget), positions, self.budget)
        rows = Rows.gather(
            slice(0, self.heads), k, v, positions, scores, index, self.method.most(self.budget)
        )
        return Under(rows, end, rows.scores[:, :, : rows.held])

    def commit(self, b, sequence, count):
        """A chunk holds from here on."""
        if not self.reading:
            super().commit(b, sequence, count)
            return
        for layer, (under, _) in self.pending.items():
            self.under[layer] = under

    def end_prefill(self, length, step=None):
        """The last segment, whole or not, is cut now."""
        if step is None:
            return
        if not self.reading:
            self.begin_prefill(self.sequences[0].length, length)
        self.reading, self.bank, sequence = False, step.bank, self.sequences[0]
        for layer, under in enumerate(self.under):
            if under.since < length:
                k, v = (torch.cat(parts, 1) for parts in zip(*self._rows(layer, under, length)))
                self.under[layer] = self._cut(layer, under, k, v, length)
        sequence.layers = [[under.rows] for under in self.under]
        sequence.length = sequence.since = sequence.prompt = length
        sequence.budgets = self.method.budgets(self.plan, length)
        self.under = []
