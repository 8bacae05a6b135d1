"""python -m engine.chat: talk to a model, ask about a document, or see what a model would need.

This file turns flags into a model and a conversation, and errors into one line and an exit code.
engine/chat/flags.py holds the flags, engine/cli/settings.py what they set, engine/chat/repl.py the
conversation with a person. Text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from pathlib import Path

from engine.base.device import NO_MEMORY
from engine.base.errors import (
    BadCheckpoint,
    EngineError,
    OutOfHostMemory,
    OutOfMemoryPlan,
    OutputFailed,
    SettingError,
    UsageError,
)
from engine.base.figures import first_line
from engine.chat.evidence import watch_of
from engine.chat.flags import answer_at_once, parser, require_sense
from engine.chat.repl import answer_lines, unread
from engine.chat.talk.chat import Chat
from engine.chat.talk.keeping import KeptSession
from engine.cli.figures import plan_text
from engine.cli.introduce import introduce
from engine.cli.ranked import planned_llm
from engine.cli.settings import flag_named, method_of, params_of, settings_of
from engine.cli.verdict import plan_verdict
from engine.llm import LLM
from engine.load.options import Options
from engine.load.pocket import POCKET
from engine.ranks.llm import RankedLLM
from engine.ranks.placement import placement_text, placements
from engine.sampling.params import SamplingParams
from engine.saved.cache import BlockCache
from engine.terminal.display import Display
from engine.terminal.documents import Given, longest_document, read_documents, read_text
from engine.terminal.interrupts import Ended, ending
from engine.terminal.output import abandon_output, emit, require_output
from engine.text.boundary import printable, valid
from kernels.native.library import COMPILING, to_compile

INTERRUPTED = 130  # as shells report a Ctrl-C


def open_model(args: argparse.Namespace, display: Display) -> LLM:
    """Plan the model that the flags name, without loading it. Raises typed errors."""
    name = args.model
    if name is None:
        if not (POCKET / "model.safetensors").is_file():
            raise UsageError(
                "no model is shipped with this engine: name one with --model FOLDER-OR-NAME "
                "(--list-models prints the names)"
            )
        name = str(POCKET)
    shown = dict(progress=display.loading(), download_progress=display.line)
    return planned_llm(name, args, settings_of(args), **shown)


def converse(args: argparse.Namespace, llm: LLM, params: SamplingParams, display: Display) -> int:
    """Answer once or talk; return the exit code."""
    once = bool(args.prompt is not None or "-" in args.file) and not args.interactive
    documents = read_documents(args.file, longest_document(llm.max_context), display.line)
    if len(documents) > 1 and args.prompt is None and once:
        raise UsageError(
            f"-f: found {len(documents)} documents, standard input (-) among them, and no "
            "question, expected -p TEXT"
        )
    introduce(llm.planner, display)
    if llm.device.type == "cpu" and to_compile():
        display.note(COMPILING)
    llm.load()
    if llm.tokenizer is None:
        raise BadCheckpoint(
            f"{llm.folder}: tokenizer.json: found nothing, expected the model's tokenizer: the "
            "chat needs text (the library runs on token ids)"
        )
    if llm.plan().unheeded:
        display.note(llm.plan().unheeded)
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
        chat.conversation.cache = cache = BlockCache(args.cache, limit, display.line)
        if note := cache.note(llm.planner):
            display.line(note)
    with KeptSession(chat, Path(args.session) if args.session else None) as kept:
        if args.model is None and not documents and not kept.resumed:
            welcome(chat, display, once)
        return _talk(args, chat, documents, once)


def _talk(args: argparse.Namespace, chat: Chat, documents: list[Given], once: bool) -> int:
    """Read and answer what the flags say, then what a person types; the exit code."""
    for given in documents:
        if given.note:
            chat.display.line(f"{given.name}: {given.note}")
        if args.prompt is None and once:  # -f -: no line is left to ask with
            chat.warn_of_demonstration(given.text)
            return INTERRUPTED if chat.ask(given.text) == "interrupted" else 0
        if not chat.read(given.text, given.name, titled=len(documents) > 1) and once:
            return INTERRUPTED
    if once and "-" not in args.file and unread():
        chat.display.line("standard input is not read beside -p; add -f - if it is a document")
    if args.prompt is not None and chat.ask(args.prompt) == "interrupted" and once:
        return INTERRUPTED
    if once:
        return 0
    person = sys.stdin is not None and sys.stdin.isatty()
    if documents and args.prompt is None and person:
        read = "the document" if len(documents) == 1 else f"the {len(documents)} documents"
        chat.display.note(f"ask about {read}; /sources shows which passages an answer read")
    code = answer_lines(chat)
    if documents and not (code or person or chat.last):
        chat.display.line("no question came on standard input: ask one with -p TEXT")
    return code


def welcome(chat: Chat, display: Display, once: bool) -> None:
    """Read the shipped model's own document and, where a person stays, say what to ask about it."""
    path, hint = POCKET / "welcome.txt", POCKET / "hint.txt"
    if path.is_file():
        text, room = read_text(str(path)), chat.llm.max_context
        needed = len(chat.conversation.tokenizer.encode(text))
        if needed >= room:
            display.line(f"{path.name} is not read: its {needed} tokens do not fit --ctx {room}")
            return
        if once:
            display.line(f"no document was named (-f FILE): this model's own, {path.name}, is read")
        chat.read(text, path.name)
    if once:
        return
    if hint.is_file():
        display.line(read_text(str(hint)).strip())
    display.note("/sources shows which passages an answer read")


def run(args: argparse.Namespace, display: Display) -> int:
    """Do what the flags say; return the exit code. Raises typed errors."""
    if (text := answer_at_once(args)) is not None:
        emit(text + "\n")
        return 0
    if args.fits is not None and not args.plan:
        from engine.cli.fits import fits

        asked = {**settings_of(args), "method": method_of(args, pocket=False)}
        emit(fits(Options.of(asked)) + "\n")
        return 0
    require_sense(args)
    require_output()
    for name in ("prompt", "system"):
        if getattr(args, name) is not None:
            valid(getattr(args, name), f"--{name}")
    params = params_of(args)
    llm = open_model(args, display)
    if args.plan:
        ok, verdict = plan_verdict(llm.planner)
        text = f"{printable(plan_text(llm.planner))}\n{verdict}"
        text += f"\n{placement_text(llm)}" if isinstance(llm, RankedLLM) else ""
        if args.json:
            found = {**llm.plan().to_dict(), "verdict": verdict}
            if isinstance(llm, RankedLLM):
                found["ranks"] = [vars(one) for one in placements(llm)]
            text = json.dumps(found)
        emit(text + "\n")
        if llm.resolved is not None and llm.resolved.why_not:
            display.line(
                f"planned in {llm.plan().dtype} from the sizes in the table of aliases: its "
                "config.json is not on this machine"
            )
            if args.verbose:
                display.line(llm.resolved.why_not)
        return 0 if ok else OutOfMemoryPlan.exit_code
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
