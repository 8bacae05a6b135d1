"""Strict, typed access to the fields of a JSON object that comes from outside."""

from typing import NoReturn

from engine.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import shown

MAX_POSITIONS = 1 << 31


_REQUIRED = object()


class Fields:
    """Typed reads from an untrusted dict; every failure is one line: file, key, found, expected.

    A null counts as missing wherever a default is given. `prefix` stands before the key in messages
    ("rope_scaling.").
    """

    def __init__(self, data: dict, source: str, prefix: str = ""):
        self.data, self.source, self.prefix = data, source, prefix

    def refuse(self, key: str, found: object, expected: str) -> NoReturn:
        """Raises BadCheckpoint: the value makes no sense."""
        raise BadCheckpoint(self._line(key, found, expected))

    def unsupported(self, key: str, found: object, expected: str) -> NoReturn:
        """Raises UnsupportedCheckpoint: the value makes sense, but this engine does not run it."""
        raise UnsupportedCheckpoint(self._line(key, found, expected) + " (not supported)")

    def _line(self, key: str, found: object, expected: str) -> str:
        return f"{self.source}: {self.prefix}{key}: found {shown(found)}, expected {expected}"

    def _get(self, key: str, default: object, expected: str) -> object:
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                self.refuse(key, None, expected)
            return default
        return value

    def integer(self, key: str, low: int, high: int, default: object = _REQUIRED) -> int | None:
        """An int in [low, high]; booleans and 4096.0 are not ints."""
        expected = f"an integer from {low} to {high}"
        value = self._get(key, default, expected)
        if value is not default and (type(value) is not int or not low <= value <= high):
            self.refuse(key, value, expected)
        return value

    def number(
        self,
        key: str,
        above: float,
        below: float,
        default: object = _REQUIRED,
        closed: bool = False,
    ) -> float | None:
        """A finite number in (above, below), or [above, below] with `closed`; an int is one, a
        boolean is not.
        """
        expected = f"a number {'from' if closed else 'above'} {above:g} {'to' if closed else 'and below'} {below:g}"
        value = self._get(key, default, expected)
        if value is default:
            return value
        inside = type(value) in (int, float) and (
            above <= value <= below if closed else above < value < below
        )
        if not inside:  # NaN compares false, infinities lie outside
            self.refuse(key, value, expected)
        return float(value)

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        """A JSON boolean; 0 and 1 are not."""
        value = self._get(key, default, "true or false")
        if value is not default and type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: object = _REQUIRED) -> str:
        """A string."""
        value = self._get(key, default, "a string")
        if value is not default and not isinstance(value, str):
            self.refuse(key, value, "a string")
        return value
