"""Log probabilities of a prompt's own tokens, taken while it is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.llama import Llama
from engine.sampling.greedy import require_finite

SLICE = 8 << 20  # logits held at once: 32 MiB in float32


class PromptScores:
    """How likely each token of a prompt is behind those before it, under the model's own
    distribution (before temperature, penalties and filters).

    token_ids: the whole prompt, from a session's first position on. `take` is what
    Session.prefill's `every` calls; it computes logits of a few rows at a time, so that a prompt
    of n tokens never holds [n, vocab]. top: likeliest alternatives that are kept for each token.
    """

    def __init__(self, model: Llama, token_ids: Sequence[int], top: int = 0) -> None:
        self.token_ids = list(token_ids)
        count, vocab = len(self.token_ids), model.config.vocab_size
        self._model, self.top = model, min(top, vocab)
        self._rows = max(1, SLICE // vocab)
        self._own = torch.zeros(count, dtype=torch.float32)
        self._likeliest = torch.zeros(count, self.top, dtype=torch.int32)
        self._theirs = torch.zeros(count, self.top, dtype=torch.float32)

    def take(self, x: torch.Tensor, start: int) -> None:
        """Take the last layer's output x [1, C, hidden] of tokens start .. start+C-1, each of which
        scores the one behind it. Raises EngineError where logits are not finite.
        """
        stop = min(start + x.shape[1], len(self.token_ids) - 1)
        for first in range(start, stop, self._rows):
            last = min(stop, first + self._rows)
            logits = self._model.logits(x[0, first - start : last - start])
            self._keep(logits, slice(first + 1, last + 1))

    def _keep(self, logits: torch.Tensor, where: slice) -> None:
        """Note the scores of the tokens at `where`, by logits float32 [tokens, vocab]."""
        ids = torch.tensor(self.token_ids[where], device=logits.device)
        total = torch.logsumexp(logits, -1, keepdim=True)
        self._own[where] = (logits.gather(1, ids[:, None]) - total)[:, 0].cpu()
        best = torch.topk(logits, self.top)
        self._likeliest[where] = best.indices.int().cpu()
        self._theirs[where] = (best.values - total).cpu()
        require_finite(float(self._own[where].sum() + self._theirs[where].sum()))

    @property
    def logprobs(self) -> list[float | None]:
        """Log probability of each token in nats; None for the first, which nothing comes before."""
        return [None, *self._own[1:].tolist()]

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]]:
        """(token id, log probability) of the likeliest tokens at each place, best first; none at
        the first.
        """
        pairs = zip(self._likeliest[1:].tolist(), self._theirs[1:].tolist(), strict=True)
        return [[], *(list(zip(ids, values, strict=True)) for ids, values in pairs)]
