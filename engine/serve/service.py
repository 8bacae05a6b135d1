"""One model behind the routes: loading, prompts, jobs and their events."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from engine.base.errors import (
    Busy,
    EngineError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    OutOfMemoryPlan,
    SettingError,
    TimedOut,
    WorkerClosed,
)
from engine.batch.mailbox import Bell, Mailbox
from engine.batch.worker import Ended
from engine.forward.scores import PromptScores
from engine.llm import LLM
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.saved.cache import BlockCache
from engine.saved.forget import forget_text
from engine.serve.errors import ApiError
from engine.serve.http.leaving import left
from engine.serve.request.fields import Ask
from engine.serve.request.prompts import Prompt, Prompts
from engine.serve.request.values import text_of
from engine.serve.texts import SIZE, Texts
from engine.serve.worker.evidence import Evidence, places
from engine.serve.worker.worker import Event, HttpJob, HttpWorker

if TYPE_CHECKING:
    from starlette.requests import Request


SHORTEST = 32  # tokens of a text that can be forgotten; shorter ones may begin anybody's
# a template may write a text otherwise where a question follows it, and set a mark between them
QUESTION = "\n\n?"
BORDER = 4  # last tokens of a text, which what follows it may have changed
NAME_SHOWN = 80  # characters of a name that is another model's
LOOK = 0.1  # seconds between two looks at whether the client is still there
FULL = (OutOfDeviceMemory, OutOfHostMemory, OutOfMemoryPlan)


@dataclass(frozen=True)
class Settings:
    """Of a server: the model's public name, sessions held, jobs that may wait, seconds that an
    answer may take, seconds of quiet after which a stream gets a comment, seconds that answers
    wait for a part of another's prompt (None: a whole chunk).
    """

    alias: str
    slots: int = 4
    waiting: int = 32
    timeout: float = 3600.0
    ping: float = 3.0
    pause: float | None = None


class Service:
    """What the routes call. `load` must have returned before anything but `ready`.

    clock: seconds, by which a stream has been quiet for long enough to get a comment.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        cache: BlockCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm, self.settings, self.started = llm, settings, int(time.time())
        self.clock = clock
        self.ready, self.ending = False, False
        self.worker = HttpWorker(
            llm, settings.slots, settings.waiting, settings.timeout, cache, settings.pause
        )
        self._texts = Texts(settings.slots + settings.waiting)
        self._bell = Bell()

    def load(self) -> None:
        """Read the weights and begin to serve. Raises typed errors."""
        self.llm.load()
        if self.llm.tokenizer is None:
            raise SettingError("this model has no tokenizer, so it cannot be served")
        size, ends = self.llm.config.vocab_size, self.llm.end_token_ids
        self.prompts = Prompts(self.llm.tokenizer, size, ends, self.llm.max_context)
        self.worker.start()
        self.ready = True

    def stop(self, grace: float) -> None:
        """End all answers (see Worker.stop)."""
        self.ending = True
        if self.ready:
            self.worker.stop(grace)

    @property
    def state(self) -> str:
        """What the server does: "loading", "ok", "ending", or "failed" where the model's thread has
        ended by itself.
        """
        if self.ending:
            return "ending"
        if not self.ready:
            return "loading"
        return "ok" if self.worker.alive else "failed"

    def announce_end(self) -> bool:
        """Say that the server ends; return whether nobody had said so."""
        first, self.ending = not self.ending, True
        return first

    async def text(self, request: Request, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a call about the texts of a request beside the event loop. Raises ApiError."""
        size = request.scope.get(SIZE, 0)
        try:
            return await self._texts.run(size, partial(left, request), lambda: call(*arguments))
        except EngineError as error:
            raise ApiError(400, str(error)) from None

    def named(self, body: Mapping[str, Any]) -> None:
        """Raise ApiError where a request means another model."""
        name, alias = body.get("model"), self.settings.alias
        if name is None:
            return
        found = text_of(name, "model")
        if found != alias:
            cut = found if len(found) <= NAME_SHOWN else f"{found[:NAME_SHOWN]}..."
            raise ApiError(
                404,
                f"model: found {ascii(cut)}, expected {alias}",  # no control character passes
                "model",
                "model_not_found",
            )

    def may_fit(self, texts: Iterable[str], param: str) -> None:
        """Raise ApiError where texts are surely too long for the context, without reading them."""
        capacity, most = self.llm.max_context, self.prompts.characters
        found = sum(len(text.strip()) for text in texts)  # templates may trim what is around
        if most is not None and found > capacity * most:
            raise ApiError(
                400,
                f"{param}: found {found} characters, expected at most {capacity * most}: this "
                f"server's context is {capacity} tokens (--ctx) of at most {most} characters each",
                param,
                "context_length_exceeded",
            )

    async def forget(
        self, request: Request, messages: list[dict[str, Any]], owner: bytes
    ) -> tuple[int, int]:
        """Close the idle sessions of `owner` that begin with these messages up to the end of the
        last one's text, alone or before a question, and remove the cache's blocks of it:
        (sessions, blocks). Raises ApiError where it is too short to be told from the beginnings of
        others.
        """
        last, forms = messages[-1], []
        for question in ("", QUESTION):
            content = last["content"] + question
            prompt = await self.text(
                request, self.prompts.chat, [*messages[:-1], last | {"content": content}]
            )
            forms.append(prompt.ids[: tokens_before(prompt, last["content"])])
        if min(map(len, forms)) < SHORTEST:
            raise ApiError(
                400,
                f"messages: found a text of fewer than {SHORTEST} tokens, with which others may "
                f"begin too; it stays until its place is needed",
                "messages",
                "invalid_value",
            )
        loop, closed = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def tell(found: int) -> None:
            if not closed.cancelled():
                closed.set_result(found)

        def close() -> None:
            slots = self.worker.slots
            loop.call_soon_threadsafe(tell, sum(slots.forget(ids, owner) for ids in forms))

        try:
            self.worker.between(close)
        except EngineError as error:
            raise client_error(error) from None
        sessions, blocks, cache = await closed, 0, self.worker.cache
        if cache is not None:
            for ids in forms:
                blocks += await asyncio.to_thread(forget_text, cache, self.llm.load(), ids)
        return sessions, blocks

    # ---------------------------------------------------------------- jobs

    @cached_property
    def sparse(self) -> bool:
        """Whether the method has layers that choose what they read."""
        return bool(self.llm.resolve_method(self.llm.method)[1].sparse_layers)

    @cached_property
    def methods(self) -> dict[str, Method]:
        """What `omnikv.method` may name: "sparse" is the server's own, whatever it is, or what
        drafts for it in exact mode. A stream without end has no other.
        """
        own = self.llm.method
        sparse = own.method if isinstance(own, Exact) else own
        found: dict[str, Method] = {"sparse": sparse}
        if self.sparse and not self.llm.options.forever:
            found["full"] = self.llm.resolve_method(Full())[0]
            if not sparse.cannot_draft:
                exact = own if isinstance(own, Exact) else Exact(sparse)
                found["exact"] = self.llm.resolve_method(exact)[0]
        return found

    @property
    def forgets(self) -> Callable[[int], int] | None:
        """How many of so many tokens a conversation without end has forgotten; None where it has an
        end.
        """
        if not self.llm.options.forever:
            return None
        return partial(self.llm.planner.method.gone, held=self.llm.plan().budget)

    @property
    def own(self) -> str:
        """The name of what requests get that do not choose: "exact" of a server in exact mode."""
        return "exact" if isinstance(self.llm.method, Exact) else "sparse"

    def begin(
        self,
        ids: list[int],
        ask: Ask,
        param: str,
        evidence: Evidence | None = None,
        method: str | None = None,
        owner: bytes = b"",
        scores: PromptScores | None = None,
    ) -> tuple[HttpJob, Mailbox]:
        """Queue a request. Raises ApiError where the prompt does not fit or the queue is full."""
        capacity = self.llm.max_context
        if not ids:
            raise ApiError(400, f"{param}: found no tokens, expected at least one", param)
        if len(ids) >= capacity:
            raise ApiError(
                400,
                f"{param}: found {len(ids)} tokens, expected at most {capacity - 1}: this server's "
                f"context is {capacity} tokens (--ctx)",
                param,
                "context_length_exceeded",
            )
        size = self.llm.config.vocab_size
        if any(token >= size for token, _ in ask.params.logit_bias):
            raise ApiError(
                400,
                f"logit_bias: expected ids from 0 to {size - 1}",
                "logit_bias",
                "invalid_value",
            )
        room = capacity - len(ids)
        if self.llm.options.forever and ask.max_tokens is None:
            room = min(room, self.llm.planner.max_context)  # a stream's answer must end somewhere
        params = replace(ask.params, max_tokens=min(ask.max_tokens or room, room))
        mailbox = Mailbox(self._bell)
        own = self.methods[method or self.own]
        job = HttpJob(
            ids,
            params,
            mailbox.post,
            own,
            mailbox.full,
            owner,
            scores,
            choices=0 if ask.max_tokens == 0 else ask.choices,
            evidence=evidence,
        )
        try:
            self.worker.submit(job)
        except EngineError as error:
            raise client_error(error) from None
        return job, mailbox

    async def events(
        self, job: HttpJob, mailbox: Mailbox, left: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[Event | None]:
        """The events of a job, and None where nothing happened for a while. Ends early where the
        client has left; the job ends with this iterator.
        """
        looked = time.monotonic()
        try:
            while True:
                event = await mailbox.next(LOOK)
                now = time.monotonic()
                if now - looked >= LOOK:
                    looked = now
                    if await left():
                        return
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            job.leave()


def tokens_before(prompt: Prompt, text: str) -> int:
    """How many tokens of a prompt surely stand before the end of its last content, `text`."""
    found = places(prompt.text, [text])
    if not found:
        return 0
    return max(0, bisect_right(prompt.ends, found[-1].stop) - BORDER)


def ending() -> ApiError:
    """What a client is told that comes while the last answers are written: ask another replica, or
    again, over another connection.
    """
    headers = {"Retry-After": "2", "Connection": "close"}
    return ApiError(503, "the server is ending", code="shutting_down", headers=headers)


def client_error(error: Exception) -> ApiError:
    """What a client is told of an error in the worker."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FULL):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "30"})
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "5"})
    if isinstance(error, WorkerClosed):
        return ending()
    if isinstance(error, TimedOut):
        return ApiError(503, str(error), code="timeout")
    if isinstance(error, EngineError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed; its log says why", code="internal_error")
