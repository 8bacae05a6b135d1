"""placeholder table"""
from __future__ import annotations

from engine.methods.base import Method


def require_method(method: Method, ranks: int) -> None:
    """Raise SettingError for a method that ranks cannot run."""
