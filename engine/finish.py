"""Short work that an interrupt must not leave half done."""

from collections.abc import Callable


def finished(work: Callable[[], object]) -> None:
    """Do `work`; if anything breaks it off, do it again from its beginning and raise the interrupt
    then. `work` must bear being done twice.
    """
    try:
        work()
    except BaseException:
        work()
        raise
