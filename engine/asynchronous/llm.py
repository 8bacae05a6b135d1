"""AsyncLLM: the requests of any number of callers, in the order in which they asked."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import cast
from weakref import WeakKeyDictionary

from engine.asynchronous.answer import Answer
from engine.base.checks import callables, checked_ids, found, integer, is_number, is_one_prompt
from engine.base.errors import ContextTooLong, SettingError
from engine.batch.mailbox import Bell, Mailbox
from engine.batch.worker import Job, Worker
from engine.llm import LLM, Prompt
from engine.plan.filter_layers import hint_at
from engine.plan.prefill_time import Progress
from engine.sampling.params import SamplingParams
from engine.session.results import Completion


class AsyncLLM:
    """Answers of one LLM for the tasks of an event loop, or of several loops.

    One thread runs the model. Callers get a slot in the order in which they asked; those in slots
    share decode steps, and between two steps one prompt advances by a chunk. Answers are those of
    LLM.generate, up to the rounding of other chunks and batched products.

    slots: answers at once, each with a session of its own that stays open: a prompt that begins as
    an earlier one did is read from there on. waiting: most callers that may wait for a slot, others
    get Busy; None: any number. pause: seconds that answers may wait for a chunk of another's prompt
    (None: a whole chunk). The LLM is loaded here if it is not yet, which takes time. Whoever calls
    the LLM itself meanwhile gets Busy or, with LLM(..., wait=True), a turn.

    `async with AsyncLLM(llm) as many: ...` closes it. Raises SettingError.
    """

    def __init__(
        self,
        llm: LLM,
        slots: int = 4,
        waiting: int | None = None,
        pause: float | None = None,
    ) -> None:
        if not isinstance(llm, LLM):
            raise SettingError(f"llm: found {found(llm)}, expected an LLM(...)")
        if waiting is not None:
            integer("waiting", waiting, 0)
        self.llm = llm
        self._worker: Worker[Job] = Worker(llm.batch(slots, pause), waiting)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()
        self._worker.start()
        self._ended = weakref.finalize(self, self._worker.end, 0.0)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def waiting(self) -> int:
        """Callers that wait for a slot."""
        return self._worker.waiting

    @property
    def running(self) -> int:
        """Answers under way."""
        return self._worker.running

    # ---------------------------------------------------------------- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """Pieces of the answer to a text or ids, as an asynchronous iterator that begins with its
        first piece.

        progress(PrefillProgress) is called in the event loop's thread after every chunk of the
        prompt. When the task that iterates is cancelled or fails, and when the iterator is closed
        or dropped, the answer ends before its next step, or its prompt before its next chunk, and
        its slot is free. Raises at the first piece what LLM.stream raises, Busy where too many
        wait, and WorkerClosed.
        """
        callables(progress=progress)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise SettingError(f"params: found {found(params)}, expected SamplingParams(...)")
        return Answer(self._begin, prompt, params, progress)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        progress: Progress | None = None,
    ) -> Completion | list[Completion]:
        """Completion of a text or of token ids; for a list of either a list, all at once as far as
        there are slots. progress: as of `stream`, of one prompt. If one fails, the others end.
        """
        if is_one_prompt(prompts):
            return await self._whole(cast(Prompt, prompts), params, progress)
        tasks = [asyncio.ensure_future(self._whole(cast(Prompt, p), params)) for p in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        progress: Progress | None = None,
    ) -> Completion:
        """Completion of a conversation of {"role", "content"}, as LLM.chat."""
        return await self._whole(await self.chat_ids(messages), params, progress)

    async def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, for `stream`; control tokens in its contents are text."""
        async with self._loop().order:
            return await asyncio.to_thread(self.llm.chat_ids, messages)

    async def _whole(
        self, prompt: Prompt, params: SamplingParams | None, progress: Progress | None = None
    ) -> Completion:
        answer = self.stream(prompt, params, progress)
        return Completion.join([piece async for piece in answer])

    # ---------------------------------------------------------------- the end

    async def aclose(self, grace: float = 0.0) -> None:
        """As `close`, without stopping the event loop."""
        await asyncio.to_thread(self.close, grace)

    def close(self, grace: float = 0.0) -> None:
        """Refuse what waits, with WorkerClosed; let answers go on for `grace` seconds, then end
        them ("interrupted"). Returns when all sessions are closed; the LLM stays.
        """
        if not is_number(grace) or grace < 0:
            raise SettingError(f"grace: found {found(grace)}, expected seconds of at least 0")
        self._worker.stop(grace)

    # ---------------------------------------------------------------- one request

    def _loop(self) -> _Loop:
        loop = asyncio.get_running_loop()
        return self._loops.setdefault(loop, _Loop())

    async def _begin(self, prompt: Prompt, params: SamplingParams) -> tuple[Job, Mailbox]:
        """Queue a request, behind those that asked before."""
        here, llm = self._loop(), self.llm
        async with here.order:
            if isinstance(prompt, str):
                ids = await asyncio.to_thread(llm.encode, prompt)  # a book takes a while
            else:
                ids = llm.encode(prompt)
            ids = checked_ids(ids, llm.config.vocab_size)
            if len(ids) > llm.max_context:
                raise ContextTooLong(
                    f"prompt: found {len(ids)} tokens, expected at most {llm.max_context}; raise "
                    f"max_context, or shorten the text"
                )
            hint_at(llm.planner.hint, len(ids))
            mailbox = Mailbox(here.bell)
            job = Job(ids, params, mailbox.post)
            self._worker.submit(job)
            return job, mailbox


class _Loop:
    """What callers of one event loop share: who wakes them, and the order in which they asked."""

    def __init__(self) -> None:
        self.bell, self.order = Bell(), asyncio.Lock()
