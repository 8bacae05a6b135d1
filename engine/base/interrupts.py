"""Completion of short work that an interrupt must not leave half done."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch


def complete(work: Callable[[], object]) -> None:
    """Run `work` to completion even if interrupted: on any exception run it once more, then
    re-raise. `work` must be idempotent.
    """
    try:
        work()
    except BaseException:
        work()
        raise


@contextlib.contextmanager
def put_back(views: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors of any shapes their values of before at the end, whatever was written to them,
    and whatever ends it.
    """
    before = [view.clone() for view in views]

    def restore() -> None:
        for view, values in zip(views, before):
            view.copy_(values)

    try:
        yield
    finally:
        complete(restore)
