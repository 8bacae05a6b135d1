"""Quest: pages of keys with their elementwise extremes; a step reads, per K/V head, the pages whose
bound on the logit is largest.

Source: Quest (Tang et al., ICML 2024), section 3, and mit-han-lab/Quest; METHODS.md row `quest`.
Everything stays on the device and prompts are read densely. Published: pages of 16 tokens, the
first two layers dense, at least three pages, and, as in its kernels, the newest page always read
and counted. Its code knows one K/V head per query head; over a group the bounds are reduced by
`gqa_reduce` (METHODS.md suggests the maximum) to one page list per K/V head.
"""

from dataclasses import dataclass

import torch

from engine.methods.base import Method, Runtime
from engine.methods.select.base import Budgeted, layers_apart
from engine.methods.select.pages import REDUCTIONS, PageExtremes
from engine.methods.settings import choice, whole
from engine.plan.layers import Role
from kernels.sparse_decode import decode_sparse
from kernels.topk import select_topk

LEAST = 3  # pages


@dataclass(frozen=True)
class Quest(Budgeted, Method):
    """tokens | share: the budget, at most one (default 2048, as in the paper's end-to-end figures);
    share is of the bank's length at the end of the latest prefill. page: tokens of a page.
    dense_layers: first layers that read everything. gqa_reduce: how the bounds of a group's query
    heads become one: "max" | "mean" | "sum".
    """

    tokens: int | None = None
    share: float | None = None
    page: int = 16
    dense_layers: int = 2
    gqa_reduce: str = "max"

    def __post_init__(self):
        self.check_budget()
        whole("page", self.page, 1)
        whole("dense_layers", self.dense_layers, 0)
        choice("gqa_reduce", self.gqa_reduce, REDUCTIONS)

    def plan(self, config):
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself."""
        return layers_apart(config.num_layers, range(self.dense_layers, config.num_layers))

    def packs(self, plan):
        """None: every layer and K/V head has pages of its own, so no rows travel together."""
        return ()

    def pages(self, length):
        """Pages that a step reads, the newest included, where the bank held `length` tokens at the
        end of the latest prefill.
        """
        return max(LEAST, self.budget(length) // self.page)

    def budget_capacity(self, plan, capacity):
        """Rows of the most pages."""
        return min(capacity, self.pages(capacity) * self.page) if plan.sparse_layers else 0

    def runtime_bytes(self, plan, capacity, config, size):
        """Extremes and bounds (PageExtremes), and the chosen pages of every layer and K/V head."""
        layers = len(plan.sparse_layers)
        chosen = 4 * layers * config.num_kv_heads * (self.pages(capacity) - 1)
        return chosen + PageExtremes.bytes_of(layers, self.page, capacity, config, size)

    def runtime(self, setup):
        """Page extremes of one session."""
        return QuestRuntime(self, setup)


class QuestRuntime(Runtime):
    """chosen int32 [sparse layers, B * Hkv, pages]: pages of the last step; older: whole pages
    before the newest one, per sequence.
    """

    capturable = False  # which pages are new is the host's knowledge

    def __init__(self, method, setup):
        super().__init__(method, setup)
        layers, heads = setup.plan.sparse_layers, setup.batch * setup.config.num_kv_heads
        options = dict(dtype=torch.int32, device=setup.device)
        self.extremes = PageExtremes(layers, method.page, setup)
        self.chosen = torch.full(
            (len(layers), heads, method.pages(setup.capacity) - 1), -1, **options
        )
        self.counts = torch.zeros(heads, **options)
        self.pages, self.older = method.pages(0), [0] * setup.batch

    @property
    def nbytes(self):
        """Bytes of extremes, bounds and chosen pages."""
        return self.extremes.nbytes + self.chosen.numel() * 4

    @property
    def k(self):
        """Rows that a step reads at most."""
        return self.pages * self.method.page

    def begin_prefill(self, start, stop, more=False):
        """Rows from `start` on are about to be written."""
        self.extremes.forget(start)

    def end_prefill(self, length, step=None):
        """Fix the budget for the answer that follows."""
        self.pages = self.method.pages(length)

    def snapshot(self):
        """The budget: all else follows from the bank."""
        return self.pages

    def restore(self, state, length):
        """Bring the budget back."""
        self.pages = state

    def forget(self, length):
        """Pages from `length` on are not what they were."""
        self.extremes.forget(length)

    def attend(self, layer, q, step):
        """Everything in the dense layers and while the budget covers the bank, else the pages with
        the largest bounds and the newest.
        """
        if self.setup.plan.roles[layer] is not Role.SPARSE:
            return self.attend_dense(layer, q, step)
        size, lengths = self.method.page, step.visible.tolist()
        k, v = step.bank.kv(layer, step.bucket)
        heads, chosen = k.shape[1], self.chosen[self.extremes.at[layer]]
        self.extremes.learn(layer, k, lengths)
        self.older = [(n - 1) // size for n in lengths]
        if max(self.older) < self.pages:
            return self.attend_dense(layer, q, step)
        bounds = self.extremes.bound(layer, q[:, -1], self.older, self.method.gqa_reduce)
        older = torch.tensor(self.older, dtype=torch.int32).to(q.device)
        stop = older.repeat_interleave(heads)
        select_topk(
            bounds,
            torch.zeros_like(stop),
            stop,
            torch.full_like(stop, self.pages - 1),
            chosen,
            self.counts,
            backend=self.setup.backend,
        )
        return decode_sparse(
            q,
            k,
            v,
            self._rows(chosen).view(len(lengths), heads, -1),
            self.counts[::heads] * size,
            older * size,
            step.visible,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
        )

    def _rows(self, chosen):
        """Rows of chosen pages [heads, n] -> int32 [heads, n * page]."""
        size = self.method.page
        return (
            chosen[:, : self.pages - 1, None] * size
            + torch.arange(size, dtype=torch.int32, device=chosen.device)
        ).flatten(1)

    def tail_first(self, step):
        """First row of the newest page, [B] int32."""
        return (step.visible - 1) // self.method.page * self.method.page

    def chosen_rows(self, layer):
        """Rows int64 [Hkv, k] that the last step read beside the newest page, sequence 0,
        ascending.
        """
        heads, pages = self.extremes.heads, self.older[0]
        if pages < self.pages:
            return torch.arange(pages * self.method.page, device=self.chosen.device).expand(
                heads, -1
            )
        return self._rows(self.chosen[self.extremes.at[layer], :heads]).long()

    def selections(self):
        """{sparse layer: rows that any K/V head read in the last step beside the newest page,
        ascending}, sequence 0.
        """
        return {layer: self.chosen_rows(layer).unique().cpu() for layer in self.extremes.at}

    def rows_read(self, n):
        """All rows while the budget covers them, else whole pages and what the newest holds."""
        size, older = self.method.page, (n - 1) // self.method.page
        sparse = n if older < self.pages else (self.pages - 1) * size + n - older * size
        return [sparse if role is Role.SPARSE else n for role in self.setup.plan.roles]
