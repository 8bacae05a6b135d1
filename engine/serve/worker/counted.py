"""Counted bytes: what the steps of an answer read, beside what full attention would have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.runner.state import SessionStats
from engine.session.results import GenerationStats
from engine.session.session import Session


class Figures:
    """Counts from where a session stands now."""

    def __init__(self, session: Session) -> None:
        self._length, self._before = len(session), replace(session.counters)

    def of(self, session: Session, stats: GenerationStats) -> dict[str, Any]:
        """Figures of the answer since: steps, seconds, bytes that a step read of weights, K and V,
        and `speedup` over full attention by these bytes (in exact mode by what its cycles cost).

        The steps of a batch count as if each answer had read the weights for itself.
        """
        now, before = session.counters, self._before
        sparse = now.sparse_steps - before.sparse_steps
        dense = now.dense_steps - before.dense_steps
        weights = session.planner.plan().step_weights
        held = (self._length + len(session)) // 2  # in an answer's mean step
        seen = session.loaded.config.rows_seen(held)
        full = weights + sum(rows * one for rows, one in zip(seen, session.row_bytes))
        rows = _rows(now) - _rows(before)
        read = weights + rows / (sparse + dense) if sparse + dense else full
        found: dict[str, Any] = {"sparse_steps": sparse, "dense_steps": dense}
        if stats.speedup:
            read = full / stats.speedup
            found |= {"drafted": stats.drafted, "accepted": stats.accepted}
        return found | {
            "seconds": round(stats.decode_seconds, 4),
            "step_bytes": int(read),
            "full_step_bytes": int(full),
            "speedup": round(full / read, 3),
        }


def _rows(counters: SessionStats) -> int:
    return counters.bytes_read_sparse + counters.bytes_read_dense
