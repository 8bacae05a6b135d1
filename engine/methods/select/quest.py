"""Quest: pages of K with their elementwise extremes; a step reads, per K/V head, the pages whose
bound on the logit is largest.

Source: Quest (Tang et al., ICML 2024), section 3, and mit-han-lab/Quest. Prompts are read densely.
Published: pages of 16 tokens, the first two layers dense, at least three pages, and, as in its
kernels, the newest page always read and counted. Its code knows one K/V head per query head; over a
group the bounds are reduced by `gqa_reduce` to one page list per K/V head. Where a layer lives in
host memory, the extremes of its pages are on the device, made while its K is there too, and a step
brings over the pages that its heads choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer, one_of
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from kernels.launch.on_device import on_device
from kernels.rows.forms import unpack_keys
from kernels.select.page_bounds import REDUCTIONS, choose_pages, chooses, page_bounds
from kernels.select.topk import select_topk

LEAST_PAGES = 3
AT_ONCE = 1024  # pages learnt or bounded at a time: extremes in float32 are 1 MB per K/V head


@dataclass(frozen=True)
class Quest(Budgeted):
    """Budget as Budgeted's, in whole pages. page: tokens of a page. dense_layers: first layers that
    read everything. gqa_reduce: how the bounds of a group's query heads become one: "max" | "mean"
    | "sum".
    """

    full_prompts = True

    page: int = 16
    dense_layers: int = 2
    gqa_reduce: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("page", self.page, 1)
        integer("dense_layers", self.dense_layers, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself."""
        layers = config.num_layers
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(layers, range(self.dense_layers, layers), *others)

    def budget(self, length: int) -> int:
        """Whole pages, the newest included."""
        return max(LEAST_PAGES, super().budget(length) // self.page) * self.page

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """low, high: extremes of every page (2 / page of K); bounds of one layer's pages; chosen
        pages.
        """
        layers, heads = len(plan.sparse_layers), config.num_kv_heads
        pages, most = -(-capacity // self.page), self.budget(capacity) // self.page - 1
        extremes = Buffer((layers, batch, heads, pages, config.head_dim))
        return {
            "low": extremes,
            "high": extremes,
            "bounds": Buffer((batch * heads, pages), torch.float32),
            "pages": Buffer((layers, batch * heads, most), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Every K/V head's pages come over apart, the newest one lies on the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        rows = config.num_kv_heads * needs.selected
        # bounds of capped logits have the order of those of the logits
        return replace(
            needs,
            whole_layer=False,
            step_rows=rows,
            sliding=True,
            capped=True,
            recurrent=True,
            latent=True,
        )

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The past, and what the chunk before left of a page."""
        return begin + (begin % self.page if first is None else 0)

    def runtime(self, setup: Setup) -> Runtime:
        return QuestRuntime(self, setup)


class QuestRuntime(Selecting):
    """A page's extremes are computed when a step first needs it (of a layer in host memory when its
    chunk is read), and those of the newest page in every step, so that nothing has to be undone. No
    CUDA graph: the host knows which pages are new.
    """

    method: Quest
    low: torch.Tensor
    high: torch.Tensor
    bounds: torch.Tensor
    pages: torch.Tensor

    def __init__(self, method: Quest, setup: Setup):
        super().__init__(method, setup)
        self._known = [[0] * setup.batch for _ in self.plan.groups]  # tokens that extremes cover

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.truncate(start)

    def truncate(self, length: int) -> None:
        self._known = [[min(tokens, length) for tokens in group] for group in self._known]

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Full attention, and the extremes of what will lie in host memory. The model's last layer,
        which comes in the last chunk only, is learnt by the first step.
        """
        group = self.plan.group_of[layer]
        if group is not None and bank.on_host(layer) and self._known[group][0] == start:
            self._learn_chunk(group, layer, bank, start, start + q.shape[1])
        return super().attend_prompt(layer, q, bank, start)

    @property
    def reads_whole_prompts(self) -> bool:
        """Extremes may as well be made by the first step."""
        return True

    def _learn_chunk(self, group: int, layer: int, bank: Bank, start: int, stop: int) -> None:
        """Make the extremes of the pages that a chunk at positions start .. stop-1 completes."""
        size, low, high = self.method.page, self.low[group, 0], self.high[group, 0]
        first, last = start // size, stop // size
        parts = [bank.newest_rows(layer, start, stop)[0][0]]
        if start % size:
            parts.insert(0, bank.rows(layer, first * size, start)[0][0])
        k = torch.cat([unpack_keys(part, low.dtype) for part in parts], 1)
        pages = k[:, : (last - first) * size].unflatten(1, (-1, size))
        low[:, first:last], high[:, first:last] = pages.amin(2), pages.amax(2)
        self._known[group][0] = stop

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, size, lengths = self.plan.group_of[layer], self.method.page, step.lengths
        assert group is not None
        older, tail = [(n - 1) // size for n in lengths], self.tail_start(step)
        read, pages = self.k // size - 1, self.pages[group]
        heads = len(pages) // len(lengths)
        if self._in_one_call(layer, q, step):
            counts = self.choose(group, layer, q[:, -1], step, lengths)
            if max(older) <= read:
                return Selection(None, None, tail)
            index = pages[:, :read].view(len(lengths), heads, read)
            return Selection(index, counts[::heads], tail, unit=size)
        self.learn(group, layer, step.bank, lengths)
        if max(older) <= read:
            return Selection(None, None, tail)
        self.bound(group, q[:, -1], older)
        stop = on_device(older, torch.int32, q.device).repeat_interleave(heads)
        counts = torch.empty_like(stop)
        select_topk(
            self.bounds,
            torch.zeros_like(stop),
            stop,
            torch.full_like(stop, read),
            pages,
            counts,
            backend=self.setup.backend,
        )
        index = pages[:, :read].view(len(lengths), heads, read)
        return Selection(index, counts[::heads], tail, unit=size)

    def _in_one_call(self, layer: int, q: torch.Tensor, step: Step) -> bool:
        """Whether a C++ kernel does what `learn`, `bound` and the choice do, where the rows lie."""
        if step.bank.on_host(layer) or q.dtype != self.setup.dtype:
            return False
        return chooses(self.setup.backend, step.bank.kv(layer, step.bucket)[0], self.low.dtype)

    def choose(
        self, group: int, layer: int, q: torch.Tensor, step: Step, lengths: list[int]
    ) -> torch.Tensor:
        """The pages that queries q [B, H, D] choose, into self.pages: counts int32 [B * Hkv]."""
        k, size, pages = step.bank.kv(layer, step.bucket)[0], self.method.page, self.pages[group]
        counts = torch.empty(len(pages), dtype=torch.int32)
        heads = len(pages) // len(lengths)
        for b, n in enumerate(lengths):
            own = slice(b * heads, (b + 1) * heads)
            extremes = self.low[group, b], self.high[group, b]
            places = self.bounds[own], pages[own], counts[own]
            how, known = self.method.gqa_reduce, self._known[group][b]
            choose_pages(q[b], k[b], *extremes, *places, known, n, size, self.k // size - 1, how)
            self._known[group][b] = n
        return counts

    def learn(self, group: int, layer: int, bank: Bank, lengths: list[int]) -> None:
        """Bring the extremes of a layer's first `lengths` tokens up to date."""
        size = self.method.page
        for b, n in enumerate(lengths):
            low, high = self.low[group, b], self.high[group, b]
            whole = n // size
            for first in range(min(self._known[group][b], n - 1) // size, whole, AT_ONCE):
                stop = min(whole, first + AT_ONCE)
                k = bank.rows(layer, first * size, stop * size)[0][b]
                pages = unpack_keys(k, low.dtype).unflatten(1, (-1, size))
                low[:, first:stop], high[:, first:stop] = pages.amin(2), pages.amax(2)
            if n % size:
                newest = unpack_keys(bank.rows(layer, whole * size, n)[0][b], low.dtype)
                low[:, whole], high[:, whole] = newest.amin(1), newest.amax(1)
            self._known[group][b] = n

    def bound(self, group: int, q: torch.Tensor, pages: list[int]) -> None:
        """Fill self.bounds for the first pages[b] pages of every sequence and K/V head. q [B, H,
        D].
        """
        for b, bounds in enumerate(self.bounds.view(len(pages), -1, self.bounds.shape[1])):
            for first in range(0, pages[b], AT_ONCE):
                part = slice(first, min(pages[b], first + AT_ONCE))
                low, high = self.low[group, b, :, part], self.high[group, b, :, part]
                bounds[:, part] = page_bounds(q[b], low, high, self.method.gqa_reduce)

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest page."""
        return (step.visible - 1) // self.method.page * self.method.page

    def choosing_bytes(self, n: int) -> int:
        """The extremes of every page but the newest, where the budget does not cover them."""
        config, older = self.setup.config, (n - 1) // self.method.page
        row = 2 * config.num_kv_heads * config.head_dim * self.low.element_size()
        chooses = older > self.k // self.method.page - 1
        return len(self.plan.sparse_layers) * older * row if chooses else 0

    def tokens_read(self, n: int) -> int:
        """Everything while the budget covers it, else whole pages and what the newest holds."""
        newest = n - (n - 1) // self.method.page * self.method.page
        return min(n, self.k - self.method.page + newest)
