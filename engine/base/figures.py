"""Figures and values as people read them: bytes, durations, counts, settings, errors."""

import dataclasses

LONG = 240  # characters of a setting that a line still shows whole


def human(size: float) -> str:
    """Format bytes: 12 B, 5.30 kB, 512.00 MB, 16.18 GB. Units are powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"


def clock(seconds: float) -> str:
    """Format a duration: 40 ms, 0.8 s, 42 s, 3:05, 1:02:09."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def count(number: int, word: str = "token") -> str:
    """Format a number with its noun: 1 token, 12,345 tokens."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def brief(settings: object) -> str:
    """Format a dataclass as a call that names only the fields that differ from their defaults.

    For example OmniKV(filter_layers=(2, 8, 18), tokens=64). A value of more than LONG characters,
    such as a table of every head, is cut. Anything else is formatted by str().
    """
    if not dataclasses.is_dataclass(settings):
        return str(settings)
    changed = [
        f"{field.name}={brief(value) if dataclasses.is_dataclass(value) else _cut(repr(value))}"
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) != field.default
    ]
    return f"{type(settings).__name__}({', '.join(changed)})"


def _cut(text: str) -> str:
    """The beginning of a text of more than LONG characters, or the text."""
    return text if len(text) <= LONG else f"{text[:60]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters.

    An error without a message gives the name of its type.
    """
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
