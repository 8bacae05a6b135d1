"""Completion of short work that an interrupt must not leave half done."""

from collections.abc import Callable


def complete(work: Callable[[], object]) -> None:
    """Run `work` to completion even if interrupted: on any exception run it once more, then
    re-raise. `work` must be idempotent.
    """
    try:
        work()
    except BaseException:
        work()
        raise
