"""The attention that a layer would give its tokens, before it attends: what an oracle ranks by."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.methods.select.across.by_logits import logs_into
from kernels.launch.softmax import Softmax


def true_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    softmax: Softmax,
    room: torch.Tensor,
    backend: str = "auto",
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query head's softmax over n rows of K, float32 [H, n], in `room`: a sink takes from all
    rows alike, so that a row's weight is its share of what falls on rows.

    q [H, D]; k [Hkv, n, D], n >= 1, floats or packed; scale: of the logits; room: float32 of at
    least H * n elements; parts: as in kernels/attention/native.py. Mutates room and parts.
    """
    plain = replace(softmax, sinks=None)
    logged = logs_into(room, q[None], k, scale, plain, parts, backend)
    return logged.weights(len(k)).flatten(0, 1)


def shared_mass(weights: torch.Tensor, lists: int, out: torch.Tensor) -> torch.Tensor:
    """Add up the weights [H, n] of the heads that share a list, into out [lists, n].

    The sum and not the maximum: what a list keeps of the attention of its heads together is the sum
    of what it ranks by, so that the first k of the sums keep the most that k tokens can.
    """
    return torch.sum(weights.view(lists, -1, weights.shape[1]), 1, out=out)
