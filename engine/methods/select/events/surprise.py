"""How much each token of a text surprised the model: -log p(token | those before it), in nats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SLICE = 8 << 20  # logits held at once: 32 MiB


def surprise(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return -log p of ids int64 [n] in nats, under the logits float32 [n, vocab] before them."""
    return torch.logsumexp(logits, -1) - logits.gather(1, ids.unsqueeze(1))[:, 0]


def surprises(
    ids: Sequence[int],
    logits: Callable[[int, int], torch.Tensor],
    behind: torch.Tensor | None,
    vocab: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (the surprise of each of these tokens, float32 [n]; the logits behind the last one,
    float32 [vocab]), some rows of logits at a time.

    logits(first, stop): those behind tokens first .. stop-1 (engine/methods/base.py, Logits).
    behind: those before the first token; None where nothing comes before it, whose surprise is 0.
    """
    tokens = torch.tensor(ids, dtype=torch.int64, device=device)
    told = torch.zeros(len(ids), device=device)
    if behind is not None:
        told[:1] = surprise(behind.unsqueeze(0), tokens[:1])
    size = max(1, SLICE // vocab)
    for first in range(0, len(ids), size):
        rows = logits(first, min(len(ids), first + size)).float()
        after = tokens[first + 1 : first + 1 + len(rows)]
        told[first + 1 : first + 1 + len(rows)] = surprise(rows[: len(after)], after)
        behind = rows[-1]
    return told, None if behind is None else behind.clone()


def logits_bytes(vocab: int, chunk: int) -> int:
    """Device bytes that `surprises` takes for a chunk: some rows of logits, and their sums."""
    return 8 * max(vocab, min(SLICE, chunk * vocab))
