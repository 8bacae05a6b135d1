"""The backend "native" by name: where it cannot run, a plan and a session say why."""

from __future__ import annotations

import torch

from engine.base.errors import SettingError
from kernels.native.library import missing, native


def require_native(backend: str, device: torch.device, compile: bool = False) -> None:
    """Raise SettingError where the C++ kernels are asked for and cannot run on a device.

    compile: find out by compiling them, where nobody has.
    """
    if backend != "native":
        return
    if compile and device.type == "cpu":
        native()
    why = missing() if device.type == "cpu" else f"the model is on {device.type}"
    if why:
        raise SettingError(f"backend: found 'native', but {why}; use 'auto'")
