"""Bytes that reading a prompt brings from host memory to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.placement import part_bytes

if TYPE_CHECKING:
    from engine.methods.base import Method
    from engine.model.config import ModelConfig
    from engine.plan.placement import Placement


def prompt_link_bytes(
    config: ModelConfig,
    method: Method,
    placement: Placement | None,
    size: int,
    chunk: int,
    capacity: int,
    prompt: int,
) -> int:
    """Return the most bytes that a prompt of so many tokens, read from its beginning in chunks,
    brings over; 0 where nothing is offloaded.

    size: bytes of an element; capacity: tokens of the session. Every chunk needs what the method
    reads of each offloaded layer's past. A model's last layer attends in the final chunk only, with
    one query.
    """
    if placement is None:
        return 0
    rows, last = 0, config.num_layers - 1
    inner = sum(1 for layer in placement.layers if layer != last)
    for begin in range(0, prompt, chunk):
        stop = min(prompt, begin + chunk)
        span = (capacity, begin, stop, prompt, placement.block)
        rows += inner * method.prompt_rows(*span)
        if last in placement.layers and stop == prompt:
            rows += method.prompt_rows(*span, first=stop - 1)
    return rows * part_bytes(config, size)
