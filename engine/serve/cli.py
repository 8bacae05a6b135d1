"""python -m engine.serve: flags, start and end of the server."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.errors import EngineError, OutOfMemoryPlan, RankLost, SettingError, UsageError
from engine.cli.figures import plan_text
from engine.cli.introduce import introduce
from engine.cli.ranked import planned_llm
from engine.cli.settings import flag_named, settings_of
from engine.cli.verdict import slots_verdict
from engine.llm import LLM
from engine.load.batch_plan import SlotPlan, plan_slots
from engine.load.pocket import DEMONSTRATION, POCKET, is_pocket
from engine.load.report import Plan
from engine.ranks.llm import RankedLLM
from engine.ranks.placement import placement_text
from engine.saved.cache import BlockCache
from engine.serve.flags import LOOPBACK, keys_of, parser, require_sense
from engine.serve.http.listening import ACCEPTS, listen, places
from engine.serve.service import Service
from engine.terminal.display import Display
from engine.terminal.documents import LONGEST_CONTEXT
from kernels.native.library import COMPILING, to_compile

LOOK = 0.25  # seconds between two looks at whether all ranks run

if TYPE_CHECKING:
    from starlette.applications import Starlette


def open_model(args: argparse.Namespace) -> LLM:
    """Plan the model. Raises typed errors."""
    require_sense(args)
    name = str(POCKET) if args.model is None else args.model
    llm = planned_llm(name, args, settings_of(args))
    needs = llm.method.needs(llm.plan().layers, llm.config, llm.max_context, llm.dtype.itemsize)
    if args.pause and needs.final_call is None:
        raise UsageError(
            f"--method {llm.method.name}: reads a whole prompt in one call, for which all others "
            f"wait; allow that with --pause 0, or use another method"
        )
    return llm


def slots_of(args: argparse.Namespace, llm: LLM, **settings: Any) -> SlotPlan:
    """The memory of all sessions, with other settings of the LLM where some are given."""

    def plan_of(context: int) -> Plan:
        return llm.plan(max_context=context, **settings)

    context = llm.plan(**settings).max_context
    listed = {"listed": 1} if llm.options.forever else {}  # streams are as large whatever is read
    return plan_slots(plan_of, context, args.slots, llm.config.vocab_size, **listed)


def show_plan(args: argparse.Namespace) -> int:
    """Print what the model and the slots need; the exit code."""
    llm = open_model(args)
    fits, verdict = slots_verdict(llm.planner, partial(slots_of, args, llm))
    ranks = f"{placement_text(llm)}\n" if isinstance(llm, RankedLLM) else ""
    print(f"{plan_text(llm.planner)}\n{ranks}{slots_of(args, llm)}\n{verdict}")
    return 0 if fits else OutOfMemoryPlan.exit_code


def serve(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401  (missing, it is named before anything is loaded)
    except ImportError as error:
        raise SettingError(
            f"the server needs {error.name}: pip install starlette uvicorn"
        ) from None
    require_sense(args)
    links = listen(args.host, args.port)
    service, app = build(args)
    return _run(args, service, app, links)


def build(args: argparse.Namespace) -> tuple[Service, Starlette]:
    """The service of a model that is planned and not loaded, and the application over it. Raises
    typed errors.
    """
    from engine.serve.app import make_app
    from engine.serve.guards import Guard
    from engine.serve.service import Service, Settings

    keys, llm = keys_of(args), open_model(args)
    slots_of(args, llm).require_fit()
    introduce(llm.planner, Display())
    if is_pocket(llm.folder):
        _say(DEMONSTRATION)
    if llm.device.type == "cpu" and to_compile():
        _say(COMPILING)
    cache = None
    if args.cache:
        cache = BlockCache(args.cache, args.cache_limit or 50 * 10**9, _say)
        if note := cache.note(llm.planner):
            _say(note)
    alias = args.alias or Path(llm.name).name
    pause = args.pause or None
    settings = Settings(alias, args.slots, args.queue, args.timeout, pause=pause)
    service = Service(llm, settings, cache)
    hosts = [] if keys and args.host not in LOOPBACK else [*LOOPBACK, args.host, *args.allow_host]
    guard = Guard(keys, hosts, most=max(1 << 20, 16 * min(llm.max_context, LONGEST_CONTEXT)))
    return service, make_app(service, guard)


def _context(llm: LLM) -> str:
    """How long a conversation may be, or what is forgotten of one without end."""
    if llm.options.forever:
        held = llm.plan().budget
        return f"no end of a conversation: after {held:,}, {llm.method.forgotten(held + 1)}"
    return f"context of {llm.max_context:,} tokens"


def _run(
    args: argparse.Namespace, service: Service, app: Starlette, links: list[socket.socket]
) -> int:
    """Run the event loop, load the model beside it, and end in order; the exit code."""
    import uvicorn

    from engine.serve.http.connections import Limits, bounded
    from engine.serve.http.loop import Server

    config = uvicorn.Config(
        app,
        http=bounded(Limits(connections=places(args.connections))),
        backlog=ACCEPTS,
        ws="none",
        h11_max_incomplete_event_size=16 << 10,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(args.grace) + 5,
    )

    def leave() -> None:  # beside the signal's handler, which may have cut into another line
        _say(f"stopping; answers under way have {args.grace:g} s to end")
        service.stop(args.grace)
        server.leave()

    def end() -> None:
        if service.announce_end():
            threading.Thread(target=leave, daemon=True).start()

    server = Server(config, links, end, _say)
    failed: list[BaseException] = []

    def load() -> None:
        try:
            service.load()
        except BaseException as error:
            failed.append(error)
            server.should_exit = True
            return
        while not server.started and not server.should_exit:
            time.sleep(0.01)
        if server.started:
            _say_ready(args.host, links[0].getsockname()[1], service)
        while isinstance(service.llm, RankedLLM) and not server.should_exit:
            if service.llm.lost:
                failed.append(RankLost(f"{service.llm.lost}; start the server again"))
                server.should_exit = True
            time.sleep(LOOK)

    loader = threading.Thread(target=load, name="load", daemon=True)
    loader.start()
    asyncio.run(server.serve(links))
    loader.join(0.5)
    if loader.is_alive():
        _say("stopped")
        os._exit(
            0 if server.started else 1
        )  # a thread inside C++ would abort the process at the interpreter's end
    service.stop(args.grace)
    if failed:
        raise failed[0]
    _say("stopped")
    return 0 if server.started else 1


def _say_ready(host: str, port: int, service: Service) -> None:
    """Say where programs and people find the server."""
    name = f"[{host}]" if ":" in host else host
    _say(
        f"{service.settings.alias} is ready: http://{name}:{port}/v1, for programs; "
        f"{_context(service.llm)}"
    )
    _say(f"open http://{name}:{port}/ in a browser to read a document and ask about it")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    args = parser().parse_args(arguments)
    try:
        return show_plan(args) if args.plan else serve(args)
    except KeyboardInterrupt:
        return 130
    except EngineError as error:
        message = str(error)
        if isinstance(error, SettingError):
            message = flag_named(message, [key for key, _ in args.set])
        _say(f"error: {message}")
        return error.exit_code
