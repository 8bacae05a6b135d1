"""OmniKV(official=True): the published research code's behaviour, to the last selected index, for
comparison number by number.

Differences from the engine's own OmniKV (METHODS.md 3.3, items 13-19): only prompt tokens are
scored, every generated token is tail; softmax runs over the scored keys only; a window's queries
are all rotated to the current position; prompt tokens inside the window are not scored but always
selected and count against the budget; a second prefill is refused. Plain torch, not capturable.
"""

import torch

from engine.methods.base import device_int
from engine.methods.omnikv.settings import OmniKVRuntime
from engine.model.rope import apply_rope
from engine.plan.layers import Role
from kernels.topk import select_topk


class OfficialRuntime(OmniKVRuntime):
    """Selection state of one session with one prompt."""

    packed = False  # its tail is everything generated, which no ring holds
    capturable = False  # the step's number decides shapes: it is read on the host

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.window = 0 if method.selector == "last" else method.window
        self.prompt = 0

    def end_prefill(self, length, step=None):
        """The prompt is what the one prefill read."""
        self.prompt = length
        self._set_k(self.method.budget(self.plan, length))

    def tail_first(self, step):
        """Everything generated is tail."""
        return device_int(self.prompt, self.setup)

    def attend_and_select(self, layer, q, step):
        """Selection from the prompt's rows, then attention to everything."""
        group = self.plan.group_of[layer]
        generated = int(step.visible[0]) - self.prompt
        forced = max(0, self.window - generated)
        scored = self.prompt - forced
        scores = self._scores(layer, q, step, scored)
        # a window chooses one at least, `last` may choose none
        k = max(1, self.k - forced) if self.window else self.k
        index, counts = self.index[group], self.counts[group]
        select_topk(
            scores,
            self.zero,
            device_int(scored, self.setup),
            device_int(k, self.setup),
            index[:, 0],
            counts,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
        )
        if forced:
            kept = int(counts[0])
            index[:, 0, kept : kept + forced] = torch.arange(
                scored, self.prompt, device=index.device, dtype=index.dtype
            )
            counts += forced
        return self.attend_dense(layer, q, step)

    def _scores(self, layer, q, step, scored):
        """Scores of prompt rows 0 .. scored-1: float32 [B, scored]."""
        k, _ = step.bank.kv(layer)
        rows = k[:, :, :scored]
        if self.window:
            at = step.positions[:, -1:] + torch.arange(1 - self.window, 1, device=q.device)
            # all at the current position
            cos, sin = step.rotary.at(step.positions[:, -1:].expand(-1, self.window))
            q = apply_rope(step.query_ring.read(layer, at.clamp_(min=0)), cos, sin)
        batch, queries, heads, dim = q.shape
        packed = q.view(batch, queries, rows.shape[1], -1, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        logits = (packed @ rows.transpose(2, 3)).float() * self.scale
        logits = logits.view(batch, rows.shape[1], queries, heads // rows.shape[1], scored)
        logits = logits.transpose(1, 2).flatten(2, 3)
        if self.method.kind == "softmax":
            logits = torch.softmax(logits, dim=-1)
        return (logits.amax(dim=2) * self.alpha.view(1, -1, 1)).sum(1).contiguous()

    def selection_scores(self):
        """None are kept: each filter layer scores in a tensor of its own."""
        return {}

    def rows_read(self, n):
        """Chosen rows, the window's forced ones included, and everything generated."""
        forced = max(0, self.window - (n - self.prompt))
        k = max(1, self.k - forced) if self.window else self.k
        chosen = min(k, self.prompt - forced) + forced
        sparse = chosen + n - self.prompt
        return [sparse if role is Role.SPARSE else n for role in self.plan.roles]

    def snapshot(self):
        """The budget and the prompt's length."""
        return self.k, self.prompt

    def restore(self, state, length):
        """Bring both back."""
        k, self.prompt = state
        self._set_k(k)

    def forget(self, length):
        """An emptied session may read another prompt."""
        super().forget(length)
        if length == 0:
            self.prompt = 0
