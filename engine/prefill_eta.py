"""How long a prefill will take: its operations counted, its chunks timed, the rest predicted."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillProgress:
    """How far a prefill is. `done` and `total` count tokens, `work` is the share of the operations
    done (attention is quadratic).
    """

    done: int
    total: int
    work: float
    seconds: float
    eta: float | None


@dataclass(frozen=True)
class PrefillFlops:
    """Operations of a prefill: linear layers count tokens, attention counts (query, key) pairs.

    per_token: of all weights (head apart). per_pair: of one layer's attention. layers: how many
    attend; the last one does for the prompt's last token only (run_chunk), and is left out but for
    its rows.
    """

    per_token: float
    per_pair: float
    layers: int

    @classmethod
    def of(cls, config):
        """Multiply-adds x 2 of a model's weights per token and of one layer's attention per pair of
        positions.
        """
        rows = config.hidden_size * (config.q_size + 2 * config.kv_size)
        layer = rows + config.hidden_size * (config.q_size + 3 * config.intermediate_size)
        return cls(
            2.0 * (layer * (config.num_layers - 1) + rows),
            4.0 * config.q_size,
            config.num_layers - 1,
        )

    def parts(self, start, stop):
        """(linear, attention) operations of positions start .. stop-1 against all before them."""
        return self.per_token * (stop - start), self.layers * self.pairs(start, stop)

    def pairs(self, start, stop):
        """Attention operations of one dense layer for positions start .. stop-1 against all before
        them and themselves.
        """
        return self.per_pair * (stop * (stop + 1) - start * (start + 1)) / 2


class Eta:
    """Time left from the two rates at which this machine does linear layers and attention.

    Each chunk gives one equation seconds = a * linear + b * attention; the two rates are fitted by
    least squares with a weak prior that both kinds of operation cost the same, so that the first
    chunks already give a sane estimate.
    """

    def __init__(self, parts, start, stop):
        """parts(start, stop) -> (linear, attention) operations, as Runtime.prefill_work counts
        them.
        """
        self.parts, self.stop = parts, stop
        self.total = sum(parts(start, stop))
        self.start, self.began = start, time.perf_counter()
        self.rows = []

    def add(self, first, last, seconds):
        """A chunk first .. last-1 took `seconds`."""
        self.rows.append((*self.parts(first, last), seconds))

    def left(self, at):
        """Seconds for positions at .. stop-1."""
        linear, attention = self.parts(at, self.stop)
        a, b = self._rates()
        return a * linear + b * attention

    def _rates(self):
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

    def progress(self, at):
        """PrefillProgress with tokens counted from where this prefill began."""
        done = sum(self.parts(self.start, at))
        return PrefillProgress(
            at - self.start,
            self.stop - self.start,
            done / max(1.0, self.total),
            time.perf_counter() - self.began,
            self.left(at) if self.rows else None,
        )
