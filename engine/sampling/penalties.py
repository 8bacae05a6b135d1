"""What a sampler subtracts from the logits of tokens that were there before.

Repetition penalty as in transformers' generate(): positive logits of tokens of the prompt or the
answer are divided by it, negative ones multiplied, however often they came. Then presence and
frequency penalty as OpenAI defines them, over the answer alone: subtracted once from every token
that came, and once for each time it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.sampling.params import SamplingParams


class Penalties:
    """The penalties of one answer. `counted` and `uncounted` keep track of its tokens."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self._params, self._vocab_size = params, vocab_size
        self.active = self._repetition or self._counting
        self._prompt_ids = list(prompt_ids) if self._repetition else []
        # of the logits' device, made when first needed: bool and float32 [vocab]
        self._prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    @property
    def _repetition(self) -> bool:
        return self._params.repetition_penalty != 1.0

    @property
    def _counting(self) -> bool:
        return self._params.presence_penalty != 0.0 or self._params.frequency_penalty != 0.0

    def counted(self, token: int) -> None:
        """Note a token of the answer."""
        if self._counts is not None:
            self._counts[token] += 1

    def uncounted(self, tokens: Iterable[int]) -> None:
        """Take tokens of the answer back."""
        if self._counts is not None:
            for token in tokens:
                self._counts[token] -= 1

    def applied(self, scores: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """New scores [vocab], float32. answer: its tokens so far, for the first call and a change
        of device.
        """
        if self._counts is None or self._counts.device != scores.device:
            self._begin(scores.device, answer)
        assert self._counts is not None and self._prompt is not None
        came = self._counts > 0
        if self._repetition:
            factor = self._params.repetition_penalty
            changed = torch.where(scores < 0, scores * factor, scores / factor)
            scores = torch.where(came | self._prompt, changed, scores)
        if self._counting:
            scores = scores - self._params.frequency_penalty * self._counts
            scores = scores - self._params.presence_penalty * came
        return scores

    def _begin(self, device: torch.device, answer: Sequence[int]) -> None:
        size = self._vocab_size
        known = torch.tensor(self._prompt_ids, dtype=torch.int64)
        prompt = torch.zeros(size, dtype=torch.bool)
        prompt[known[(known >= 0) & (known < size)]] = True
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=size)
        self._prompt, self._counts = prompt.to(device), counts.float().to(device)
