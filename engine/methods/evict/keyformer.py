"""Keyformer: H2O with Gumbel noise and a temperature in the score, so that tokens which lost
narrowly are not lost for sure.

Source: Adnan et al., Keyformer (MLSys 2024). Score: sum over queries of softmax((logits + Gumbel) /
tau), tau = tau_init + tau_delta * step, step 0 in a prompt and 1, 2, .. in its answer. Defaults:
the code's, 60% of the prompt of which 30% are the newest tokens, tau 1.0 and 0.01, an eviction
every 8 steps. The paper's models have no groups: gqa_reduce is H2O's maximum here. Without noise,
tau 1 and H2O's other settings it is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.base.checks import integer, is_number
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.evict.shared.store import Sequence
from engine.methods.random_bits import mix
from kernels.kept.noisy import Draw, weigh_noisy, weighs_noisy


@dataclass(frozen=True)
class Keyformer(Accumulating):
    """noise: whether Gumbel noise is added. seed: of the noise, which depends only on it and on
    (layer, head, query, key), never on how a prompt is cut or what runs beside. tau_init,
    tau_delta: temperature and its growth per step of the answer.
    """

    full_prompts = True

    recent_share: float = 0.3
    every: int = 8
    noise: bool = True
    seed: int = 0
    tau_init: float = 1.0
    tau_delta: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("seed", self.seed, 0)
        for name, value, zero in (
            ("tau_init", self.tau_init, False),
            ("tau_delta", self.tau_delta, True),
        ):
            if not is_number(value) or value < 0 or (value == 0 and not zero):
                raise SettingError(
                    f"{name}: found {value!r}, expected a number "
                    f"{'of at least' if zero else 'above'} 0"
                )

    def default_budget(self) -> dict[str, float]:
        return {"share": 0.6}

    def runtime(self, setup: Setup) -> Runtime:
        return KeyformerRuntime(self, setup)


class KeyformerRuntime(AccumulatingRuntime):
    """Noise is computed where it is needed, the same each time."""

    method: Keyformer
    leaves = "logits"

    def added(
        self,
        b: int,
        layer: int,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        start: int,
    ) -> torch.Tensor:
        """Column sums of the noisy, tempered softmax."""
        method, sequence, among = self.method, self.sequences[b], self.plan.first + layer
        step = 0 if self.reading else sequence.length + 1 - sequence.prompt
        tau = method.tau_init + step * method.tau_delta
        if not method.noise and tau == 1.0:
            return self.column_sums(layer, q, k, first)
        stored = sequence.layers is not None and not self.reading and len(q)
        if stored and self.logits is not None and weighs_noisy(self.setup.backend, q.device):
            assert sequence.layers is not None
            draw = Draw(first_of(method.seed, among), start) if method.noise else None
            at = sequence.layers[layer][number].positions
            return weigh_noisy(self.logits, at, draw, tau, self.softmax[layer].sinks)
        positions = self.key_positions(sequence, layer, number, k)
        heads = torch.arange(q.shape[1], device=q.device).view(k.shape[0], -1)

        def change(logits: torch.Tensor, queries: slice, rows: slice) -> torch.Tensor:
            """(logits + noise) / tau of one tile [h, G, queries, rows]."""
            if method.noise:
                at = torch.arange(start + queries.start, start + queries.stop, device=q.device)
                logits = logits + gumbel(method.seed, among, heads, at, positions[:, rows])
            return logits / tau

        return self.column_sums(layer, q, k, first, change=change, tau=tau)

    def key_positions(
        self, sequence: Sequence, layer: int, number: int, k: torch.Tensor
    ) -> torch.Tensor:
        """Positions int64 [h, T] of k [h, T, D] that is attended to."""
        if sequence.layers is None:
            return torch.arange(k.shape[1], device=k.device).expand(len(k), -1)
        rows = sequence.layers[layer][number]
        if not self.reading:
            return rows.positions[:, : k.shape[1]].long()
        stop = sequence.since + k.shape[1] - rows.held
        fresh = torch.arange(sequence.since, stop, device=k.device).expand(len(k), -1)
        return torch.cat([rows.part().positions.long(), fresh], 1)


def gumbel(
    seed: int, layer: int, heads: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise float32 [h, G, Q, T] of heads [h, G], query positions [Q] and key
    positions [h, T], all int64.

    A counter-based generator (two rounds of a 64-bit mixing function over the five numbers): the
    same numbers give the same noise on any device, in any order. kernels/native/noisy.cpp draws the
    same.
    """
    uniform = bits(seed, layer, heads, queries, keys).double().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().float()


def bits(
    seed: int, layer: int, heads: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The 24 random bits of each number of `gumbel`, same arguments: int64 [h, G, Q, T]."""
    x = queries.view(1, 1, -1, 1) * 0x1000003 + heads.view(*heads.shape, 1, 1) * 0x5BD1E995
    x = mix(x + first_of(seed, layer)) ^ keys.view(len(keys), 1, 1, -1) * 0x9E3779B1
    return (mix(x) >> 20).bitwise_and_(0xFFFFFF)


def first_of(seed: int, layer: int) -> int:
    """Where the numbers of a seed and layer begin."""
    return (seed * 0x27D4EB2F + layer * 0x165667B1) % (1 << 61)
