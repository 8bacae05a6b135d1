"""Strict, typed reads from a JSON object that we do not trust."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, overload

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import shown

T = TypeVar("T")
_REQUIRED: Any = object()  # no default: the field must be there


class Fields:
    """Typed reads from an untrusted dict. Every refusal is one line: file, key, found, expected.

    Where a default is given, null counts as missing. `prefix` is written before the key in
    messages ("rope_scaling.").
    """

    def __init__(self, data: dict[str, Any], source: str, prefix: str = ""):
        self.data, self.source, self.prefix = data, source, prefix

    def refuse(self, key: str, found: object, expected: str) -> NoReturn:
        """Raise BadCheckpoint: the value makes no sense."""
        raise BadCheckpoint(self._line(key, found, expected))

    def unsupported(self, key: str, found: object, expected: str) -> NoReturn:
        """Raise UnsupportedCheckpoint: the value makes sense, but this engine cannot run it."""
        raise UnsupportedCheckpoint(self._line(key, found, expected) + " (not supported)")

    @overload
    def integer(self, key: str, low: int, high: int) -> int: ...

    @overload
    def integer(self, key: str, low: int, high: int, default: T) -> int | T: ...

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """Read an int in [low, high]; booleans and 4096.0 are refused."""
        expected = f"an integer from {low} to {high}"
        value = self._get(key, default, expected)
        if value is not default and (type(value) is not int or not low <= value <= high):
            self.refuse(key, value, expected)
        return value

    @overload
    def number(self, key: str, above: float, below: float, *, closed: bool = False) -> float: ...

    @overload
    def number(
        self, key: str, above: float, below: float, default: T, closed: bool = False
    ) -> float | T: ...

    def number(
        self,
        key: str,
        above: float,
        below: float,
        default: Any = _REQUIRED,
        closed: bool = False,
    ) -> Any:
        """Read a finite number in (above, below), or in [above, below] if `closed`.

        Ints are accepted, booleans are not.
        """
        if closed:
            expected = f"a number from {above:g} to {below:g}"
        else:
            expected = f"a number above {above:g} and below {below:g}"
        value = self._get(key, default, expected)
        if value is default:
            return value
        inside = type(value) in (int, float) and (
            above <= value <= below if closed else above < value < below
        )
        if not inside:  # NaN compares false, infinities lie outside
            self.refuse(key, value, expected)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read a JSON boolean; 0 and 1 are refused."""
        value = self._get(key, default, "true or false")
        if type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Read a string."""
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            self.refuse(key, value, "a string")
        return value

    def _line(self, key: str, found: object, expected: str) -> str:
        return f"{self.source}: {self.prefix}{key}: found {shown(found)}, expected {expected}"

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                self.refuse(key, None, expected)
            return default
        return value
