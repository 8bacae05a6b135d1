"""How many layers stream: as many as were asked for, or the fewest with which a model fits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.base.errors import SettingError
from engine.load.options import Options
from engine.load.report import Plan
from engine.load.staged.staging import LEAST
from engine.model.config.config import ModelConfig
from engine.plan.free_memory import HEADROOM
from kernels.launch.dispatch import choose_for

CONTEXT = 8192  # tokens to find room for where nobody says how many


def streamed_layers(options: Options, config: ModelConfig, device: torch.device) -> int:
    """Return how many layers `weights_offload` asks to stream, 0 for "auto". Raises SettingError
    for more than there are, and where a model cannot.
    """
    asked, layers = options.weights_offload, config.num_layers
    count = {"auto": 0, "off": 0, "all": layers}[asked] if isinstance(asked, str) else asked
    if count > layers:
        raise SettingError(
            f"weights_offload: found {count}, expected at most the model's {layers} layers"
        )
    if count and not _movable(options, config, device):
        raise SettingError(
            f"weights_offload: found {asked!r}, expected 'off' or 'auto' for a mixture of experts "
            "on a GPU: the experts of a layer lie in one tensor that stays there"
        )
    return count


def _movable(options: Options, config: ModelConfig, device: torch.device) -> bool:
    return config.experts is None or choose_for(options.backend, device) != "triton"


def may_stream(options: Options, config: ModelConfig, device: torch.device, plan: Plan) -> bool:
    """Return whether layers may stream though nobody asked: on a GPU with memory of its own, whose
    part of the plan does not fit.
    """
    by_itself = options.weights_offload == "auto" and device.type == "cuda" and not plan.shared
    return by_itself and not _on_device(plan) and _movable(options, config, device)


def fewest_streamed(planned: Callable[[int], Plan], layers: int) -> int:
    """Return the fewest layers that have to stream for the device's part of planned(layers that
    stream) to fit; 0 where it never does.
    """
    low, high = min(LEAST, layers), layers
    if not _on_device(planned(high)):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _on_device(planned(middle)) else (middle + 1, high)
    return low


def _on_device(plan: Plan) -> bool:
    return plan.total <= plan.free * HEADROOM
