"""Drafts whose selection verification has made, from exact scores of verified tokens' queries. A
simulation, beside exact mode as it is: verification runs one token at a time, every step with its
scores. Controls: a selection that is some tokens old, and one by chance.
"""

from __future__ import annotations

from collections import deque

import torch

from engine.bank.base import Step
from engine.exact.runner import ExactRunner
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.plan.layers import Role
from kernels.attention.dense import decode_dense
from kernels.attention.sparse import decode_sparse
from kernels.select.topk import select_topk
from tools.studies.exact.starts import Known


class Verifier:
    """Full attention that notes, in the layers `scored`, the k tokens with the highest scores
    before the tail, one selection a layer.

    old: tokens by which the scores precede the newest verified one. among: newest tokens whose
    scores' maximum is ranked. chance: rank random numbers instead.
    """

    def __init__(
        self,
        runner: ExactRunner,
        scored: list[int],
        old: int = 0,
        among: int = 1,
        chance: bool = False,
    ):
        drafter: OmniKVRuntime = runner.runtime.drafter  # type: ignore[attr-defined]
        self.dense, self.drafter, self.scored = runner.dense_runtime, drafter, scored
        self.old, self.among, self.chance = old, among, chance
        self.index = {layer: torch.empty_like(drafter.index[0]) for layer in scored}
        self.counts = {layer: torch.zeros_like(drafter.counts[0]) for layer in scored}
        self.past: dict[int, deque[torch.Tensor]] = {
            layer: deque(maxlen=old + among) for layer in scored
        }
        self.tail_start = torch.zeros(1, dtype=torch.int32)

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [1, 1, H, D] to everything."""
        if layer not in self.index:
            return self.dense.attend(layer, q, step)
        drafter = self.drafter
        setup, scores = drafter.setup, drafter.scores[:, : step.bucket]
        k, v = step.bank.kv(layer, step.bucket)
        kind = drafter.method.kind
        out = decode_dense(
            q, k, v, step.visible, drafter.scale, scores, kind, scratch=setup.scratch
        )
        self.tail_start.copy_(drafter.tail_start(step))
        start = int(self.tail_start)
        past = self.past[layer]
        past.append(scores[:, :start].clone())
        ranked = torch.zeros_like(scores)
        for one in list(past)[: self.among]:
            n = min(one.shape[1], start)
            ranked[:, :n] = torch.maximum(ranked[:, :n], one[:, :n])
        if self.chance:
            ranked = torch.rand_like(scores)
        index, counts = self.index[layer][:, 0], self.counts[layer]
        select_topk(
            ranked, drafter.zero, self.tail_start, drafter.k_device, index, counts, setup.scratch
        )
        return out

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention in a sliding-window layer."""
        return self.dense.attend_local(layer, q, step)


class Frozen:
    """A draft step over what a Verifier noted: each layer by the nearest scored layer below, or the
    first.
    """

    def __init__(self, verifier: Verifier):
        self.verifier = verifier

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [1, 1, H, D] to a selection and all tokens since."""
        noted = self.verifier
        source = max((s for s in noted.scored if s <= layer), default=noted.scored[0])
        rows = step.bank.selected(
            layer, noted.index[source], noted.counts[source], noted.tail_start, step, False
        )
        setup = noted.drafter.setup
        return decode_sparse(
            q, *rows, noted.drafter.scale, scratch=setup.scratch, backend=setup.backend
        )

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention in a sliding-window layer."""
        return self.verifier.attend_local(layer, q, step)


class FrozenDrafts:
    """Drafts for tools.studies.exact.starts.accepted. roles: of the layers that have a selection of
    their own; the rest as Verifier's.
    """

    def __init__(self, *roles: Role, old: int = 0, among: int = 1, chance: bool = False):
        self.roles = roles
        self.old, self.among, self.chance = old, among, chance
        self._runner: ExactRunner | None = None

    def __call__(self, runner: ExactRunner, n: int, known: Known) -> int:
        """Right drafts after the n-th token; none at the first, before which nothing was scored."""
        first = runner is not self._runner
        if first:
            self._runner = runner
            roles = runner.plan.roles
            scored = [layer for layer, role in enumerate(roles) if role in self.roles]
            verifier = Verifier(runner, scored, self.old, self.among, self.chance)
            needs = runner.dense_runtime.needs
            # the session's own steps are verification's from now on
            runner._dense_step = runner.issued_by(verifier, needs, runner.token)
            step = runner.issued_by(Frozen(verifier), runner.runtime.drafter.needs, runner.token)  # type: ignore[attr-defined]
            self._step = step
            return 0
        own, kept = runner._own_draft, runner._kept_draft
        runner._own_draft = runner._kept_draft = self._step
        try:
            return len(runner._guess(n, len(known.tokens)))
        finally:
            runner._own_draft, runner._kept_draft = own, kept
