"""Bytes that reading a prompt, and a step after it, bring from host memory to the device."""

from __future__ import annotations

from engine.methods.base import Method
from engine.model.config.config import ModelConfig
from engine.plan.needs import Needs
from engine.plan.placement import Placement, part_bytes

SLOW_LINK = 25e9  # bytes per second: about what copies reach on 16 lanes of PCIe 4.0


def step_link_bytes(
    config: ModelConfig, needs: Needs, placement: Placement | None, size: int, tokens: int
) -> int:
    """Return the most bytes that a step at so many tokens brings over; 0 where nothing is
    offloaded. size: bytes of an element.
    """
    if placement is None:
        return 0
    rows = needs.step_rows if needs.step_rows is not None else placement.budget or tokens
    return min(rows, tokens) * len(placement.layers) * part_bytes(config, size)


def prompt_link_bytes(
    config: ModelConfig,
    method: Method,
    placement: Placement | None,
    size: int,
    chunk: int,
    capacity: int,
    prompt: int,
    every_query: bool = False,
) -> int:
    """Return the most bytes that a prompt of so many tokens, read from its beginning in chunks,
    brings over; 0 where nothing is offloaded.

    size: bytes of an element; capacity: tokens of the session. Every chunk needs what the method
    reads of each offloaded layer's past. A model's last layer attends in the final chunk only, with
    one query; every_query: in all chunks with all queries too (Needs.every_query, Needs.outputs).
    """
    if placement is None:
        return 0
    rows, last = 0, config.num_layers - 1
    inner = sum(1 for layer in placement.layers if layer != last)
    for begin in range(0, prompt, chunk):
        stop = min(prompt, begin + chunk)
        span = (capacity, begin, stop, prompt, placement.block)
        rows += inner * method.prompt_rows(*span)
        if every_query and last in placement.layers:
            rows += method.prompt_rows(*span)
        if last in placement.layers and stop == prompt:
            rows += method.prompt_rows(*span, first=stop - 1)
    return rows * part_bytes(config, size)
