"""TidalDecode: one layer near the bottom scores everything and keeps its top-k, a correction layer
chooses anew, all others reuse.

Source: TidalDecode (Yang et al., 2024), section 3, and DerrickYLJ/TidalDecode
(llama_tidal_attention_forward); METHODS.md row `tidaldecode`. Published: layers 0 and 1 dense,
layer 2 chooses, the correction layer is 13 of 32 for Llama-3 (9 for Llama-2), candidates are all
tokens, generated ones included, k between 128 and 4096, prompts are read densely, nothing is
offloaded. Every query head has a choice of its own (its K/V heads are repeated): gqa_reduce="none".
"""

from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.base import Method, Runtime
from engine.methods.select.base import Budgeted
from engine.methods.settings import choice, whole
from engine.plan.layers import Role, layer_plan
from kernels.prefill import attend_rows
from kernels.reference import attend
from kernels.sparse_decode import decode_sparse
from kernels.topk import select_topk

AT_ONCE = 4096  # rows scored at a time: K in float32 is 2 MB a head at head_dim 128
REDUCTIONS = ("none", "max", "mean", "all")


@dataclass(frozen=True)
class TidalDecode(Budgeted, Method):
    """tokens | share: k, at most one (default 2048); share is of the bank's length at the end of
    the latest prefill. select_layer: the first layer that chooses; correction_layer: the second,
    None for 13 of 32 at the model's depth. gqa_reduce: "none": every query head reads its own k;
    "max" | "mean" of a group's logits: a choice per K/V head; "all": the maximum over all heads,
    one choice (as OmniKV's).
    """

    tokens: int | None = None
    share: float | None = None
    select_layer: int = 2
    correction_layer: int | None = None
    gqa_reduce: str = "none"

    def __post_init__(self):
        self.check_budget()
        whole("select_layer", self.select_layer, 0)
        if self.correction_layer is not None:
            whole("correction_layer", self.correction_layer, self.select_layer + 1)
        choice("gqa_reduce", self.gqa_reduce, REDUCTIONS)

    def plan(self, config):
        """FULL below the first choice, FILTER where one is made, SPARSE elsewhere; nothing waits,
        for nothing is loaded.
        """
        layers, correction = config.num_layers, self.correction_layer
        if correction is not None and correction >= layers:
            raise SettingError(
                f"correction_layer: found {correction}, expected at most {layers - 1} (the model has {layers} layers)"
            )
        if correction is None:
            correction = max(self.select_layer + 2, round(layers * 13 / 32))
        return layer_plan(
            layers,
            tuple(layer for layer in (self.select_layer, correction) if layer < layers),
            wait_layers=0,
        )

    def packs(self, plan):
        """None: heads choose apart, so no rows travel together."""
        return ()

    def choices(self, config):
        """Choices that one layer makes: one per query head, per K/V head, or one."""
        return {"none": config.num_heads, "all": 1}.get(self.gqa_reduce, config.num_kv_heads)

    def budget_capacity(self, plan, capacity):
        """Most rows of a choice."""
        return min(capacity, self.budget(capacity)) if plan.sparse_layers else 0

    def runtime_bytes(self, plan, capacity, config, size):
        """One score per row and choice, shared by the choosing layers, and their chosen rows."""
        room = self.budget_capacity(plan, capacity)
        return 4 * self.choices(config) * (capacity + len(plan.groups) * room) if room else 0

    def runtime(self, setup):
        """Choices of one session."""
        return TidalRuntime(self, setup)


class TidalRuntime(Runtime):
    """scores float32 [B * choices, capacity]; index int32 [B, choices, K] a group. Nothing outlives
    a step but the budget.
    """

    capturable = False  # whether everything is read is the host's knowledge

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.plan, room, count = (
            setup.plan,
            method.budget_capacity(setup.plan, setup.capacity),
            method.choices(setup.config),
        )
        options = dict(dtype=torch.int32, device=setup.device)
        self.scores = torch.empty(
            setup.batch * count, setup.capacity if room else 0, device=setup.device
        )
        self.index = [
            torch.full((setup.batch, count, room), -1, **options) for _ in self.plan.groups
        ]
        self.counts = torch.zeros(setup.batch * count, **options)
        self.k, self.lengths = method.budget(0), []

    @property
    def nbytes(self):
        """Bytes of scores and chosen rows."""
        return sum(t.numel() * 4 for t in (self.scores, *self.index))

    def end_prefill(self, length, step=None):
        """Fix k for the answer that follows."""
        self.k = self.method.budget(length)

    def snapshot(self):
        """k: all else is made anew in every step."""
        return self.k

    def restore(self, state, length):
        """Bring k back."""
        self.k = state

    def attend(self, layer, q, step):
        """What the role says; everything while k covers the bank."""
        role = self.plan.roles[layer]
        if layer == 0:
            self.lengths = step.visible.tolist()
        if role is Role.FULL or max(self.lengths) <= self.k:
            return self.attend_dense(layer, q, step)
        group = self.plan.group_of[layer]
        if role is Role.SPARSE:
            return self._attend_chosen(
                q, *step.bank.kv(layer, step.bucket), self.index[group], step
            )
        if self.plan.groups[group].layers:
            self._choose(q[:, -1], step.bank.kv(layer, step.bucket)[0], self.index[group])
        return self.attend_dense(layer, q, step)

    def _choose(self, q, k, index):
        """The k rows of largest logit of every choice, into index. q [B, H, D]; k [B, Hkv, T, D]."""
        for b, (n, scores) in enumerate(
            zip(self.lengths, self.scores.view(len(q), index.shape[1], -1))
        ):
            for first in range(0, n, AT_ONCE):
                part = slice(first, min(n, first + AT_ONCE))
                scores[:, part] = reduced_logits(q[b], k[b, :, part], self.method.gqa_reduce)
        stop = (
            torch.tensor(self.lengths, dtype=torch.int32)
            .to(q.device)
            .repeat_interleave(index.shape[1])
        )
        select_topk(
            self.scores,
            torch.zeros_like(stop),
            stop,
            torch.full_like(stop, self.k),
            index.view(len(stop), -1),
            self.counts,
            backend=self.setup.backend,
        )

    def _attend_chosen(self, q, k, v, index, step):
        counts = self.counts[:: index.shape[1]].contiguous()
        if index.shape[1] in (1, k.shape[1]):
            return decode_sparse(
                q,
                k,
                v,
                index,
                counts,
                step.visible,
                step.visible,
                self.scale,
                scratch=self.setup.scratch,
                backend=self.setup.backend,
            )
        out, own = (
            torch.empty_like(q),
            torch.arange(index.shape[1], device=q.device).unsqueeze(1)
            // (index.shape[1] // k.shape[1]),
        )
        for b, kept in enumerate(counts.tolist()):
            rows = index[b, :, :kept].long()
            # [H, kept, D]: every query head's own rows
            chosen = k[b][own, rows], v[b][own, rows]
            if self.setup.backend == "reference":
                out[b], _ = attend(q[b], *chosen, [kept] * q.shape[1], self.scale)
            else:
                out[b : b + 1] = attend_rows(
                    q[b : b + 1], *(rows[None] for rows in chosen), self.scale
                )[0]
        return out

    def tail_first(self, step):
        """Nothing is read beside the choice: [B] int32, the length."""
        return step.visible

    def chosen_rows(self, layer):
        """Rows int64 [choices, k] that the last step read in a layer, sequence 0, ascending."""
        kept = min(self.k, self.lengths[0])
        if kept == self.lengths[0]:
            return torch.arange(kept, device=self.scores.device).expand(
                self.method.choices(self.setup.config), -1
            )
        return self.index[self.plan.group_of[layer]][0, :, :kept].long()

    def selections(self):
        """{choosing layer: rows that any head chose in the last step, ascending}, sequence 0."""
        return {
            group.filter_layer: self.chosen_rows(group.filter_layer).unique().cpu()
            for group in self.plan.groups
            if group.layers
        }

    def rows_read(self, n):
        """At most: k per choice, so that a K/V head whose query heads choose apart reads up to
        their number times k.
        """
        config = self.setup.config
        apart = config.num_heads // config.num_kv_heads if self.method.gqa_reduce == "none" else 1
        return [min(n, self.k * apart) if role is Role.SPARSE else n for role in self.plan.roles]


def reduced_logits(q, k, reduce):
    """Unscaled logits of one query on rows, as the choice ranks them, float32. q [H, D]; k [Hkv, n,
    D] -> [H, Hkv or 1, n].
    """
    logits = q.float().view(k.shape[0], -1, q.shape[-1]) @ k.float().transpose(1, 2)
    if reduce == "none":
        return logits.flatten(0, 1)
    if reduce == "all":
        return logits.flatten(0, 1).amax(0, keepdim=True)
    return logits.amax(1) if reduce == "max" else logits.mean(1)
