"""From logits to one token: the settings (SamplingParams) and the sampler.

The filters and their order are those of transformers' generate(): penalties on the raw logits
(engine/sampling/penalties.py), then temperature, top-k, top-p, min-p. What a grammar forbids, and
logit_bias, come first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from engine.base.errors import SettingError
from engine.sampling.exponential_race import NUMBERS, draw
from engine.sampling.greedy import require_finite
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import Penalties

# top-p candidates tried before a full sort of the vocabulary, which costs several times as much
TOP_P_HEAD = 1024


class Sampler:
    """Draws the tokens of one answer.

    vocab_size: length of the logits. prompt_ids: read by the repetition penalty only. ends: ids
    that end the answer, for params.min_tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int] = (),
        ends: Iterable[int] = (),
    ):
        self.params, self.vocab_size = params, vocab_size
        self._penalties = Penalties(params, vocab_size, prompt_ids)
        self._sampled: list[int] = []
        self._ends = sorted(i for i in ends if i < vocab_size)
        self._matcher = params.grammar.begin() if params.grammar is not None else None
        if any(i >= vocab_size for i, _ in params.logit_bias):
            raise SettingError(
                f"logit_bias: found an id beyond the vocabulary, expected 0 to {vocab_size - 1}"
            )
        self._bias: torch.Tensor | None = None  # float32 [vocab] on the logits' device
        self._ids: torch.Tensor | None = None  # int64 [vocab]: the vocabulary, on their device too
        # One number per token, from a generator on the host: a seed gives the same answer on every
        # device.
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> tuple[int, float | None, list[tuple[int, float]]]:
        """Draw one token from logits, float [vocab] on any device; they are not changed.

        Returns (token id, its log probability, the likeliest (id, log probability) pairs, best
        first). Without params.logprobs the latter two are None and empty. Raises EngineError if the
        logits contain NaN or +inf, or no finite number.
        """
        if logits.shape != (self.vocab_size,):
            raise SettingError(
                f"logits: found shape {tuple(logits.shape)}, expected ({self.vocab_size},)"
            )
        raw, token = self._next(logits)
        if not self.params.logprobs:
            return token, None, []
        every = torch.log_softmax(raw, dim=-1)
        top = torch.topk(every, min(self.params.logprobs, self.vocab_size))
        return (
            token,
            float(every[token]),
            list(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        )

    @property
    def greedy(self) -> bool:
        """Whether sample() does no more than take the greatest logit."""
        params = self.params
        plain = self._matcher is None and not params.logit_bias and not self._goes_on
        return (
            params.temperature == 0 and plain and not self._penalties.active and not params.logprobs
        )

    @property
    def _goes_on(self) -> bool:
        """Whether the next token may not end the answer."""
        return len(self._sampled) < self.params.min_tokens

    def took(self, token: int) -> None:
        """Note a token that was chosen elsewhere."""
        self._sampled.append(token)
        self._penalties.counted(token)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled, by params.max_tokens."""
        return max(0, self.params.max_tokens - len(self._sampled))

    def _next(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Draw and note a token; (raw logits float32, token)."""
        # Apple's device has no float64, which the cumulative probabilities need.
        raw = (logits.cpu() if logits.device.type == "mps" else logits).float()
        scores = self._scored(raw)
        token = self._greedy(scores) if self.params.temperature == 0 else self._draw(scores)
        self.took(token)
        if self._matcher is not None:
            self._matcher.took(token)
        return raw, token

    def _scored(self, raw: torch.Tensor) -> torch.Tensor:
        """Logits after grammar, bias and penalties."""
        scores = raw
        if self._matcher is not None:
            scores = scores.masked_fill(~self._matcher.allowed().to(scores.device), float("-inf"))
        if self._goes_on and self._ends:
            ends = torch.tensor(self._ends, device=scores.device)
            scores = scores.index_fill(0, ends, float("-inf"))
        if self.params.logit_bias:
            if self._bias is None or self._bias.device != scores.device:
                ids, values = zip(*self.params.logit_bias)
                bias = torch.zeros(self.vocab_size)
                bias.index_add_(0, torch.tensor(ids), torch.tensor(values))
                self._bias = bias.to(scores.device)
            scores = scores + self._bias
        return self._penalties.applied(scores, self._sampled) if self._penalties.active else scores

    @contextlib.contextmanager
    def drafting(self) -> Iterator[Callable[[torch.Tensor], int]]:
        """Yield a function from the logits [vocab] of one guessed position after the other to the
        token that sample() would draw from them, by the same random numbers. The sampler is as it
        was afterwards.

        So a guess from nearly the right logits is nearly always what sample() draws later.
        """
        state, count = self._random.get_state(), len(self._sampled)
        matcher = self._matcher
        self._matcher = matcher.copy() if matcher is not None else None

        def guess(logits: torch.Tensor) -> int:
            return self._next(logits)[1]

        try:
            yield guess
        finally:
            self._random.set_state(state)
            self._matcher = matcher
            self._penalties.uncounted(self._sampled[count:])
            del self._sampled[count:]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distribution that sample() draws from at temperature > 0: float32 [vocab].

        Draws nothing and changes no state.
        """
        scores = self._scored(logits.float())
        ids, kept, _ = self._filter(scores, self.vocab_size)
        everything = torch.zeros(self.vocab_size, dtype=torch.float32, device=logits.device)
        return everything.index_put((ids,), kept) if ids is not None else kept

    def _greedy(self, scores: torch.Tensor) -> int:
        best = scores.argmax().view(1)
        # One transfer for both: the value reveals a NaN, which argmax ranks first, without a second
        # synchronisation.
        token, value = torch.cat((best.double(), scores.gather(0, best).double())).tolist()
        require_finite(value)
        return int(token)

    def _draw(self, scores: torch.Tensor) -> int:
        best = scores.max()
        before = self._random.get_state()
        number = int(torch.randint(NUMBERS, (), generator=self._random).item())
        token, value, mass = self._pick(scores, best, number, TOP_P_HEAD)
        if math.isfinite(value) and mass < self.params.top_p < 1.0:
            token, value, _ = self._pick(scores, best, number, self.vocab_size)
        if not math.isfinite(value):
            self._random.set_state(before)
        require_finite(value)
        return int(token)

    def _pick(
        self, scores: torch.Tensor, best: torch.Tensor, number: int, head: int
    ) -> list[float]:
        """Draw by a number's race: [token id, the largest score, the probability of the `head`
        likeliest tokens], in one transfer and with no other wait for the device.
        """
        ids, kept, mass = self._filter(scores, head)
        if ids is None:
            if self._ids is None or self._ids.device != scores.device:
                self._ids = torch.arange(self.vocab_size, device=scores.device)
            ids = self._ids
        drawn = ids.gather(0, draw(kept, ids, number))
        return torch.cat([t.double().view(1) for t in (drawn, best, mass)]).tolist()

    def _filter(
        self, scores: torch.Tensor, head: int
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Apply temperature, top-k, top-p (among the `head` likeliest tokens) and min-p.

        Returns token ids (None: the whole vocabulary, in order), their probabilities, 0 for those
        that do not survive, and the probability of the `head` likeliest before top-p.
        """
        params, ids = self.params, None
        # Subtract the maximum, so that a tiny temperature cannot overflow; softmax is invariant to
        # the shift.
        scores = (scores - scores.max()) / max(params.temperature, 1e-30)
        if 0 < params.top_k < self.vocab_size:
            # Ties with the last token stay, as in transformers.
            last = torch.topk(scores, params.top_k).values[-1]
            scores = scores.masked_fill(scores < last, float("-inf"))
        probabilities = torch.softmax(scores, dim=-1)
        mass = probabilities.sum()
        if params.top_p < 1.0:
            ids, probabilities, mass = _nucleus(probabilities, params.top_p, head)
            probabilities = probabilities / probabilities.sum()
        if params.min_p > 0.0:
            probabilities = probabilities.masked_fill(
                probabilities < params.min_p * probabilities.max(), 0.0
            )
        return ids, probabilities / probabilities.sum(), mass


def _nucleus(
    probabilities: torch.Tensor, top_p: float, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the fewest likeliest of the `head` likeliest entries that sum to top_p; at least one.

    Returns the indices of the `head`, their values, 0 for those outside, and the sum of them all.
    """
    size = probabilities.numel()
    if head < size:
        values, order = torch.topk(probabilities, head)
    else:
        values, order = torch.sort(probabilities, descending=True)
    # the first has nothing before it: it stays
    outside = values.cumsum(0) - values >= top_p
    return order, values.masked_fill(outside, 0.0), values.sum()
