"""Validators of settings: the same words for the same mistake everywhere."""

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from engine.base.errors import SettingError

MOST = 1 << 40  # of any count: tokens, bytes of a budget; what is computed from it fits 64 bits
SHOWN = 80  # characters of a value in a message


def found(value: Any) -> str:
    """A value as messages show it: at most SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4300 digits; nested without end
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value`, which must be an int from `least` to `most` (a bool is none); else SettingError.

    Without `most` it may be as large as MOST.
    """
    if is_integer(value) and least <= value <= (MOST if most is None else most):
        return value
    limit = f"an int from {least} to {most}"
    if most is None:
        large = is_integer(value) and value > MOST
        limit = f"an int >= {least}" + (f" and at most {MOST}" if large else "")
    raise SettingError(f"{name}: found {found(value)}, expected {limit}")


def fraction(name: str, value: Any, zero: bool = False) -> float:
    """`value`, which must be a number in (0, 1], or in [0, 1] with `zero`; else SettingError."""
    if is_number(value) and 0 <= value <= 1 and (value > 0 or zero):
        return value
    raise SettingError(
        f"{name}: found {found(value)}, expected a number in {'[' if zero else '('}0, 1]"
    )


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """`value`, which must be one of `allowed`; else SettingError."""
    if value in allowed:
        return value
    raise SettingError(
        f"{name}: found {found(value)}, expected one of {', '.join(map(str, allowed))}"
    )


def boolean(name: str, value: Any) -> bool:
    """`value`, which must be True or False; else SettingError."""
    if isinstance(value, bool):
        return value
    raise SettingError(f"{name}: found {found(value)}, expected True or False")


def callables(**given: Any) -> None:
    """Raise SettingError for an argument that is neither None nor can be called."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise SettingError(f"{name}: found {found(value)}, expected a function or None")


def at_most_one(settings: Any, *names: str) -> None:
    """Raise SettingError where more than one of these fields of `settings` is given."""
    given = [name for name in names if getattr(settings, name) is not None]
    if len(given) > 1:
        values = " and ".join(f"{name}={found(getattr(settings, name))}" for name in given)
        raise SettingError(f"budget: found {values}, expected at most one of {', '.join(names)}")


def is_integer(value: Any) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is a float, or an int within a float's range and not a bool; NaN and infinity
    count.
    """
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() <= 1000
    return isinstance(value, float)


def checked_ids(token_ids: Iterable[Any], vocab_size: int) -> list[int]:
    """Token ids as a list of ints below the vocabulary's size, at least one; else SettingError."""
    ids = listed_ids(token_ids)
    bad = next((t for t in ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise SettingError(
            f"token id: found {found(bad)}, expected 0 to {vocab_size - 1} (the model's vocabulary)"
        )
    if not ids:
        raise SettingError("prefill: found no tokens, expected at least one")
    return ids


def listed_ids(token_ids: Any) -> list[int]:
    """Token ids as a list of ints, from any one-dimensional sequence of whole numbers (a list, an
    array, a tensor); else SettingError. Text, floats and bools are no ids.
    """
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
        raise SettingError(f"token ids: found {found(token_ids)}, expected a sequence of ints")
    if hasattr(token_ids, "tolist"):  # an array or a tensor: one transfer
        token_ids = token_ids.tolist()
        if not isinstance(token_ids, list):
            raise SettingError(f"token ids: found {found(token_ids)}, expected a sequence of ints")
    ids = list(token_ids)
    if not all(type(t) is int for t in ids):
        ids = [_id(t) for t in ids]
    return ids


def _id(value: Any) -> int:
    # bools, numpy's too, and tensors of them
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if not truth:
            return operator.index(value)
    except TypeError:
        pass
    raise SettingError(f"token id: found {found(value)}, expected an int")


def is_one_prompt(prompts: object) -> bool:
    """Whether this is one prompt (a text, or token ids of any kind) and not several."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1:
        return True
    if not isinstance(prompts, Sequence):
        raise SettingError(f"prompts: found {found(prompts)}, expected a text or token ids")
    return bool(prompts) and not any(
        isinstance(p, Sequence) or getattr(p, "ndim", 0) > 0 for p in prompts
    )
