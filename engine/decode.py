"""The decode step: one function from new tokens to logits, the same for eager, compiled and
graph-captured runs, on CPU and GPU.

A step writes rows at its positions and advances nothing: the session advances. No sync, no index on
the host, nothing allocated whose size grows with the context (kernels write into the session's
scratch).
"""

from dataclasses import dataclass, field

import torch

from engine.model.llama import post_attention, pre_attention
from engine.plan.layers import TAIL_BLOCK
from engine.query_ring import QueryRing


@dataclass
class Step:
    """What every layer of one step shares: computed once from the lengths, on the device."""

    positions: torch.Tensor  # [B, Q] int64
    visible: torch.Tensor  # [B] int32: rows that the last query sees, its own included
    bank: object
    bucket: int  # rows of the bank that this step's kernels may look at
    ring: QueryRing
    rotary: object
    _tails: dict = field(default_factory=dict)
    _window: dict = field(default_factory=dict)

    def tail_start(self, tail):
        """First tail position per sequence [B] int32, for the first of the step's queries
        (DESIGN.md, "tail").
        """
        if tail not in self._tails:
            n = self.visible - (self.positions.shape[1] - 1)
            self._tails[tail] = ((n // TAIL_BLOCK) * TAIL_BLOCK - tail).clamp_(min=0)
        return self._tails[tail]

    def window_queries(self, layer, window):
        """The last `window` queries of a layer, each rotated to its own position: [B, W, H, D];
        before position 0 undefined.
        """
        if window not in self._window:
            offsets = torch.arange(1 - window, 1, device=self.positions.device)
            positions = (self.positions[:, -1:] + offsets).clamp_(min=0)
            self._window[window] = positions, *self.rotary.at(positions)
        positions, cos, sin = self._window[window]
        return self.rotary.apply(self.ring.read(layer, positions), cos, sin)


class Decoder:
    """Runs decode steps of one session: model, runtime of its method, query ring, and how its
    pieces are compiled.
    """

    def __init__(self, model, rotary, runtime, ring, pieces=(pre_attention, post_attention)):
        self.model, self.rotary, self.runtime, self.ring = model, rotary, runtime, ring
        self._pre_attention, self._post_attention = pieces

    def step(self, tokens, lengths, bank, bucket=None):
        """tokens [B, Q] int64, lengths [B] int32 (tokens already in the bank) -> logits [B, Q,
        vocab] float32.

        Writes the rows of the new tokens at lengths .. lengths + Q - 1. `bucket`: rows that the
        kernels may look at, at least every length + Q (default: the bank's capacity).
        """
        model, config = self.model, self.model.config
        count = tokens.shape[1]
        positions = lengths.long().unsqueeze(1) + torch.arange(count, device=tokens.device)
        step = Step(
            positions, lengths + count, bank, bucket or bank.capacity, self.ring, self.rotary
        )
        cos, sin = self.rotary.at(positions)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        x = model.embed[tokens]
        for number, layer in enumerate(model.layers):
            q, k, v, q_pre_rope = self._pre_attention(layer, x, cos, sin, *sizes)
            bank.write(number, k, v, q_pre_rope, self.ring, positions)
            x = self._post_attention(
                layer, x, self.runtime.attend(number, q, step), config.rms_norm_eps
            )
        return model.logits(x)
