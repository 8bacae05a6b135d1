"""The flags of python -m engine.serve: its own, beside those of engine/cli/model_flags.py that say
what runs. Nothing here imports torch: a wrong flag is said at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from engine.base.errors import UsageError
from engine.cli.model_flags import fits_flag, gigabytes, model_flags
from engine.cli.parser import Parser, version_flag
from engine.cli.ranks_flags import flag_of, ranks_flags

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
    ranks_flags(p.add_argument_group("several processes").add_argument, "engine.serve")
    version_flag(add)
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


def require_sense(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that do not go together, or values out of range."""
    if (flag := flag_of(args)) and args.forever:
        raise UsageError(f"--forever: works on one process; leave it or {flag} out")
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
    if not args.plan:
        keys_of(args)
