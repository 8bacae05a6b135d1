"""Figures as people read them."""


def human(size):
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{int(size)} B"
