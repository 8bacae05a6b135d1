"""python -m engine.chat: talk to a model, ask about a document, or see what a model would need.

This file turns flags into a model and a conversation, and errors into one line and an exit code.
engine/chat/flags.py holds the flags, engine/chat/settings.py what they set, engine/chat/repl.py the
conversation with a person. Text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
import warnings
from importlib import metadata
from pathlib import Path

import weights
from engine.chat.display import Display
from engine.chat.documents import longest_document, read_stdin, read_text
from engine.chat.evidence import watch_of
from engine.chat.figures import model_name, plan_text
from engine.chat.flags import parser
from engine.chat.interrupts import Ended, ending
from engine.chat.keeping import KeptSession
from engine.chat.output import abandon_output, emit, require_output
from engine.chat.repl import Chat
from engine.chat.settings import flag_named, method_of, params_of
from engine.device import NO_MEMORY
from engine.errors import (
    BadCheckpoint,
    EngineError,
    OutOfHostMemory,
    OutputFailed,
    SettingError,
    UsageError,
)
from engine.llm import LLM
from engine.sampling import SamplingParams
from engine.saved.cache import BlockCache
from engine.text.boundary import printable, valid
from engine.units import brief, first_line, human
from engine.version import VERSION
from kernels.native.library import COMPILING, to_compile

INTERRUPTED = 130  # as shells report a Ctrl-C
POCKET = Path(weights.__file__).parent / "pocket"


def versions() -> str:
    """Return one line of versions for bug reports."""
    found = []
    for package in ("torch", "triton", "tokenizers", "safetensors"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return (
        f"omnikv-engine {VERSION} (python {platform.python_version()}, {', '.join(found)}, "
        f"{platform.system()} {platform.machine()})"
    )


def open_model(args: argparse.Namespace, display: Display) -> LLM:
    """Plan the model that the flags name, without loading it. Raises typed errors."""
    name, pocket = args.model, args.model is None
    if pocket:
        if not (POCKET / "model.safetensors").is_file():
            raise UsageError(
                "no model is shipped with this engine: name one with --model FOLDER-OR-NAME "
                "(--list-models prints the names)"
            )
        name = str(POCKET)
    # The shipped model's products take microseconds: a second thread gains nothing, and on a
    # machine that does other work its spinning costs a factor of 50 (1900 tokens read in 30 s
    # instead of 0.5 s at load 7 on two cores).
    threads = 1 if pocket and args.threads is None else args.threads
    return LLM(
        name,
        device=args.device,
        dtype=args.dtype,
        weights=args.weights,
        bank=args.bank,
        max_context=args.ctx,
        threads=threads,
        chunk=args.chunk,
        compile={"auto": None, "on": True, "off": False}[args.compile],
        offload=args.offload,
        vram_budget=args.vram_budget,
        ram_budget=args.ram_budget,
        rope=args.rope,
        beyond=args.beyond,
        imagined_gpu=(args.fits or None) if args.plan else None,
        method=method_of(args, pocket),
        load=False,
        progress=display.loading(),
        download_progress=display.line,
    )


def introduce(llm: LLM, display: Display) -> None:
    """Say what was chosen, before the weights are read."""
    plan, found = llm.plan().to_dict(), llm.resolved
    assert found is not None  # the command line always names a model
    revision = f" at {found.revision[:12]}" if found.revision else ""
    display.note(f"model {model_name(llm)}, from {found.folder}{revision}")
    display.note(
        f"{plan['dtype']} on {plan['device']}, {brief(llm.method)}, "
        f"context {plan['max_context']:,} tokens; needs {human(plan['total_bytes'])} at the peak, "
        f"{human(plan['free_bytes'])} free"
    )


def converse(args: argparse.Namespace, llm: LLM, params: SamplingParams, display: Display) -> int:
    """Answer once or talk; return the exit code."""
    once = (args.prompt is not None or args.file is not None) and not args.interactive
    document = None
    if args.file is not None:
        longest = longest_document(llm.max_context)
        document = read_stdin(longest) if args.file == "-" else read_text(args.file, longest)
    introduce(llm, display)
    if llm.device.type == "cpu" and to_compile():
        display.note(COMPILING)
    llm.load()
    if llm.tokenizer is None:
        raise BadCheckpoint(
            f"{llm.folder}: tokenizer.json: found nothing, expected the model's tokenizer: the "
            "chat needs text (the library runs on token ids)"
        )
    if llm.plan().placement is not None:
        display.note(llm.plan().where)
        display.note(str(llm.link))
    chat = Chat(
        llm,
        params,
        display,
        args.system,
        args.json,
        args.stats,
        watch=watch_of(args.watch, args.exact_below),
        calibrate=args.calibrate,
    )
    if args.cache:
        limit = args.cache_limit or 50 * 10**9
        chat.conversation.cache = BlockCache(args.cache, limit, display.line)
    with KeptSession(chat, Path(args.session) if args.session else None) as kept:
        if args.model is None and not once and not kept.resumed:
            welcome(chat, display)
        return _talk(args, chat, document, once)


def _talk(args: argparse.Namespace, chat: Chat, document: str | None, once: bool) -> int:
    """Read and answer what the flags say, then what a person types; the exit code."""
    if document is not None:
        name = "standard input" if args.file == "-" else Path(args.file).name
        if args.prompt is None and once:
            return INTERRUPTED if chat.ask(document) == "interrupted" else 0
        if not chat.read(document, name) and once:
            return INTERRUPTED
    if args.prompt is not None and chat.ask(args.prompt) == "interrupted" and once:
        return INTERRUPTED
    return 0 if once else chat.run()


def welcome(chat: Chat, display: Display) -> None:
    """Read the shipped model's own document and say what to ask about it."""
    path, hint = POCKET / "welcome.txt", POCKET / "hint.txt"
    if path.is_file():
        chat.read(read_text(str(path)), path.name)
    if hint.is_file():
        display.line(read_text(str(hint)).strip())
    display.note("/sources shows which passages an answer read")


def run(args: argparse.Namespace, display: Display) -> int:
    """Do what the flags say; return the exit code. Raises typed errors."""
    if args.version:
        emit(versions() + "\n")
        return 0
    if args.list_models or (args.fits is not None and not args.plan):
        from engine.chat.fits import fits
        from weights.aliases import table

        emit((table() if args.fits is None else fits(args.fits or None, args.device)) + "\n")
        return 0
    if args.file == "-" and args.interactive:
        raise UsageError(
            "-f -: reads standard input to its end, so -i has nothing left to read; "
            "give the document as a file"
        )
    if args.calibrate and args.file is None and args.prompt is not None and not args.interactive:
        raise UsageError("--calibrate: found no document, expected one to read (-f FILE)")
    require_output()
    for name in ("prompt", "system"):
        if getattr(args, name) is not None:
            valid(getattr(args, name), f"--{name}")
    params = params_of(args)
    llm = open_model(args, display)
    if args.plan:
        text = json.dumps(llm.plan().to_dict()) if args.json else printable(plan_text(llm))
        emit(text + "\n")
        if llm.resolved is not None and llm.resolved.why_not:
            display.line(
                f"planned in {llm.plan().dtype} from the sizes in the table of aliases, as "
                f"config.json could not be fetched: {llm.resolved.why_not}"
            )
        return 0
    if llm.resolved is not None:
        llm.resolved.require_fetched()
    return converse(args, llm, params, display)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code. Prints a traceback only with --verbose."""
    try:
        with ending():
            code = _main(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk may only show now
            return code
    except Ended as ended:
        return ended.exit_code
    except BrokenPipeError:
        # the reader of stdout has left: say nothing more, not even at exit
        abandon_output()
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        abandon_output()
        Display().error(f"standard output: cannot be written: {error.strerror}")
        return 1


def _main(arguments: list[str] | None) -> int:
    args = parser().parse_args(arguments)
    display = Display(quiet=args.quiet)
    _prepare_terminal(display)
    try:
        return run(args, display)
    except KeyboardInterrupt:
        display.line()
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except EngineError as error:
        if args.verbose:
            traceback.print_exc()
        message = str(error)
        if isinstance(error, SettingError):
            message = flag_named(message, [key for key, _ in args.set])
        display.error(message)
        if isinstance(error, OutputFailed):
            abandon_output()
        return error.exit_code
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        if isinstance(error, MemoryError):
            display.error(f"{NO_MEMORY}; lower --ctx or --chunk, or raise the limit")
            return OutOfHostMemory.exit_code
        message = f": {first_line(error)}" if str(error) else ""
        display.error(f"{type(error).__name__}{message} (--verbose shows where)")
        return 1


def _prepare_terminal(display: Display) -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that lacks a character shows a mark instead of failing
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        # bytes that are no text become lone surrogates, which are refused by name, not an exception
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        import readline  # noqa: F401  (gives input() line editing and a history)
    except ImportError:
        pass

    def show(message: Warning | str, *rest: object, **more: object) -> None:
        display.line(f"note: {message}")

    warnings.showwarning = show
