"""python -m engine.serve: flags, start and end of the server."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.errors import EngineError, OutOfMemoryPlan, SettingError, UsageError
from engine.cli.figures import plan_text
from engine.cli.introduce import introduce
from engine.cli.model_flags import fits_flag, gigabytes, model_flags, settings_of
from engine.cli.parser import Parser
from engine.cli.settings import flag_named
from engine.cli.verdict import slots_verdict
from engine.llm import LLM
from engine.load.batch_plan import SlotPlan, plan_slots
from engine.load.pocket import POCKET
from engine.load.report import Plan
from engine.saved.cache import BlockCache
from engine.serve.http.listening import ACCEPTS, listen, places
from engine.serve.service import Service
from engine.terminal.display import Display
from kernels.native.library import COMPILING, to_compile

if TYPE_CHECKING:
    from starlette.applications import Starlette


KEY_VARIABLE = "OMNIKV_API_KEY"
PAUSE = 1.0  # seconds
CONNECTIONS = 1000
GRACE = 20.0  # seconds that answers get to finish after SIGTERM
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> Parser:
    """The flags."""
    p = Parser(
        prog="python -m engine.serve",
        allow_abbrev=False,
        description="Serve a model over OpenAI's and Anthropic's interfaces, and a page.",
    )
    add: Callable = p.add_argument
    add(
        "--model",
        metavar="NAME",
        help="a folder, GGUF file, alias or hub id; default: the shipped one",
    )
    add("--alias", metavar="NAME", help="the model's name for clients (default: its folder's)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=8080, help="port (default 8080)")
    add(
        "--connections",
        type=int,
        default=CONNECTIONS,
        metavar="N",
        help=f"connections held at once (default {CONNECTIONS}); beyond it the longest idle ends",
    )
    add("--slots", type=int, default=4, metavar="N", help="sessions held at once (default 4)")
    add("--queue", type=int, default=32, metavar="N", help="requests that may wait (default 32)")
    add("--plan", action="store_true", help="say what the slots need and how many fit, and end")
    fits_flag(add, "with --plan: plan for")
    add(
        "--pause",
        type=float,
        default=PAUSE,
        metavar="S",
        help=f"seconds that answers wait for a part of another's prompt (default {PAUSE:g}; 0: a "
        f"whole chunk)",
    )
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds for one answer")
    add(
        "--grace",
        type=float,
        default=GRACE,
        metavar="S",
        help=f"seconds that answers may go on after SIGTERM (default {GRACE:g})",
    )
    add("--api-key-file", metavar="FILE", help=f"keys, one per line (or {KEY_VARIABLE})")
    add("--api-key", metavar="KEY", help="a key; others on this machine can see it in ps")
    add("--no-auth", action="store_true", help="listen on another address without any key")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a further own name")
    add("--cache", metavar="DIR", help="keep what was read in this folder, for any method")
    add("--cache-limit", type=gigabytes, metavar="GB", help="at most this much (default 50)")
    model_flags(p)
    return p


def keys_of(args: argparse.Namespace) -> list[str]:
    """The API keys of flags, file and environment. Raises UsageError where the server would be
    open to others without one.
    """
    keys = [args.api_key] if args.api_key is not None else []
    if args.api_key_file:
        try:
            keys += Path(args.api_key_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"--api-key-file {args.api_key_file}: cannot be read") from None
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    if any(len(key) < 8 or not key.isascii() for key in keys):
        raise UsageError("--api-key: found a key of under 8 characters or not ASCII")
    if (args.api_key_file or args.api_key is not None) and not keys:
        raise UsageError(f"--api-key-file {args.api_key_file}: found no key in it")
    if args.host not in LOOPBACK and not keys and not args.no_auth:
        raise UsageError(
            f"--host {args.host}: others could use this server without a key; give --api-key-file "
            f"FILE (or {KEY_VARIABLE}), or say --no-auth"
        )
    return keys


def open_model(args: argparse.Namespace) -> LLM:
    """Plan the model. Raises typed errors."""
    if args.connections < 1:
        raise UsageError("--connections: expected at least 1")
    if not 1 <= args.slots <= 256 or not 0 <= args.queue <= 4096 or not args.pause >= 0:
        raise UsageError(
            "--slots: expected 1 to 256; --queue: expected 0 to 4096; --pause: at least 0"
        )
    if args.fits is not None and not args.plan:
        raise UsageError("--fits: found no --plan beside it; a server runs on what is here")
    if args.calibrate:
        raise UsageError(
            "--calibrate: a server reads no document of its own; python -m engine.chat "
            "--calibrate -f FILE with the same --model keeps the filter layers, and the server "
            "finds them"
        )
    llm = LLM(str(POCKET) if args.model is None else args.model, **settings_of(args), load=False)
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
    return plan_slots(plan_of, context, args.slots, llm.config.vocab_size)


def show_plan(args: argparse.Namespace) -> int:
    """Print what the model and the slots need; the exit code."""
    llm = open_model(args)
    fits, verdict = slots_verdict(llm.planner, partial(slots_of, args, llm))
    print(f"{plan_text(llm.planner)}\n{slots_of(args, llm)}\n{verdict}")
    return 0 if fits else OutOfMemoryPlan.exit_code


def serve(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    try:
        import uvicorn  # noqa: F401  (missing, it is named before anything is loaded)

        from engine.serve.app import make_app
        from engine.serve.guards import Guard
        from engine.serve.service import Service, Settings
    except ImportError as error:
        raise SettingError(
            f"the server needs {error.name}: pip install starlette uvicorn"
        ) from None
    keys, links = keys_of(args), listen(args.host, args.port)
    llm = open_model(args)
    slots_of(args, llm).require_fit()
    introduce(llm.planner, Display())
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
    guard = Guard(keys, hosts, most=max(1 << 20, 16 * llm.max_context))
    return _run(args, service, make_app(service, guard), links)


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

    def end() -> None:
        if service.announce_end():
            threading.Thread(target=service.stop, args=(args.grace,), daemon=True).start()

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
            port = links[0].getsockname()[1]
            name = f"[{args.host}]" if ":" in args.host else args.host
            _say(
                f"{service.settings.alias} is ready: http://{name}:{port}/v1, "
                f"context {service.llm.max_context}"
            )
            _say(f"open http://{name}:{port}/ in a browser to read a document and ask about it")

    loader = threading.Thread(target=load, name="load", daemon=True)
    loader.start()
    asyncio.run(server.serve(links))
    loader.join(0.5)
    if loader.is_alive():
        sys.stderr.flush()
        os._exit(
            0 if server.started else 1
        )  # a thread inside C++ would abort the process at the interpreter's end
    service.stop(args.grace)
    if failed:
        raise failed[0]
    return 0 if server.started else 1


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
