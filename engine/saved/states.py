"""The states of recurrent layers in a saved session: where it stands, and its savepoints."""

from __future__ import annotations

from typing import Any

from engine.bank.recurrent.savepoints import Snapshot
from engine.runner.state import SessionState


def states(session: SessionState) -> dict[str, Any] | None:
    """Return what a file holds of them; None for a model without recurrent layers."""
    state = session.bank.recurrent
    if state is None:
        return None
    points = session.history.states.points
    return {
        "now": _described(state.snapshot()) if state.length else None,
        "savepoints": [_described(point) for point in points],
    }


def _described(point: Snapshot) -> tuple[Any, ...]:
    return point.base, point.length, list(point.tensors), point.turn, point.queries, point.end


def write_states(session: SessionState, held: Any, total: int) -> None:
    """Take over what `states` has returned, in a session of `total` tokens; of the savepoints, the
    newest that it keeps. Raises ValueError for states of another model.
    """
    state = session.bank.recurrent
    if state is None or held is None:
        if (state is None) != (held is None):
            raise ValueError("recurrent")
        return
    points = [_checked(session, given, total) for given in held["savepoints"]]
    lengths = [point.length for point in points]
    if lengths != sorted(lengths):
        raise ValueError("recurrent")
    session.history.states.keep(points)
    if held["now"] is not None:
        now = _checked(session, held["now"], total)
        state.load(now, now.length)


def _checked(session: SessionState, given: tuple[Any, ...], total: int) -> Snapshot:
    """Return a savepoint whose shapes and dtypes are this session's, on the CPU."""
    assert session.bank.recurrent is not None
    base, length, tensors, turn, queries, end = given
    if not all(type(n) is int for n in (base, length, end)) or not 0 <= base < length <= total:
        raise ValueError("recurrent")
    point = Snapshot(base, length, tuple(tensors), bool(turn), queries, end)
    ring = session.query_ring.slots
    if queries is not None:
        layers, batch, width, *rest = queries.shape
        fits = (layers, batch, *rest) == (*ring.shape[:2], *ring.shape[3:])
        if not fits or queries.dtype != ring.dtype or not 0 < width <= min(end, ring.shape[2]):
            raise ValueError("recurrent")
        if not length <= end <= length + session.bank.recurrent.most_rows:
            raise ValueError("recurrent")
    session.bank.recurrent.require(point)
    return point
