"""Validators of settings: the same words for the same mistake everywhere."""

from collections.abc import Collection, Iterable
from typing import Any

from engine.errors import SettingError


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value`, which must be an int from `least` to `most` (a bool is none); else SettingError."""
    if is_integer(value) and least <= value and (most is None or value <= most):
        return value
    limit = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
    raise SettingError(f"{name}: found {value!r}, expected {limit}")


def fraction(name: str, value: Any, zero: bool = False) -> float:
    """`value`, which must be a number in (0, 1], or in [0, 1] with `zero`; else SettingError."""
    if is_number(value) and 0 <= value <= 1 and (value > 0 or zero):
        return value
    raise SettingError(f"{name}: found {value!r}, expected a number in {'[' if zero else '('}0, 1]")


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """`value`, which must be one of `allowed`; else SettingError."""
    if value in allowed:
        return value
    raise SettingError(f"{name}: found {value!r}, expected one of {', '.join(map(str, allowed))}")


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be True or False; else SettingError."""
    if isinstance(value, bool):
        return value
    raise SettingError(f"{name}: found {value!r}, expected True or False")


def at_most_one(settings: Any, *names: str) -> None:
    """Raise SettingError where more than one of these fields of `settings` is given."""
    given = [name for name in names if getattr(settings, name) is not None]
    if len(given) > 1:
        values = " and ".join(f"{name}={getattr(settings, name)}" for name in given)
        raise SettingError(f"budget: found {values}, expected at most one of {', '.join(names)}")


def is_integer(value: Any) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float and not a bool; NaN and infinity count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_ids(token_ids: Iterable[Any], vocab_size: int) -> list[int]:
    """Token ids as a list of ints below the vocabulary's size, at least one; else SettingError."""
    ids = [int(t) for t in token_ids]
    bad = next((t for t in ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise SettingError(
            f"token id: found {bad}, expected 0 to {vocab_size - 1} (the model's vocabulary)"
        )
    if not ids:
        raise SettingError("prefill: found no tokens, expected at least one")
    return ids
