"""What several devices do not take."""

from __future__ import annotations

from engine.base.errors import SettingError
from engine.model.low_bits import OnTheWay, Rounding


def require_roundable(rounding: Rounding) -> None:
    """Raise SettingError for a checkpoint that comes quantised: its forms are listed by the numbers
    of all layers.
    """
    if not isinstance(rounding, OnTheWay):
        raise SettingError(
            "devices: found several for a quantised checkpoint, expected float weights, which "
            "weights='int8' and 'int4' round; use one device"
        )
