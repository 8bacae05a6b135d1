"""One answer of an AsyncLLM: pieces that a task iterates over, which ends with that task."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from engine.batch.mailbox import Mailbox
from engine.batch.worker import Ended, Job, Reading
from engine.llm import Prompt
from engine.plan.prefill_time import Progress
from engine.sampling.params import SamplingParams
from engine.session.results import Piece

Begin = Callable[[Prompt, SamplingParams], Awaitable[tuple[Job, Mailbox]]]


class Answer(AsyncIterator[Piece]):
    """The pieces of one answer; made by AsyncLLM.stream. One task at a time may iterate."""

    def __init__(
        self,
        begin: Begin,
        prompt: Prompt,
        params: SamplingParams,
        progress: Progress | None,
    ) -> None:
        self._begin, self._prompt, self._params, self._progress = begin, prompt, params, progress
        self._job: Job | None = None
        self._over = False
        self._task: weakref.ref[asyncio.Task] | None = None

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        if self._over:
            raise StopAsyncIteration
        self._follow()
        try:
            if self._job is None:
                self._job, self._mailbox = await self._begin(self._prompt, self._params)
            return await self._next()
        except BaseException:
            self.close()
            raise

    async def _next(self) -> Piece:
        while True:
            event = await self._mailbox.next()
            if isinstance(event, Reading):
                if self._progress is not None:
                    self._progress(event.progress)
            elif not isinstance(event, Ended):
                return cast(Piece, event)
            elif event.error is not None:
                raise event.error
            else:
                raise StopAsyncIteration

    def _follow(self) -> None:
        """Have the answer end with the task that iterates. Its exception keeps its frames, and with
        them this object, so that nothing else would end it.
        """
        task = asyncio.current_task()
        if task is not None and (self._task is None or self._task() is not task):
            self._task = weakref.ref(task)
            mine = weakref.ref(self)
            task.add_done_callback(lambda task: _ended(mine(), task))

    def follows(self, task: asyncio.Task) -> bool:
        """Whether this task was the last to ask for a piece."""
        return self._task is not None and self._task() is task

    def close(self) -> None:
        """End the answer; from any thread."""
        self._over = True
        if self._job is not None:
            self._job.leave()

    async def aclose(self) -> None:
        """As `close`, for contextlib.aclosing."""
        self.close()

    def __del__(self) -> None:
        self.close()


def _ended(answer: Answer | None, task: asyncio.Task) -> None:
    """Close the answer of a task that has ended before it. A task that returned may have taken one
    piece for another, as asyncio.wait_for's do.
    """
    if answer is not None and answer.follows(task):
        if task.cancelled() or task.exception() is not None:
            answer.close()
