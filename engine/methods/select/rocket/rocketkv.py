"""RocketKV in its form for several turns: a prompt's end chooses the rows that its answer may read,
a step the pages among them; the bank keeps every row, and the next turn chooses anew.

Source: Behnam et al., RocketKV, ICML 2025 (arXiv 2502.14051), section 3: RocketKV-MT. Stage 1 is
SnapKV with one choice for the query heads of a K/V head: the sum of the softmax of the last 32
queries, added up over a group, pooled by the maximum over 63 neighbours. Stage 2 pages what was
kept, with the extremes of each channel, and bounds a page's logits by the channels in which the
query is largest; the best pages are attended to exactly. The compression of a budget is split
evenly between the stages: of n tokens with a budget of k, stage 1 keeps sqrt(n k), the geometric
mean of both. Prompts are read densely.

Differs: pages hold 16 kept rows and bounds read a quarter of the channels at any compression (there
both follow from it). The window, what is left of a page before it, and the newest `answer` tokens
are exact and read beside the budget; older tokens of an answer make pages of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from engine.bank.base import Bank, Step, of_heads
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import require_room
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.methods.select.index.base import REDUCTIONS, grouped, within_head_dim
from engine.methods.select.rocket.page_channels import extremes
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import MOST_WINDOW, Needs
from kernels.launch.on_device import on_device
from kernels.rows.forms import unpack_keys
from kernels.select.column_sums import column_sums
from kernels.select.topk import select_topk
from kernels.sketch.channel_bounds import Paged, Span, channel_bounds, choose_pages

AT_ONCE = 4096  # tokens of an answer that join the pages at a time


@dataclass(frozen=True)
class RocketKV(Budgeted):
    """Budget as Budgeted's, in whole pages, of tokens that a step chooses. keep: tokens of a prompt
    that stage 1 keeps for each K/V head, None for the geometric mean of prompt and budget. window:
    last queries of a prompt, which choose, and whose tokens are read; kernel: neighbours (odd)
    whose largest score a token has. page: kept rows of a page. channels: of the bounds, None for a
    quarter of them. answer: newest tokens of an answer that are read. dense_layers: first layers
    that read everything. gqa_reduce: how bounds of a group's query heads become one: "max" | "mean"
    | "sum".
    """

    full_prompts = True

    keep: int | None = None
    window: int = 32
    kernel: int = 63
    page: int = 16
    channels: int | None = None
    answer: int = 128
    dense_layers: int = 0
    gqa_reduce: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("page", self.page, 1, AT_ONCE)
        integer("window", self.window, 1, MOST_WINDOW)
        integer("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise SettingError(f"kernel: found {self.kernel}, expected an odd number")
        if self.channels is not None:
            integer("channels", self.channels, 1)
        integer("answer", self.answer, 1)
        integer("dense_layers", self.dense_layers, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS[:-1])
        if self.tokens is not None and self.tokens < self.page:
            raise SettingError(
                f"tokens: found {self.tokens}, expected at least a page of {self.page} tokens"
            )
        if self.keep is not None:
            integer("keep", self.keep, 1)
            least = self.page if self.tokens is None else self.tokens
            if self.keep < least:
                raise SettingError(
                    f"keep: found {self.keep}, expected at least the {least} tokens of a step"
                )

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself. Raises
        SettingError for more channels than a head has, or tokens above any context.
        """
        within_head_dim("channels", self.scored_channels(config), config)
        require_room(self, config)
        layers = config.num_layers
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(layers, range(self.dense_layers, layers), *others)

    def scored_channels(self, config: ModelConfig) -> int:
        """Channels that a bound reads."""
        return max(1, config.head_dim // 4) if self.channels is None else self.channels

    def budget(self, length: int) -> int:
        """Whole pages, at least one."""
        return max(1, super().budget(length) // self.page) * self.page

    def candidates(self, end: int) -> int:
        """Tokens among which stage 1 chooses where a prompt ends: whole pages before its window."""
        return max(0, end - self.window) // self.page * self.page

    def kept(self, end: int, budget: int) -> int:
        """How many of them it keeps, in whole pages."""
        wanted = math.isqrt(end * budget) if self.keep is None else self.keep
        pages = -(-max(wanted, budget) // self.page)
        return min(self.candidates(end), pages * self.page)

    def paged(self, end: int, n: int) -> int:
        """The first of n tokens that is in no page."""
        first = self.candidates(min(end, n))
        return first + max(0, n - self.answer - first) // self.page * self.page

    @property
    def most_exact(self) -> int:
        """The most tokens that are in no page."""
        return max(self.answer, self.window) + 2 * self.page

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """What stage 1 keeps, the extremes of pages (2 / page of K), and of one layer their bounds
        and the best pages; each layer's chosen tokens.
        """
        layers, heads, dim = len(plan.sparse_layers), config.num_kv_heads, config.head_dim
        pages, most = capacity // self.page, self.budget(capacity)
        most = min(capacity // self.page * self.page, most)
        extreme = Buffer((layers, batch, heads, dim, pages))
        rows = batch * heads
        return {
            "stayed": Buffer((layers, batch, heads, self.kept(capacity, most)), torch.int32),
            "low": extreme,
            "high": extreme,
            "bounds": Buffer((rows, pages if layers else 0), torch.float32),
            "pages": Buffer((rows, most // self.page if layers else 0), torch.int32),
            "index": Buffer((layers, batch, heads, most), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Each choice may bring rows of its own; a prompt's end reads a layer whole."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(
            needs,
            step_rows=config.num_kv_heads * needs.selected + self.most_exact,
            prompt_window=self.window,
            tail=self.most_exact,
            sliding=True,
            capped=True,
            recurrent=True,
        )

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """Scores of stage 1, per query head and per K/V head, and the rows that it keeps."""
        heads, dim = config.num_kv_heads, config.head_dim
        kept = self.kept(capacity, self.budget(capacity))
        return 4 * capacity * (config.num_heads + 4 * heads) + 2 * kept * heads * dim * itemsize

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The past, and at a prompt's end the whole layer, to choose from."""
        budget = self.budget(stop)
        chooses = self.kept(stop, budget) < self.candidates(stop) or self.candidates(stop) > budget
        return begin + (stop if stop == total and chooses else 0)

    def runtime(self, setup: Setup) -> Runtime:
        return RocketRuntime(self, setup)


class _Now(NamedTuple):
    """What layers of a step share: each sequence's pages, and the first position that is in none
    (0: it reads everything), the latter int32 [B] too; the tokens that it chooses, int32 [B].
    """

    spans: list[Span]
    stops: list[int]
    counts: torch.Tensor
    tail: torch.Tensor


class RocketRuntime(Selecting):
    """Stage 1 chooses at a prompt's end, and its choice is state: savepoints, forks and files have
    it. Extremes of pages are made then, and again by the first step where they are gone. No CUDA
    graph: the host knows which pages are new.
    """

    method: RocketKV
    stayed: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    bounds: torch.Tensor
    pages: torch.Tensor
    index: torch.Tensor

    def __init__(self, method: RocketKV, setup: Setup):
        super().__init__(method, setup)
        self.ends = [0] * setup.batch  # of the latest prompts, in tokens
        self.counts = [0] * setup.batch  # rows of each prompt that stage 1 kept
        # positions that each layer's pages cover; 0: none are made
        self._known = [[0] * setup.batch for _ in self.plan.groups]
        self._channels = method.scored_channels(setup.config)
        self.index.zero_()  # what is behind a list's last stays

    # ---------------------------------------------------------------- stage 1

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.truncate(start)

    def truncate(self, length: int) -> None:
        size = self.method.page
        for known in self._known:
            for b, stop in enumerate(known):
                first = self.method.candidates(self.ends[b])
                whole = first + max(0, length - first) // size * size
                known[b] = min(stop, whole) if length >= first else 0

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Choose the rows that the answer may read."""
        super().end_prompt(length, step)
        count, batch = self.method.kept(length, self.k), self.setup.batch
        if step is None:  # without queries stage 1 leaves nothing out
            count = self.method.candidates(length)
        self.ends, self.counts = [length] * batch, [count] * batch
        self._known = [[0] * batch for _ in self.plan.groups]
        if step is None or self._covers(0, length):
            return
        for layer in self.plan.sparse_layers:
            self._keep(layer, length, count, step)

    def _keep(self, layer: int, length: int, count: int, step: Step) -> None:
        """Stage 1 of a layer."""
        group, window = self.plan.group_of[layer], self.method.window
        assert group is not None
        k = step.bank.kv(layer, length)[0][:, :, :length]
        first = self.method.candidates(length)
        if count < first:
            queries = step.window_queries(layer, min(window, length))
            for b, q in enumerate(queries):
                given = length - len(q), self.scale
                sums = column_sums(q, k[b], *given, softmax=self.softmax[layer])
                pooling = self.method.kernel, 1, self.method.kernel // 2
                scores = functional.max_pool1d(sums.sum(1)[:, : length - window], *pooling)
                self._highest(scores[:, :first].contiguous(), self.stayed[group, b, :, :count])
        for b in range(len(k)):
            self._page(group, b, k[b : b + 1, :, :first], count)

    def _highest(self, scores: torch.Tensor, out: torch.Tensor) -> None:
        """Write positions of the highest of scores [Hkv, n] into out [Hkv, count], ascending."""
        found = torch.empty_like(out, memory_format=torch.contiguous_format)
        counts = torch.empty(len(out), dtype=torch.int32, device=out.device)
        stop, wanted = (torch.full_like(counts, n) for n in (scores.shape[1], out.shape[1]))
        first, backend = torch.zeros_like(counts), self.setup.backend
        select_topk(scores, first, stop, wanted, found, counts, backend=backend)
        out.copy_(found)

    def _page(self, group: int, b: int, k: torch.Tensor, count: int) -> None:
        """Make the pages of the `count` kept rows of k [1, Hkv, n, width], all it has before the
        window.
        """
        if count < k.shape[2]:
            k = of_heads(k, self.stayed[group, b : b + 1, :, :count])
        self._extend(group, b, 0, unpack_keys(k[0], self.low.dtype))
        self._known[group][b] = self.method.candidates(self.ends[b])

    def _extend(self, group: int, b: int, first: int, keys: torch.Tensor) -> None:
        """Put the extremes of whole pages, keys [Hkv, n, D], from page `first` on."""
        low, high = extremes(keys, self.method.page)
        stop = first + low.shape[2]
        self.low[group, b, :, :, first:stop] = low
        self.high[group, b, :, :, first:stop] = high

    # ---------------------------------------------------------------- stage 2

    def learn(self, group: int, layer: int, bank: Bank, lengths: list[int]) -> None:
        """Bring the pages of a layer up to date at so many tokens."""
        size = self.method.page
        for b, n in enumerate(lengths):
            first, count = self.method.candidates(self.ends[b]), self.counts[b]
            stop = self.method.paged(self.ends[b], n)
            if self._covers(b, n):
                continue
            if self._known[group][b] < first:
                k = bank.kv(layer, first)[0][b : b + 1, :, :first]
                self._page(group, b, k, count)
            for begin in range(max(first, self._known[group][b]), stop, AT_ONCE // size * size):
                last = min(stop, begin + AT_ONCE // size * size)
                k = bank.rows(layer, begin, last)[0][b]
                at = (count + begin - first) // size
                self._extend(group, b, at, unpack_keys(k, self.low.dtype))
            self._known[group][b] = max(stop, self._known[group][b])

    def _pages(self, b: int, n: int) -> int:
        """Pages of a sequence at n tokens."""
        first = self.method.candidates(self.ends[b])
        return (self.counts[b] + self.method.paged(self.ends[b], n) - first) // self.method.page

    def _covers(self, b: int, n: int) -> bool:
        """Whether a step at n tokens reads everything."""
        whole = self.counts[b] == self.method.candidates(self.ends[b])
        return whole and self._pages(b, n) * self.method.page <= self.k

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, now = self.plan.group_of[layer], step.once("pages", lambda: self._now(step))
        assert group is not None
        if now is None:
            return Selection(None, None, step.visible)
        if any(known < stop for known, stop in zip(self._known[group], now.stops)):
            self.learn(group, layer, step.bank, step.lengths)
        by, room = self._by[group], self.k // self.method.page
        if not choose_pages(by, q[:, -1], now.spans, room, self.setup.backend):
            self._choose(group, q[:, -1], now.spans, room)
        return Selection(by.chosen[:, :, : self.k], now.counts, now.tail)

    def _now(self, step: Step) -> _Now | None:
        """What a step's layers choose among; None where it reads everything."""
        size, room = self.method.page, self.k // self.method.page
        spans, stops = [], []
        for b, n in enumerate(step.lengths):
            covered, first = self._covers(b, n), self.method.candidates(self.ends[b])
            count = self.counts[b]
            kept, pages = count if count < first else 0, 0 if covered else self._pages(b, n)
            spans.append(Span(pages, kept, first - count))
            stops.append(0 if covered else self.method.paged(self.ends[b], n))
        if not any(span.pages for span in spans) and not any(stops):
            return None
        counts = [min(room, span.pages) * size for span in spans]
        device = step.visible.device
        tables = (on_device(numbers, torch.int32, device) for numbers in (counts, stops))
        return _Now(spans, stops, *tables)

    @cached_property
    def _by(self) -> list[Paged]:
        """What each group chooses by."""
        settings = self.method.page, self._channels, self.method.gqa_reduce
        tensors = zip(self.low, self.high, self.stayed, self.index)
        return [
            Paged(low, high, self.bounds, stayed, index, *settings)
            for low, high, stayed, index in tensors
        ]

    def _choose(self, group: int, q: torch.Tensor, spans: list[Span], room: int) -> None:
        """`choose_pages` by torch's operators, or on a GPU."""
        heads, backend, reduce = self.low.shape[2], self.setup.backend, self.method.gqa_reduce
        for b, found in enumerate(self.bounds.view(len(q), heads, -1)):
            low, high = (side[group, b, :, :, : spans[b].pages] for side in (self.low, self.high))
            sides = low, high, self._channels, found[:, : spans[b].pages]
            channel_bounds(grouped(q[b], heads), *sides, reduce, backend)
        pages = [span.pages for span in spans]
        stop = on_device(pages, torch.int32, q.device).repeat_interleave(heads)
        given = torch.zeros_like(stop), stop, torch.full_like(stop, room)
        select_topk(self.bounds, *given, self.pages, torch.empty_like(stop), backend=backend)
        for b in range(len(q)):
            own = self.pages.view(len(q), heads, -1)[b]
            self.index[group, b, :, : self.k] = self._tokens(group, b, own)

    def _tokens(self, group: int, b: int, pages: torch.Tensor) -> torch.Tensor:
        """Positions [Hkv, k] of the rows of pages int32 [Hkv, K], of which those behind a head's
        last are -1; theirs are any.
        """
        size, count = self.method.page, self.counts[b]
        first = self.method.candidates(self.ends[b])
        inside = torch.arange(size, device=pages.device, dtype=torch.int32)
        pages = pages[:, : self.k // size].clamp(min=0)
        rows = (pages.unsqueeze(2) * size + inside).flatten(1)
        later = rows + (first - count)
        if not count or count == first:
            return later
        kept = self.stayed[group, b, :, :count]
        return torch.where(rows < count, kept.gather(1, rows.clamp(max=count - 1).long()), later)

    # ---------------------------------------------------------------- what a step read

    def tail_start(self, step: Step) -> torch.Tensor:
        lengths = enumerate(step.lengths)
        tails = [
            0 if self._covers(b, n) else self.method.paged(self.ends[b], n) for b, n in lengths
        ]
        return on_device(tails, torch.int32, step.visible.device)

    def tokens_read(self, n: int) -> int:
        """The budget, or all that is kept, and what is in no page; everything while it covers
        that.
        """
        if self._covers(0, n):
            return n
        chosen = min(self.k, self._pages(0, n) * self.method.page)
        return chosen + n - self.method.paged(self.ends[0], n)

    def choosing_bytes(self, n: int) -> int:
        """The channels of all pages' extremes, where the budget does not cover everything."""
        if self._covers(0, n):
            return 0
        heads, pages = self.low.shape[2], self._pages(0, n)
        each = 2 * heads * self._channels * pages * self.low.element_size()
        return len(self.plan.sparse_layers) * each

    # ---------------------------------------------------------------- going back

    def state(self) -> Any:
        """k, where the latest prompt ended, and what stage 1 kept, int32 [layers, Hkv, n]: none
        where that is all.
        """
        count, whole = self.counts[0], self.method.candidates(self.ends[0])
        kept = self.stayed[:, 0, :, : count if count < whole else 0]
        return self.k, self.ends[0], kept.clone()

    def load(self, state: Any, length: int | None) -> None:
        for b in range(self.setup.batch):
            self._take(state, b)

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        self._take(other.state(), sequence)

    def _take(self, state: Any, b: int) -> None:
        """Take a state over as sequence b. Pages that are made of the same rows stay."""
        self.k, end, kept = state
        count = kept.shape[2] or self.method.candidates(end)
        mine = self.stayed[:, b, :, : kept.shape[2]]
        same = (end, count) == (self.ends[b], self.counts[b]) and torch.equal(mine, kept)
        self.ends[b], self.counts[b] = end, count
        mine.copy_(kept)
        for known in self._known:
            known[b] = known[b] if same else 0

    def restored(self, state: Any, length: int) -> Any:
        """As Runtime's; what was kept must be ascending positions of the prompt."""
        k, end, kept = state
        sizes = self.stayed.shape[0], self.stayed.shape[2]
        if type(k) is not int or type(end) is not int or not isinstance(kept, torch.Tensor):
            raise ValueError("state")
        first = self.method.candidates(end)
        if not 0 <= k <= max(self.needs.selected, self.method.budget(0)) or not 0 <= end <= length:
            raise ValueError("state")
        if kept.dtype != torch.int32 or kept.dim() != 3 or (*kept.shape[:2],) != sizes:
            raise ValueError("state")
        if kept.shape[2] not in (0, self.method.kept(end, k)):
            raise ValueError("state")
        if kept.numel() and not bool((kept.diff(dim=2) > 0).all() and (0 <= kept).all()):
            raise ValueError("state")
        if kept.numel() and int(kept.max()) >= first:
            raise ValueError("state")
        return k, end, kept.to(self.stayed.device)
