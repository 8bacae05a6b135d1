"""The state of a method that evicts, of the states of a model's parts: each has the stores of its
own layers (engine/methods/evict/shared/runtime.py), and all have read the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def joined(states: Sequence[Any]) -> Any:
    """One state of all layers; None where a part has none."""
    if any(state is None for state in states):
        return None
    at, prompt, *_ = states[0]
    budgets = [budget for state in states for budget in state[2]]
    return at, prompt, budgets, *(_listed([s[i] for s in states]) for i in (3, 4))


def shares(state: Any, starts: Sequence[int]) -> list[Any]:
    """The states of the parts that begin with the layers `starts`, behind the last of which is the
    number of layers; what `joined` joins.
    """
    at, prompt, *lists = state
    return [
        (at, prompt, *(held and held[first:stop] for held in lists))
        for first, stop in zip(starts, starts[1:])
    ]


def _listed(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The lists of all parts in one; None where they have none."""
    if parts[0] is None:
        return None
    return [one for part in parts for one in part or ()]
