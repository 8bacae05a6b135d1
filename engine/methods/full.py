"""Full attention: every layer reads every key and value (METHODS.md 2.1, `full`). The baseline that
everything is compared with.
"""

from dataclasses import dataclass

from engine.methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """Dense attention in every layer. No settings."""
