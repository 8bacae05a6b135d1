"""How many layers stream: as many as were asked for, or the fewest with which a model fits."""

from __future__ import annotations

from collections.abc import Callable

from engine.base.errors import SettingError
from engine.forward.staged.staging import LEAST
from engine.model.config.config import ModelConfig

CONTEXT = 8192  # tokens to find room for where nobody says how many


def streamed_layers(asked: int | str, config: ModelConfig, triton: bool) -> int:
    """Return how many layers `weights_offload` asks to stream, 0 for "auto". triton: whether its
    kernels run the model. Raises SettingError for more than there are, and where a model cannot.
    """
    layers = config.num_layers
    count = {"auto": 0, "off": 0, "all": layers}[asked] if isinstance(asked, str) else asked
    if count > layers:
        raise SettingError(
            f"weights_offload: found {count}, expected at most the model's {layers} layers"
        )
    if count and not movable(config, triton):
        raise SettingError(
            f"weights_offload: found {asked!r}, expected 'off' or 'auto' for a mixture of experts "
            "on a GPU: the experts of a layer lie in one tensor that stays there"
        )
    return count


def movable(config: ModelConfig, triton: bool) -> bool:
    """Return whether a model's layers can stream: not where the device chooses experts."""
    return config.experts is None or not triton


def fewest_streamed(fits: Callable[[int], bool], layers: int) -> int:
    """Return the fewest layers that have to stream, of so many: `fits` says of a number of them
    whether the device holds the rest. 0 where it never does.
    """
    low, high = min(LEAST, layers), layers
    if not fits(high):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
