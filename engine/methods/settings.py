"""Checks of a method's settings, the same words for the same mistake everywhere."""

from engine.errors import SettingError


def whole(name, value, least, most=None):
    """Raise SettingError unless value is an int from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        limit = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
        raise SettingError(f"{name}: found {value!r}, expected {limit}")


def portion(name, value, zero=False):
    """Raise SettingError unless value is a number in (0, 1] (zero: or [0, 1])."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= 1
        or (value == 0 and not zero)
    ):
        raise SettingError(
            f"{name}: found {value!r}, expected a number in {'[' if zero else '('}0, 1]"
        )


def choice(name, value, allowed):
    """Raise SettingError unless value is one of `allowed`."""
    if value not in allowed:
        raise SettingError(
            f"{name}: found {value!r}, expected one of {', '.join(map(str, allowed))}"
        )


def one_budget(method, *names):
    """Raise SettingError where more than one of these fields of a method is given."""
    given = [name for name in names if getattr(method, name) is not None]
    if len(given) > 1:
        values = " and ".join(f"{name}={getattr(method, name)}" for name in given)
        raise SettingError(f"budget: found {values}, expected at most one of {', '.join(names)}")
