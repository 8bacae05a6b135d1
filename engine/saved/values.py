"""Python values as JSON and tensors, and back: a method's state, a conversation, a program's own
data. Tuples come back as tuples; long texts are stored as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.base.device import raw

LONG = 4096  # characters; a longer text is no part of the header


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Encode `value` as JSON and append its tensors to `tensors`. Raises TypeError for anything but
    None, bool, int, float, str, list, tuple, dict and tensors.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and len(value) <= LONG:
        return value
    if isinstance(value, (str, torch.Tensor)):
        kind = "tensor"
        if isinstance(value, str):
            kind = "text"
            data = bytearray(value.encode("utf-8", "surrogatepass"))
            value = torch.frombuffer(data, dtype=torch.uint8)
        tensors.append(value.detach().cpu().contiguous())
        return [kind, len(tensors) - 1]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(encode(item, tensors) for item in value)]
    if isinstance(value, dict):
        pairs = ([encode(k, tensors), encode(v, tensors)] for k, v in value.items())
        return ["dict", *pairs]
    raise TypeError(f"found a {type(value).__name__}, expected numbers, texts, lists or tensors")


def decode(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Return the value that was encoded. tensor(i): the i-th of its tensors. Raises ValueError if
    `encode` did not write this JSON.
    """
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("found an object")
        return value
    if not value:
        raise ValueError("found an empty value")
    kind, *items = value
    if kind == "list":
        return [decode(item, tensor) for item in items]
    if kind == "tuple":
        return tuple(decode(item, tensor) for item in items)
    if kind == "dict":
        return {decode(k, tensor): decode(v, tensor) for k, v in items}
    if kind in ("tensor", "text") and len(items) == 1 and isinstance(items[0], int):
        found = tensor(items[0])
        return found if kind == "tensor" else _text(found)
    raise ValueError(f"found a value of kind {str(kind)[:40]!r}")


def _text(data: torch.Tensor) -> str:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError("found a text that is no bytes")
    return raw(data.contiguous()).tobytes().decode("utf-8", "surrogatepass")
