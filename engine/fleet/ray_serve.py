"""The server as an application of Ray Serve: replicas of one model, and a front that hands a
request to the replica that has read the beginning of its text.

    serve run engine.fleet.ray_serve:application flags="--model NAME --ctx 32K" replicas=2

`flags` are those of python -m engine.serve, but for its address, which is Ray's. A replica runs the
whole server (engine/serve), so that every address of it is there. Ray's own prefix router comes
with ray[llm] and takes Ray's own requests; this one needs ray[serve], and bounds what it remembers.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from engine.base.errors import UsageError
from engine.fleet.asgi import Asked, Begun, answered
from engine.fleet.prefixes import Prefixes, beginnings
from engine.serve.cli import build
from engine.serve.errors import ApiError
from engine.serve.flags import parser, require_sense
from engine.serve.service import ending
from engine.terminal.documents import LONGEST_CONTEXT

MOST = max(1 << 20, 16 * LONGEST_CONTEXT)  # bytes of a body; a replica allows what its context can
WHO = b"x-replica"  # header of a reply: the name of the replica that wrote it
LOST = RayError, RayServeException, TimeoutError
ROUTERS = ("prefix", "load")
KNOWN = ("flags", "replicas", "cpus", "gpus", "ongoing", "router")


class PrefixRouter(RequestRouter):
    """Prefers the replica that got the same beginning, else the one with least to do and least
    read. A replica with as many requests as it may have at once (`ongoing`) is passed over.
    """

    def initialize_state(self, **settings: Any) -> None:
        """settings: of Prefixes."""
        self._prefixes: Prefixes[ReplicaID] = Prefixes(**settings)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates in the order in which they are tried."""
        text: tuple[bytes, ...] = ()
        if pending_request is not None:
            text = _text_of(pending_request)
            pending_request.routing_context.should_backoff = True  # all of them are in the list
        queues = self.replica_queue_len_cache
        best = self._prefixes.holder(text, {one.replica_id for one in candidate_replicas})

        def rank(one: RunningReplica) -> tuple[bool, int, int, float]:
            name = one.replica_id
            busy = queues.get(name) or 0
            return name != best, busy, self._prefixes.held(name), random.random()

        return [[one] for one in sorted(candidate_replicas, key=rank)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remember it."""
        self._prefixes.note(_text_of(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget it."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.drop(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget those that have gone."""
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for gone in before - set(self.curr_replicas):
            self._prefixes.drop(gone)


def _text_of(request: PendingRequest) -> tuple[bytes, ...]:
    asked = request.args[0] if request.args else None
    return asked.beginnings if isinstance(asked, Asked) else ()


class Replica:
    """One model behind the server's routes, loaded when it is made. flags: of engine.serve."""

    def __init__(self, flags: list[str]) -> None:
        args = parser().parse_args(flags)
        self.grace, self.name = args.grace, serve.get_replica_context().replica_id.unique_id
        self.service, self.app = build(args)
        self.service.load()

    async def answer(self, asked: Asked) -> AsyncIterator[Begun | bytes]:
        """The reply to a request, in parts."""
        async with contextlib.aclosing(answered(self.app, asked)) as parts:
            async for part in parts:
                if isinstance(part, Begun):
                    part = Begun(part.status, [*part.headers, (WHO, self.name.encode())])
                yield part

    async def whole(self, asked: Asked) -> tuple[str, int, bytes]:
        """(its name, status, body) of a reply, for what every replica is asked."""
        begun, *body = [part async for part in answered(self.app, asked)]
        assert isinstance(begun, Begun)
        return self.name, begun.status, b"".join(p for p in body if isinstance(p, bytes))

    async def check_health(self) -> None:
        """Have Ray replace a replica whose model's thread has ended."""
        if self.service.state == "failed":
            raise RuntimeError("the thread that runs the model has ended; its log says why")

    def __del__(self) -> None:
        """Ray has let the answers end, or given them up."""
        if hasattr(self, "service"):
            self.service.stop(self.grace)


class Front:
    """Takes the requests. replicas: a handle of Replica."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.all, self.replicas = replicas, replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """The reply of a replica, as it comes."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST:
                return _refused(ApiError(413, f"the body is larger than {MOST} bytes"))
        asked = Asked(
            request.method,
            request.scope["path"].removeprefix(request.scope.get("root_path", "")),
            request.scope.get("query_string", b""),
            list(request.headers.raw),
            bytes(body),
            beginnings(bytes(body)) if request.method == "POST" else (),
        )
        try:
            if asked.path in EVERYWHERE:
                return EVERYWHERE[asked.path](await self._everywhere(asked))
            parts = self.replicas.answer.remote(asked)
            begun = await parts.__anext__()
        except LOST:
            return _refused(ending())  # nothing was sent yet: the client asks again
        stream = dict(begun.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        reply = StreamingResponse(_rest(parts, stream), begun.status)
        reply.raw_headers = begun.headers
        return reply

    async def _everywhere(self, asked: Asked) -> dict[str, tuple[int, bytes]]:
        replies = self.all.broadcast("whole", asked)
        found = sorted(await replies.results_async(timeout_s=60.0))
        return {name: (status, body) for name, status, body in found}


async def _rest(parts: AsyncIterator[bytes], stream: bool) -> AsyncIterator[bytes]:
    """What follows the beginning of a reply. A stream whose replica is lost ends with an error."""
    try:
        async for part in parts:
            yield part
    except LOST:
        if not stream:
            raise  # the connection ends before the body does
        yield f"data: {json.dumps(ending().body())}\n\n".encode()


def _refused(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def _forgotten(replies: Mapping[str, tuple[int, bytes]]) -> Response:
    """The sums of what every replica has forgotten, or the first refusal."""
    total = {"sessions": 0, "blocks": 0}
    for status, body in replies.values():
        if status != 200:
            return Response(body, status, media_type="application/json")
        total = {name: count + json.loads(body)[name] for name, count in total.items()}
    return JSONResponse(total)


def _figures(replies: Mapping[str, tuple[int, bytes]]) -> Response:
    """The figures of every replica, told apart by a label."""
    lines: dict[str, list[str]] = {}
    for name, (status, body) in replies.items():
        if status != 200:
            return Response(body, status, media_type="application/json")
        about = ""
        for line in body.decode().splitlines():
            if line.startswith("# HELP"):
                about = line
            rows = lines.setdefault(about, [])
            if not line.startswith("#"):
                rows.append(_labelled(line, name))
            elif line not in rows:
                rows.append(line)
    text = "\n".join(line for rows in lines.values() for line in rows)
    return PlainTextResponse(f"{text}\n", media_type="text/plain; version=0.0.4")


def _labelled(line: str, replica: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'


# whatever every replica must do, or tell
EVERYWHERE = {"/v1/forget": _forgotten, "/metrics": _figures}


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` or serve.run starts.

    flags: of python -m engine.serve, in one string. replicas: how many (1), or "auto" for Ray's
    autoscaling. cpus, gpus: of a replica, by which Ray places it (1, 0). ongoing: requests that a
    replica may have at once, beyond which others get them (twice its slots). router: "prefix",
    "load" (Ray's own, by the length of queues), or the import path of another RequestRouter.
    Raises UsageError.
    """
    if unknown := sorted(set(arguments) - set(KNOWN)):
        raise UsageError(f"{unknown[0]}: no such argument, expected one of {', '.join(KNOWN)}")
    flags = shlex.split(str(arguments.get("flags", "")))
    args = parser().parse_args(flags)
    if args.plan:
        raise UsageError("--plan: ask python -m engine.serve --plan, with the same flags")
    require_sense(args)
    replicas = arguments.get("replicas", 1)
    router = arguments.get("router", "prefix")
    if isinstance(router, str) and router not in ROUTERS and "." not in router:
        raise UsageError(
            f"router: found {router!r}, expected prefix, load or an import path (module.Class)"
        )
    more: dict[str, Any] = {}
    if router != "load":
        chosen = PrefixRouter if router == "prefix" else router
        more["request_router_config"] = RequestRouterConfig(request_router_class=chosen)
    model = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=replicas if replicas == "auto" else _number("replicas", replicas),
        max_ongoing_requests=int(_number("ongoing", arguments.get("ongoing", 2 * args.slots))),
        graceful_shutdown_timeout_s=args.grace,
        ray_actor_options={
            "num_cpus": _number("cpus", arguments.get("cpus", 1), 0),
            "num_gpus": _number("gpus", arguments.get("gpus", 0), 0),
        },
        **more,
    )
    front = serve.deployment(
        Front, name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(model.bind(flags))


def _number(name: str, given: Any, least: float = 1) -> float | int:
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = -1.0
    if found < least:
        raise UsageError(f"{name}: found {given!r}, expected a number of at least {least}")
    return int(found) if found == int(found) else found
