"""Chunked prefill beside decode: a chunk has as many tokens as the other answers may wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from engine.base.checks import is_number
from engine.base.errors import SettingError
from engine.forward.prefill import Outputs
from engine.session.session import Session

LEAST = 64  # tokens of a chunk; below, a product of few rows costs about as much


class WaitForTurn:
    """Yielded by a task that needs a turn of its own, for example to prefill a chunk. No session
    decodes meanwhile.
    """


WAIT_FOR_TURN = WaitForTurn()


class ChunkBudget:
    """The number of tokens in the next chunk of a prompt. chunk: the most tokens. pause: seconds
    that the other answers may wait; None: as long as a whole chunk takes.
    """

    def __init__(
        self,
        chunk: int,
        pause: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if pause is not None and (not is_number(pause) or pause <= 0):
            raise SettingError(f"pause: found {pause!r}, expected seconds above 0, or None")
        self.chunk, self.pause, self.clock = chunk, pause, clock
        self._least = min(LEAST, chunk)
        self._tokens = self._least  # nothing is known of this machine yet

    def tokens(self, others: bool) -> int:
        """Tokens of the next chunk. others: whether other answers are being generated."""
        return self._tokens if others and self.pause is not None else self.chunk

    def took(self, tokens: int, seconds: float) -> None:
        """Record the tokens of a chunk that was read, and its seconds."""
        if self.pause is None or tokens < self._least:
            return
        fits = int(tokens * self.pause / max(seconds, 1e-9)) // LEAST * LEAST
        # one quick chunk proves little: grow by doubling
        most = min(self.chunk, 2 * max(tokens, self._tokens))
        self._tokens = max(self._least, min(fits, most))


def prefill_in_chunks(
    session: Session,
    ids: Sequence[int],
    budget: ChunkBudget,
    others: Callable[[], bool],
    progress: Callable[[int, float], None] | None = None,
    every: Outputs | None = None,
) -> Iterator[WaitForTurn]:
    """Prefill a prompt, one chunk after each WAIT_FOR_TURN that is yielded. others() returns
    whether other answers are being generated. progress(tokens read so far, seconds of this chunk)
    is called after every chunk. every: as of Session.prefill.
    """
    done, total = 0, len(ids)
    needs = session.runtime.needs
    while done < total:
        yield WAIT_FOR_TURN
        size = budget.tokens(others())
        if needs.final_call is None or needs.one_chunk or total - done - size < needs.final_call:
            size = total - done
        stop = min(total, done + size)
        began = budget.clock()
        session.prefill(ids[done:stop], more=stop < total, every=every)
        seconds = budget.clock() - began
        budget.took(stop - done, seconds)
        done = stop
        if progress is not None:
            progress(done, seconds)
