"""python -m engine.serve: flags, start and end of the server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.chat.cli import POCKET
from engine.chat.flags import Parser, gigabytes, scaled
from engine.chat.settings import pocket_method
from engine.errors import EngineError, SettingError, UsageError
from engine.llm import LLM
from engine.methods.registry import make
from engine.plan.report import Plan
from engine.plan.slots import SlotPlan, plan_slots
from engine.saved.cache import BlockCache
from kernels.native.library import COMPILING, to_compile

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from engine.serve.service import Service

KEY_VARIABLE = "OMNIKV_API_KEY"
PAUSE = 1.0  # seconds
GRACE = 20.0  # seconds that answers get to finish after SIGTERM
TICK = 1.0  # seconds between two looks at whether to end, and of the Date header
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
    add("--slots", type=int, default=4, metavar="N", help="sessions held at once (default 4)")
    add("--queue", type=int, default=32, metavar="N", help="requests that may wait (default 32)")
    add("--ctx", type=scaled, metavar="N", help="context of each session, such as 128K")
    add("--plan", action="store_true", help="say what the slots need and how many fit, and end")
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
    add("--method", metavar="NAME", help="omnikv, full or a baseline (default: as in the chat)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--threads", type=int, metavar="N", help="use N CPU threads")
    add("--chunk", type=int, metavar="N", help="read prompts in chunks of N tokens")
    add("--offload", choices=("auto", "host", "device"), default="auto", help="as in the chat")
    add("--ram-budget", type=gigabytes, metavar="GB", help="use at most this much RAM")
    add("--vram-budget", type=gigabytes, metavar="GB", help="use at most this much GPU memory")
    add("--api-key-file", metavar="FILE", help=f"keys, one per line (or {KEY_VARIABLE})")
    add("--api-key", metavar="KEY", help="a key; others on this machine can see it in ps")
    add("--no-auth", action="store_true", help="listen on another address without any key")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a further own name")
    add("--cache", metavar="DIR", help="keep what was read in this folder, for ever")
    add("--cache-limit", type=gigabytes, metavar="GB", help="at most this much (default 50)")
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
    pocket = args.model is None
    if not 1 <= args.slots <= 256 or not 0 <= args.queue <= 4096 or not args.pause >= 0:
        raise UsageError(
            "--slots: expected 1 to 256; --queue: expected 0 to 4096; --pause: at least 0"
        )
    llm = LLM(
        str(POCKET) if pocket else args.model,
        device=args.device,
        dtype=args.dtype,
        max_context=args.ctx,
        threads=1 if pocket and args.threads is None else args.threads,
        chunk=args.chunk,
        offload=args.offload,
        vram_budget=args.vram_budget,
        ram_budget=args.ram_budget,
        method=make(args.method, {}) if args.method else pocket_method() if pocket else None,
        load=False,
    )
    needs = llm.method.needs(llm.plan().layers, llm.config, llm.max_context, llm.dtype.itemsize)
    if args.pause and needs.final_call is None:
        raise UsageError(
            f"--method {llm.method.name}: reads a whole prompt in one call, for which all others "
            f"wait; allow that with --pause 0, or use another method"
        )
    return llm


def slots_of(args: argparse.Namespace, llm: LLM) -> SlotPlan:
    """The memory of all sessions."""

    def plan_of(context: int) -> Plan:
        return llm.plan(max_context=context)

    return plan_slots(plan_of, llm.max_context, args.slots, llm.config.vocab_size)


def show_plan(args: argparse.Namespace) -> int:
    """Print what the model and the slots need; the exit code."""
    llm = open_model(args)
    slots = slots_of(args, llm)
    print(f"{llm.plan()}\n{slots}")
    slots.require_fit()
    return 0


def serve(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    try:
        import uvicorn  # noqa: F401  (missing, it is named before anything is loaded)

        from engine.serve.app import make_app
        from engine.serve.guards import Guard
        from engine.serve.service import Service, Settings
    except ImportError as error:
        raise SettingError(
            f"the server needs {error.name}: pip install 'omnikv-engine[serve]'"
        ) from None
    keys, llm = keys_of(args), open_model(args)
    slots_of(args, llm).require_fit()
    if llm.device.type == "cpu" and to_compile():
        _say(COMPILING)
    cache = None
    if args.cache:
        cache = BlockCache(args.cache, args.cache_limit or 50 * 10**9, _say)
    alias = args.alias or Path(llm.name).name
    pause = args.pause or None
    settings = Settings(alias, args.slots, args.queue, args.timeout, pause=pause)
    service = Service(llm, settings, cache)
    hosts = [] if keys and args.host not in LOOPBACK else [*LOOPBACK, args.host, *args.allow_host]
    guard = Guard(keys, hosts, most=max(1 << 20, 16 * llm.max_context))
    return _listen(args, service, make_app(service, guard))


def _listen(args: argparse.Namespace, service: Service, app: Starlette) -> int:
    """Run the event loop, load the model beside it, and end in order; the exit code."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        http="h11",
        ws="none",
        h11_max_incomplete_event_size=16 << 10,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(args.grace) + 5,
    )

    class Server(uvicorn.Server):
        """Tells the worker of a signal at once; uvicorn itself waits for the connections."""

        async def main_loop(self) -> None:
            """As uvicorn's, which looks ten times a second whether to end: once, and when told."""
            self.told, self.loop = asyncio.Event(), asyncio.get_running_loop()
            while not await self.on_tick(0):  # 0: the second in which it renews the Date header
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.told.wait(), TICK)

        def handle_exit(self, sig: int, frame: object) -> None:
            # uvicorn's own would raise the signal again at the end, and the exit code were its
            self.force_exit = self.should_exit
            self.should_exit = True
            if hasattr(self, "told"):
                self.loop.call_soon_threadsafe(self.told.set)
            if not service.ending:
                service.ending = True
                threading.Thread(target=service.stop, args=(args.grace,), daemon=True).start()

    server = Server(config)
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
            port = server.servers[0].sockets[0].getsockname()[1]
            name = f"[{args.host}]" if ":" in args.host else args.host
            _say(
                f"{service.settings.alias} is ready: http://{name}:{port}/v1, "
                f"context {service.llm.max_context}"
            )
            _say(f"open http://{name}:{port}/ in a browser to read a document and ask about it")

    threading.Thread(target=load, name="load", daemon=True).start()
    asyncio.run(server.serve())
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
        _say(f"error: {error}")
        return error.exit_code
