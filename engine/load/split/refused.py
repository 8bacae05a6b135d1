"""What several devices do not take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.base.errors import SettingError
from engine.model.low_bits import OnTheWay, Rounding


def require_roundable(rounding: Rounding, devices: Sequence[torch.device]) -> None:
    """Raise SettingError for a checkpoint that comes quantised over devices of two kinds: each
    keeps other forms of what is stored.
    """
    if not isinstance(rounding, OnTheWay) and len({device.type for device in devices}) > 1:
        raise SettingError(
            f"devices: found {', '.join(map(str, devices))} for a quantised checkpoint, expected "
            "GPUs alone or CPUs alone, as each keeps other forms of it; or use weights='float'"
        )
