"""How long a prefill will take: its FLOPs counted, its chunks timed, the rest predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.model.config.config import ModelConfig
from kernels.recurrent.delta import CHUNK


@dataclass(frozen=True)
class PrefillProgress:
    """How far a prefill is. done, total: tokens. work: share of the FLOPs done (attention is
    quadratic). seconds: since it began. eta: seconds left, None before the first chunk.
    """

    done: int
    total: int
    work: float
    seconds: float
    eta: float | None


def _recurrent(config: ModelConfig, attention: int) -> float:
    """FLOPs of a token in all recurrent layers, less what `attention` weights a layer would be."""
    sizes = config.recurrent
    if sizes is None:
        return 0.0
    weights = sizes.parameters(config.hidden_size)
    weights -= 0 if config.beside else attention
    # chunk-wise: two products with S, and about four with the other tokens of a chunk
    state = sizes.value_heads * (3 * sizes.key_dim * sizes.value_dim + 4 * CHUNK * sizes.key_dim)
    return 2.0 * len(sizes.layers) * (weights + state)


Progress = Callable[[PrefillProgress], None]  # called with how far a prefill is


@dataclass(frozen=True)
class PrefillFlops:
    """FLOPs of a prefill: linear layers count tokens, attention counts (query, key) pairs.

    per_token: of all weights but the head. per_pair: of one layer's attention. layers: layers that
    compute attention for every token: all but the last, which only needs the final token, and but
    for sliding-window layers, whose windows are counted per token.
    """

    per_token: float
    per_pair: float
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> PrefillFlops:
        """Count a model's multiply-adds, two FLOPs each."""
        # the last layer's output projection runs for one token
        rows = config.attention_weights - config.hidden_size * config.value_size
        layer = config.attention_weights + config.hidden_size * 3 * config.mlp_width
        local = [config.windows[i] for i in config.local_layers]
        seen = 4.0 * config.q_size * sum(local)
        seen += _recurrent(config, config.attention_weights)
        return cls(
            2.0 * (layer * (config.num_layers - 1) + rows) + seen,
            4.0 * config.q_size,
            max(1, len(config.seeing_layers) - 1),
        )

    def parts(self, start: int, stop: int) -> tuple[float, float]:
        """(linear, attention) FLOPs of positions start .. stop-1 against all before them."""
        return self.per_token * (stop - start), self.layers * self.pairs(start, stop)

    def pairs(self, start: int, stop: int) -> float:
        """Attention FLOPs of one dense layer for positions start .. stop-1 against themselves and
        all before them.
        """
        return self.per_pair * (stop * (stop + 1) - start * (start + 1)) / 2


class Eta:
    """Time left, from the two rates at which this machine does linear layers and attention.

    Each chunk gives one equation: seconds = a * linear + b * attention. Least squares fit the two
    rates, with a weak prior that both kinds of FLOP cost the same, so that the first chunks already
    give a sane estimate.
    """

    def __init__(
        self,
        flops: Callable[[int, int], tuple[float, float]],
        start: int,
        stop: int,
        passes: tuple[float, float] = (0.0, 0.0),
    ):
        """flops(start, stop) -> (linear, attention) FLOPs of those positions. passes: FLOPs of what
        runs again at the prompt's end.
        """
        self.flops, self.start, self.stop = flops, start, stop
        self.passes, self.passed = passes, 0.0  # how much of the passes is done
        self.total = sum(flops(start, stop)) + sum(passes)
        self.began = time.perf_counter()
        self.rows: list[tuple[float, float, float]] = []

    def add(self, first: int, last: int, seconds: float) -> None:
        """Note that the chunk first .. last-1 took `seconds`."""
        self.rows.append((*self.flops(first, last), seconds))

    def left(self, at: int) -> float:
        """Seconds for positions at .. stop-1."""
        linear, attention = self.flops(at, self.stop)
        again = 1 - self.passed
        a, b = self._rates()
        return a * (linear + again * self.passes[0]) + b * (attention + again * self.passes[1])

    def repeated(self, share: float) -> None:
        """Note that such a share of the passes is done."""
        self.passed = share

    def _rates(self) -> tuple[float, float]:
        rate = sum(r[2] for r in self.rows) / max(1e-9, sum(r[0] + r[1] for r in self.rows))
        weight = 0.05 * sum(r[0] ** 2 + r[1] ** 2 for r in self.rows) / max(1, len(self.rows))
        ll = sum(r[0] * r[0] for r in self.rows) + weight
        aa = sum(r[1] * r[1] for r in self.rows) + weight
        la = sum(r[0] * r[1] for r in self.rows)
        lt = sum(r[0] * r[2] for r in self.rows) + weight * rate
        at = sum(r[1] * r[2] for r in self.rows) + weight * rate
        det = ll * aa - la * la
        if det <= 1e-12 * ll * aa:
            return rate, rate
        a, b = (lt * aa - at * la) / det, (at * ll - lt * la) / det
        return (a, b) if a > 0 and b > 0 else (rate, rate)

    def progress(self, at: int) -> PrefillProgress:
        """PrefillProgress at position `at`, tokens counted from where this prefill began."""
        done = sum(self.flops(self.start, at)) + self.passed * sum(self.passes)
        return PrefillProgress(
            at - self.start,
            self.stop - self.start,
            done / max(1.0, self.total),
            time.perf_counter() - self.began,
            self.left(at) if self.rows else None,
        )
