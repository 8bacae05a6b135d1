"""A second LLM over the weights of a first one, for comparisons side by side."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from engine.plan.placement import SLOTS

if TYPE_CHECKING:
    from engine import LLM
    from engine.methods.base import Method


def clone(
    llm: LLM,
    *,
    method: Method | None = None,
    max_context: int | None = None,
    offload: str = "auto",
    slots: float = SLOTS,
) -> LLM:
    """An LLM that shares `llm`'s weights and host pool, planned anew for a method, a capacity and a
    place for the bank.

    None keeps what `llm` has. Nothing is loaded. The plan still counts the weights, which are there
    already, so nobody asks whether it fits. Raises SettingError as LLM(...) does.
    """
    llm.load()
    other = copy.copy(llm)
    other._settings(
        None,
        max_context,
        None,
        llm.backend,
        offload,
        slots,
        llm._vram_budget,
        llm._ram_budget,
        None,
    )
    other.model, other._host = llm.model, llm._host
    other.method, layers = other.resolve_method(method if method is not None else llm.method)
    other._plan = other._make_plan(
        other.method, layers, other._context(max_context or llm.max_context), llm.chunk
    )
    return other
