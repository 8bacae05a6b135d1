"""The routes. Each checks its fields, queues a job and turns its events into a reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.batch.worker import Ended, Reading
from engine.forward.scores import PromptScores
from engine.serve.anthropic import request as anthropic
from engine.serve.anthropic.reply import MessagesReply
from engine.serve.documents import Documents
from engine.serve.errors import ApiError
from engine.serve.facts import Facts
from engine.serve.guards import OPEN, Guard
from engine.serve.http.leaving import HALF, left
from engine.serve.openai.answers import Answers
from engine.serve.openai.replies import Reply
from engine.serve.openai.streaming import Shape, stream
from engine.serve.page import page
from engine.serve.page.example import example_of
from engine.serve.request.fields import Ask, ask_of, prompt_of
from engine.serve.request.formats import grammar_of
from engine.serve.request.prompts import Prompt, usable_tools
from engine.serve.request.tools import messages_of
from engine.serve.request.variables import variables_of
from engine.serve.responses import request as responses
from engine.serve.responses.reply import ResponsesReply
from engine.serve.service import Service, client_error, ending
from engine.serve.worker.evidence import Evidence, Wanted, wanted_of
from engine.serve.worker.worker import Wrote

Handler = Callable[[Request], Awaitable[Response]]
NO_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/rerank")
PROGRESS = 0.2  # seconds between two comments about a prompt, where a request asks for more of them
NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def make_app(service: Service, guard: Guard) -> Starlette:
    """The ASGI application."""
    routes, facts = Routes(service, guard), Facts(service, guard)
    table: list[tuple[str, str, Handler]] = [
        ("/", "GET", page),
        ("/example", "GET", routes.example),
        ("/health", "GET", routes.health),
        ("/readyz", "GET", routes.health),
        ("/livez", "GET", routes.alive),
        ("/metrics", "GET", routes.metrics),
        ("/v1/models", "GET", facts.models),
        ("/v1/models/{name:path}", "GET", facts.model),
        ("/props", "GET", facts.props),
        ("/tokenizer_info", "GET", facts.tokenizer_info),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.complete),
        ("/v1/messages", "POST", routes.messages),
        ("/v1/messages/count_tokens", "POST", routes.count_tokens),
        ("/v1/responses", "POST", routes.responses),
        ("/v1/forget", "POST", routes.forget),
        ("/v1/text", "POST", Documents(guard, service.llm.max_context).text),
        *((f"{root}/tokenize", "POST", facts.tokenize) for root in ("", "/v1")),
        *((f"{root}/detokenize", "POST", facts.detokenize) for root in ("", "/v1")),
        *((path, "POST", facts.no_vectors) for path in NO_VECTORS),
    ]
    app = Starlette(
        routes=[
            Route(path, routes.guarded(call, path), methods=[how]) for path, how, call in table
        ],
        exception_handlers={404: _no_route, 405: _no_route},
    )
    app.router.redirect_slashes = False  # it would come before the guard and echo any host
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    found = "no such address" if status == 404 else "not with this HTTP method"
    return _refused(ApiError(status, found, code="not_found"))


def _refused(error: ApiError, path: str = "") -> JSONResponse:
    body = anthropic.error_body(error) if path.startswith("/v1/messages") else error.body()
    return JSONResponse(body, error.status, error.headers)


@dataclass(frozen=True)
class Asked:
    """A request whose fields are checked. answers: takes thoughts and calls out of what is written.
    progress: whether its stream says often how much of the prompt is read. scores: takes the log
    probabilities of the prompt's tokens.
    """

    ask: Ask
    prompt: Prompt
    answers: Answers
    evidence: Evidence | None = None
    method: str | None = None
    progress: bool = False
    scores: PromptScores | None = None


class Routes:
    """The handlers of one service."""

    def __init__(self, service: Service, guard: Guard) -> None:
        self.service, self.guard = service, guard

    def guarded(self, call: Handler, path: str) -> Handler:
        """A handler behind the guard, counted, whose errors become replies."""

        async def handle(request: Request) -> Response:
            try:
                self.guard.check(request, path)
                if not self.service.ready and path not in OPEN:
                    wait = {"Retry-After": "5"}
                    raise ApiError(503, "the model is being loaded", code="loading", headers=wait)
                if self.service.ending and request.method == "POST":
                    raise ending()  # unread: a long text would take the answers' time
                response = await call(request)
            except ApiError as error:
                response = _refused(error, path)
            self.service.worker.metrics.requests[path, response.status_code] += 1
            return response

        return handle

    # ---------------------------------------------------------------- facts

    async def health(self, request: Request) -> Response:
        """Whether the server takes requests: 200, or 503 with what it does instead."""
        state = self.service.state
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def alive(self, request: Request) -> Response:
        """Whether the process should go on: also while it loads and while it ends."""
        state = self.service.state
        return JSONResponse({"status": state}, 503 if state == "failed" else 200)

    async def example(self, request: Request) -> Response:
        """The document that comes with the model."""
        found = example_of(self.service.llm.folder)
        if found is None:
            raise ApiError(404, "no document comes with this model", code="not_found")
        return JSONResponse(found)

    async def metrics(self, request: Request) -> Response:
        """Counters in Prometheus' text form."""
        worker = self.service.worker
        counts = worker.running, worker.paused, worker.waiting
        text = worker.metrics.text(*counts, worker.slots, self.service.settings.alias)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # ---------------------------------------------------------------- texts

    async def forget(self, request: Request) -> Response:
        """Drop what is held of a text: sessions in memory, blocks on disk."""
        body = await self.guard.body(request)
        sessions, blocks = await self.service.forget(
            request, messages_of(body, False), self.guard.owner(request)
        )
        return JSONResponse({"sessions": sessions, "blocks": blocks})

    # ---------------------------------------------------------------- answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self.guard.body(request)
        self.service.named(body)
        asked = await self._asked(request, body)
        ask = asked.ask
        top = (body.get("top_logprobs") or 0) if ask.logprobs else None
        reply = Reply(
            self.service.settings.alias,
            True,
            len(asked.prompt.ids),
            top,
            self.service.prompts.tokenizer,
            asked.answers,
            ask.include_usage,
            ask.usage_always,
        )
        return await self._answer(request, asked, "messages", reply)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self.guard.body(request)
        self.service.named(body)
        ask = ask_of(body, chat=False)
        if ask.max_tokens is None:
            body["max_tokens"] = 16  # OpenAI's default here
            ask = ask_of(body, chat=False)
        given = prompt_of(body, self.service.llm.config.vocab_size)
        if isinstance(given, str):
            self.service.may_fit([given], "prompt")
        prompts, scores = self.service.prompts, None
        prompt = await self.service.text(request, prompts.completion, given, ask.echo)
        top = body["logprobs"] if ask.logprobs else None
        if ask.scores:
            scores = PromptScores(self.service.llm.load().model, prompt.ids, top or 0)
        answers = Answers(False, forgets=self.service.forgets)
        reply = Reply(
            self.service.settings.alias,
            False,
            len(prompt.ids),
            top,
            prompts.tokenizer,
            answers,
            include_usage=ask.include_usage,
            usage_always=ask.usage_always,
            echoed=prompt if ask.echo else None,
            scores=scores,
        )
        return await self._answer(
            request, Asked(ask, prompt, answers, scores=scores), "prompt", reply
        )

    async def messages(self, request: Request) -> Response:
        """Answer POST /v1/messages, in Anthropic's form."""
        body = anthropic.chat_of(await self.guard.body(request))
        self.service.named(body)
        asked = await self._asked(request, body, anthropic.NAMES)
        reply = MessagesReply(
            self.service.settings.alias,
            len(asked.prompt.ids),
            self.service.prompts.tokenizer,
            asked.ask.params.stop,
            self.service.llm.end_token_ids,
            asked.answers,
        )
        return await self._answer(request, asked, "messages", reply)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        body = anthropic.chat_of(await self.guard.body(request), counting=True)
        self.service.named(body)
        asked = await self._asked(request, body, anthropic.NAMES)
        return JSONResponse({"input_tokens": len(asked.prompt.ids)})

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        body = await self.guard.body(request)
        chat = responses.chat_of(body)
        self.service.named(chat)
        asked = await self._asked(request, chat, responses.NAMES)
        alias = self.service.settings.alias
        reply = ResponsesReply(alias, len(asked.prompt.ids), body, asked.answers)
        return await self._answer(request, asked, "input", reply)

    async def _asked(
        self, request: Request, body: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> Asked:
        """What a chat asks for, its fields checked and its prompt encoded. names: other names of
        its fields, for errors.
        """
        try:
            return await self._checked(request, body)
        except ApiError as error:
            raise error.renamed(names or {}) from None

    async def _checked(self, request: Request, body: Mapping[str, Any]) -> Asked:
        prompts, text = self.service.prompts, partial(self.service.text, request)
        ask, messages = ask_of(body, chat=True), messages_of(body, prompts.form is not None)
        self.service.may_fit((m["content"] for m in messages if m["role"] == "user"), "messages")
        tools, wanted = usable_tools(body, prompts), self._wanted(body)
        grammar = await text(grammar_of, body, tools, prompts)
        ask = replace(ask, params=replace(ask.params, grammar=grammar))
        more = variables_of(body, prompts.tokenizer.template)
        prompt = await text(prompts.chat, messages, tools.offered if tools else None, more)
        evidence = None
        if wanted.evidence:
            contents = [message["content"] for message in messages]
            evidence = await text(Evidence, wanted, prompt, contents)
        scanner, thinker = partial(prompts.scanner, tools) if tools else None, None
        if prompts.marks is not None and grammar is None and not ask.raw:
            thinker = partial(prompts.marks.scanner, prompt.text)
        answers = Answers(True, scanner, thinker, self.service.forgets)
        return Asked(ask, prompt, answers, evidence, wanted.method, wanted.progress)

    def _wanted(self, body: Mapping[str, Any]) -> Wanted:
        return wanted_of(body, self.service.sparse, self.service.methods)

    async def _answer(self, request: Request, asked: Asked, param: str, reply: Shape) -> Response:
        service, ask = self.service, asked.ask
        if await left(request):
            return Response(status_code=499)
        owner = self.guard.owner(request)
        job, mailbox = service.begin(
            asked.prompt.ids, ask, param, asked.evidence, asked.method, owner, asked.scores
        )
        events = service.events(job, mailbox, partial(left, request))
        if ask.stream:

            def ping() -> float:
                often = asked.progress or request.scope.get(HALF)
                return min(PROGRESS, service.settings.ping) if often else service.settings.ping

            lines = stream(events, reply, ping, service.clock)
            return StreamingResponse(lines, media_type="text/event-stream", headers=NO_STORE)
        wrote = []
        async for event in events:
            if isinstance(event, Reading):
                reply.found(event.cached)
            elif isinstance(event, Wrote):
                reply.count(event)
                wrote.append(event)
            elif isinstance(event, Ended):
                if event.error is not None:
                    raise client_error(event.error)
                if asked.scores is None:
                    return JSONResponse(reply.whole(wrote, ask.choices))
                # a row for each of the prompt's tokens: seconds of work for a long one
                return await service.text(
                    request, lambda: JSONResponse(reply.whole(wrote, ask.choices))
                )
        return Response(status_code=499)  # the client has left: nobody reads this
