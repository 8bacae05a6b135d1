"""OmniKV: filter layers attend to everything and choose k tokens, the layers after them attend to
those and the tail.

Source: the OmniKV paper (ICLR 2025), section 4, Eq. 1-4; METHODS.md section 3, items 1-19. Every
key and value stays in the bank. `official=True` follows the published code instead, to the last
index (engine/methods/omnikv/official.py).
"""

import math
import warnings
from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.base import Method, Runtime, device_int
from engine.methods.omnikv.prefill import AT_ONCE, PrefillSelector
from engine.methods.omnikv.selector import SELECTORS, window_weights
from engine.methods.settings import choice, one_budget, portion, whole
from engine.plan.layers import PAPER_WAIT, Role, layer_plan, tail_start
from engine.plan.mem import budget_from_mem
from kernels.dense_decode import decode_dense
from kernels.sparse_decode import decode_sparse
from kernels.topk import select_topk
from kernels.window_scores import window_scores

DEFAULT_TOKENS = 2048


@dataclass(frozen=True)
class OmniKV(Method):
    """Settings of OmniKV; defaults as in DESIGN.md.

    filter_layers: ascending distinct layer numbers, or None (omnikv.json beside the model, the
    published table, else a spread). tokens | share | mem: the budget k, at most one; none means
    2048 tokens. share and mem are parts of the bank's length at the end of the latest prefill.
    selector: last | uniform | exponential over `window` queries. scores: None (softmax over every
    key the query sees) | "softmax" | "raw". wait_layers: layers after a filter that attend to
    everything (None: 1, or what the calibration says that filter_layers=None takes). tail: newest
    tokens that every layer sees. sink: first tokens that are always chosen, inside the budget.
    dense_below: contexts shorter than this run full attention; "auto" decides from the plan's byte
    counts, 0 never. prefill_ratio: r of chunked OmniKV-prefill, None for exact prefill: each block
    of `prefill_block` queries attends, in the sparse layers, to the r * prefill_block rows of the
    past that every `prefill_stride`-th query of the block scores highest; the prompt's last
    `prefill_dense_end` tokens are read densely. dense_layers: "block_sparse" makes FULL and WAIT
    layers read, in prefill, only the key blocks that carry `dense_mass` of the attention as
    `dense_estimator` ("pooled" | "antidiagonal") estimates it from `dense_stride` rows at a time
    (engine/methods/omnikv/block_sparse.py).
    """

    filter_layers: tuple[int, ...] | None = None
    tokens: int | None = None
    share: float | None = None
    mem: float | None = None
    selector: str = "last"
    window: int = 16
    scores: str | None = None
    wait_layers: int | None = None
    tail: int = 256
    sink: int = 0
    dense_below: int | str = "auto"
    official: bool = False
    prefill_ratio: int | None = None
    prefill_block: int = 256
    prefill_stride: int = 1
    prefill_dense_end: int = 512
    dense_layers: str = "dense"
    dense_mass: float = 0.9
    dense_stride: int = 8
    dense_estimator: str = "pooled"

    def __post_init__(self):
        if self.filter_layers is not None:
            object.__setattr__(self, "filter_layers", _filters(self.filter_layers))
        _budgets(self)
        choice("selector", self.selector, SELECTORS)
        choice("scores", self.scores, (None, "softmax", "raw"))
        whole("window", self.window, 1, 64)
        if self.wait_layers is not None:
            whole("wait_layers", self.wait_layers, 0)
        elif self.filter_layers is not None:
            object.__setattr__(self, "wait_layers", PAPER_WAIT)
        whole("tail", self.tail, 64)
        whole("sink", self.sink, 0)
        if not isinstance(self.official, bool):
            raise SettingError(f"official: found {self.official!r}, expected True or False")
        if self.dense_below != "auto":
            whole("dense_below", self.dense_below, 0)
        elif self.official:
            object.__setattr__(self, "dense_below", 0)
        if self.official and self.selector != "last" and self.scores == "raw":
            raise SettingError(
                "scores: found 'raw' with a windowed selector, expected None or 'softmax' (official)"
            )
        if self.prefill_ratio is not None:
            whole("prefill_ratio", self.prefill_ratio, 1)
        whole("prefill_block", self.prefill_block, 64)
        whole("prefill_stride", self.prefill_stride, 1)
        whole("prefill_dense_end", self.prefill_dense_end, 0)
        choice("dense_layers", self.dense_layers, ("dense", "block_sparse"))
        choice("dense_estimator", self.dense_estimator, ("pooled", "antidiagonal"))
        choice("dense_stride", self.dense_stride, (4, 8, 16, 32))
        portion("dense_mass", self.dense_mass)
        if self.official and self.dense_layers != "dense":
            raise SettingError(
                "dense_layers: the published code reads prompts densely; leave it out with official=True"
            )
        if self.official and self.prefill_ratio is not None:
            raise SettingError(
                "prefill_ratio: the published code has no sparse prefill; leave it out with official=True"
            )
        if self.official and (self.sink or self.mem is not None):
            raise SettingError(
                "official: sink and mem do not exist in the published code; leave them out"
            )
        if self.tokens is not None and self.sink > self.tokens:
            raise SettingError(
                f"sink: found {self.sink}, expected at most the budget of {self.tokens} tokens"
            )

    @property
    def kind(self):
        """What is ranked: "softmax" or "raw" scores (official: raw for `last`, softmax for the
        windows).
        """
        if self.scores is not None:
            return self.scores
        return "raw" if self.official and self.selector == "last" else "softmax"

    @property
    def selects(self):
        """Whether the slots of an offloaded group serve: the published code's tail grows without
        bound, and is gathered.
        """
        return not self.official

    def plan(self, config):
        """Layer plan for a model; filter_layers must have been resolved by then."""
        return layer_plan(config.num_layers, self.filter_layers or (), self.wait_layers)

    def part(self, plan):
        """Share of the bank that a budget by share or mem means, or None for a budget in tokens."""
        return budget_from_mem(self.mem, plan.dense_share) if self.mem is not None else self.share

    def budget(self, plan, length):
        """k when the bank held `length` tokens at the end of the latest prefill."""
        part = self.part(plan) if plan.sparse_layers else None
        if part is None:
            return DEFAULT_TOKENS if self.tokens is None else self.tokens
        return max(0 if self.official else 1, math.floor(part * length))

    def budget_capacity(self, plan, capacity):
        """Most tokens that a selection can hold in a bank of `capacity` tokens."""
        extra = self.window if self.official else 0
        return (
            max(1, min(capacity, self.budget(plan, capacity) + extra)) if plan.sparse_layers else 0
        )

    def runtime_bytes(self, plan, capacity, config, size):
        """Scores (4 B a token, and 4 B for every block that prefill_ratio scores at once) and one
        row of indices a group.
        """
        room = self.budget_capacity(plan, capacity)
        scores = 4 * capacity * (1 + AT_ONCE if self.prefill_ratio else 1)
        return scores + 4 * room * len(plan.groups) if room else 0

    def dense_below_tokens(self, plan, config, dtype_bytes, device_type, capacity):
        """Context length from which sparse layers read fewer bytes than scoring, gathering and
        reading cost; from byte counts only.

        A sparse layer reads k + tail rows instead of n (a CPU gathers by copy: k rows cost three
        passes); a filter layer writes and reads one float32 score per head and token, and one key
        per token for the top-k. A CPU's filter layers also convert or multiply every key apart from
        the fused attention, which counts as a second reading of it (measured, 160M shape in
        bfloat16 and float32: without it OmniKV with 4 sparse layers of 12 ran at 0.85x to 0.98x of
        full attention at 8192 tokens).
        """
        if self.dense_below != "auto":
            return self.dense_below
        sparse, filters = len(plan.sparse_layers), plan.count(Role.FILTER)
        if not sparse:
            return 0
        row = config.kv_bytes(dtype_bytes)
        on_cpu = device_type == "cpu"
        scoring = filters * (8 * config.num_heads + 12 + (row // 2 if on_cpu else 0))
        passes = 3 if on_cpu else 1
        per_token = sparse * row - scoring
        part = self.part(plan)
        if part is not None:
            per_token -= sparse * row * part * passes
            fixed = sparse * row * self.tail
        else:
            fixed = sparse * row * (self.budget(plan, capacity) * passes + self.tail)
        return math.ceil(fixed / per_token) if per_token > 0 else capacity + 1

    def check(self, plan):
        """Mem% must exceed what the dense layers take; a plan without sparse layers is legal and
        warned about.
        """
        if self.mem is not None and (plan.sparse_layers or self.mem < 1.0):
            budget_from_mem(self.mem, plan.dense_share)
        if not plan.sparse_layers:
            warnings.warn(
                f"OmniKV with filter_layers={self.filter_layers} and wait_layers={self.wait_layers} leaves no sparse layer "
                f"of {plan.num_layers}: every layer runs full attention",
                stacklevel=3,
            )

    @property
    def in_parts(self):
        """The published code reads a prompt in one call, and so do block-sparse dense layers: their
        calls' ends are dense.
        """
        return not (self.official or self.dense_layers != "dense")

    @property
    def last_part(self):
        """A prompt that is read sparsely is read densely at its end. (Parts that end at whole
        blocks are read as in one call.)
        """
        return self.prefill_dense_end if self.prefill_ratio else 0

    def check_prefill(self, start, stop):
        """official: one prompt per session (the published code breaks silently on a second), as
        long as its windows.
        """
        if not self.official:
            return
        if start:
            raise SettingError(
                "official: the published code knows one prompt per session; a second prefill is not supported"
            )
        least = 2 if self.selector == "last" else max(2, self.window - 1)
        if stop < least:
            raise SettingError(
                f"official: found a prompt of {stop} tokens, expected at least {least} "
                f"(the published code fails below)"
            )

    def runtime(self, setup):
        """Selection buffers of one session."""
        if self.official:
            from engine.methods.omnikv.official import OfficialRuntime

            return OfficialRuntime(self, setup)
        return OmniKVRuntime(self, setup)


class OmniKVRuntime(Runtime):
    """One session's selections. Buffers: scores [B, capacity] float32 shared by the filter layers,
    index [B, 1, K] int32 a group.
    """

    packed = True

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.plan = setup.plan
        self.window = 0 if method.selector == "last" else method.window
        self.alpha = window_weights(method.selector, method.window, setup.device)
        room = method.budget_capacity(self.plan, setup.capacity)
        options = dict(dtype=torch.int32, device=setup.device)
        self.scores = torch.empty(setup.batch, setup.capacity if room else 0, device=setup.device)
        self.index = [torch.full((setup.batch, 1, room), -1, **options) for _ in self.plan.groups]
        self.counts = [torch.zeros(setup.batch, **options) for _ in self.plan.groups]
        self.prefill = None
        if method.dense_layers != "dense" or method.prefill_ratio and self.plan.sparse_layers:
            self.prefill = PrefillSelector(method, setup)
        self.k_device = device_int(0, setup)
        self.zero = device_int(0, setup)
        # for a session that decodes before it has read anything
        self._set_k(method.budget(self.plan, 0))

    @property
    def nbytes(self):
        """Bytes of scores and indices."""
        own = sum(t.numel() * t.element_size() for t in (self.scores, *self.index))
        return own + (self.prefill.nbytes if self.prefill else 0)

    def begin_prefill(self, start, stop, more=False):
        """Tell the prefill selector how long the prompt is: its end is read densely."""
        if self.prefill:
            self.prefill.total = math.inf if more else stop

    def prefill_attend(self, layer, q, bank, start):
        """Exact, or by the r-ratio where it was asked for."""
        if self.prefill is None:
            return super().prefill_attend(layer, q, bank, start)
        return self.prefill.attend(layer, q, bank, start)

    def prefill_work(self, work, start, stop):
        """Operations of a prefill, those that the r-ratio saves left out."""
        return (
            work.parts(start, stop)
            if self.prefill is None
            else self.prefill.work(work, start, stop)
        )

    def end_prefill(self, length, step=None):
        """Fix k for the answer that follows."""
        self._set_k(self.method.budget(self.plan, length))

    def _set_k(self, k):
        self.k = k
        self.k_device.fill_(k)

    def attend(self, layer, q, step):
        """What the layer's role says: dense, dense and choose, or sparse over the group's
        selection.
        """
        role = self.plan.roles[layer]
        if role is Role.SPARSE:
            return self.attend_sparse(layer, q, step)
        if role is Role.FILTER and self.plan.groups[self.plan.group_of[layer]].layers:
            out = self.attend_and_select(layer, q, step)
            if self.packed:
                group = self.plan.group_of[layer]
                step.bank.fetch(
                    self.plan.groups[group].layers, self.index[group], self.counts[group]
                )
            return out
        return self.attend_dense(layer, q, step)

    def tail_first(self, step):
        """First position of the tail [B] int32: what every layer sees from there on."""
        return step.tail_start(self.method.tail)

    def chosen_rows(self, layer):
        """Positions int64 [k] that a sparse layer read in the last step beside the tail, sequence
        0.
        """
        group = self.plan.group_of[layer]
        return self.index[group][0, 0, : int(self.counts[group][0])].long()

    def attend_sparse(self, layer, q, step):
        """Attention over the group's selection and the tail."""
        group = self.plan.group_of[layer]
        rows = step.bank.selected(
            layer, self.index[group], self.counts[group], self.tail_first(step), step, self.packed
        )
        return decode_sparse(
            q, *rows, self.scale, scratch=self.setup.scratch, backend=self.setup.backend
        )

    def attend_and_select(self, layer, q, step):
        """A filter layer: attention to everything, and from the same scores the selection of its
        group.
        """
        group = self.plan.group_of[layer]
        k, v = step.bank.kv(layer, step.bucket)
        common = dict(scratch=self.setup.scratch, backend=self.setup.backend)
        scores = self.scores[:, : step.bucket]
        if self.window:
            out = decode_dense(q, k, v, step.visible, self.scale, **common)
            window_scores(
                step.window_queries(layer, self.window),
                k,
                step.visible,
                self.scale,
                self.alpha,
                self.method.kind,
                scores,
                **common,
            )
        else:
            out = decode_dense(
                q, k, v, step.visible, self.scale, scores=scores, kind=self.method.kind, **common
            )
        if self.method.sink:
            scores[:, : self.method.sink] = float("inf")  # always chosen, inside the budget
        select_topk(
            scores,
            self.zero,
            step.tail_start(self.method.tail),
            self.k_device,
            self.index[group][:, 0],
            self.counts[group],
            **common,
        )
        return out

    def warm(self, steps):
        """Choose for the prompt's last queries, so that their tokens are in the working sets before
        the first step asks.
        """
        if self.packed:
            for step in steps:
                for group in self.plan.groups:
                    if group.layers:
                        self.attend(
                            group.filter_layer, step.window_queries(group.filter_layer, 1), step
                        )
                        # race: the next choice would be written while this one is looked up
                        step.bank.wait_fetched(group.layers)

    def selections(self):
        """{filter layer: int64 [k] positions, ascending} of the last step, sequence 0."""
        found = {}
        for group, index, counts in zip(self.plan.groups, self.index, self.counts):
            if group.layers:
                found[group.filter_layer] = index[0, 0, : int(counts[0])].long().cpu()
        return found

    def selection_scores(self):
        """{filter layer: float32 [k]}: the last group's only, since the filter layers share one
        buffer of scores.

        Raw scores become shares of the selection (a softmax over it), so that a larger number
        always means more attention.
        """
        chosen = self.selections()
        if not chosen:
            return {}
        layer, positions = max(chosen.items())
        scores = self.scores[0, positions.to(self.scores.device)].cpu()
        scores = torch.softmax(scores, 0) if self.method.kind == "raw" else scores
        # a sink is chosen by an infinite score, whatever its score
        return {layer: scores.nan_to_num(0.0, posinf=0.0)}

    def rows_read(self, n):
        """Rows per layer at n tokens: n, or the chosen ones and the tail."""
        start = tail_start(n, self.method.tail)
        sparse = min(self.k, start) + n - start
        return [sparse if role is Role.SPARSE else n for role in self.plan.roles]

    def snapshot(self):
        """k is all that does not follow from the bank and the query ring."""
        return self.k

    def restore(self, state, length):
        """Bring back the k that held then."""
        self._set_k(state)

    def forget(self, length):
        """No step has chosen anything yet."""
        for counts in self.counts:
            counts.zero_()


def _filters(value):
    numbers = tuple(value) if isinstance(value, (tuple, list)) else value
    if (
        not isinstance(numbers, tuple)
        or not numbers
        or any(isinstance(x, bool) or not isinstance(x, int) for x in numbers)
    ):
        raise SettingError(
            f"filter_layers: found {value!r}, expected a non-empty tuple of layer numbers such as (2, 8, 18)"
        )
    if numbers[0] < 0 or any(a >= b for a, b in zip(numbers, numbers[1:])):
        raise SettingError(
            f"filter_layers: found {numbers}, expected distinct ascending numbers from 0 on"
        )
    return numbers


def _budgets(method):
    one_budget(method, "tokens", "share", "mem")
    if method.tokens is not None:
        whole("tokens", method.tokens, 0 if method.official else 1)
    for name in ("share", "mem"):
        if getattr(method, name) is not None:
            portion(name, getattr(method, name))
