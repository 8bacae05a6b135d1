"""python -m engine.chat: talk to a model, ask about a document, or see what a model would need.

This file is the command line: flags to settings, settings to a model, errors to one line and an
exit code. The conversation with a person is engine/chat/repl.py, its commands
engine/chat/commands.py. Text goes to stdout, everything else to stderr.
"""

import argparse
import dataclasses
import difflib
import json
import os
import platform
import re
import sys
import traceback
import warnings
from importlib import metadata
from pathlib import Path

import weights
from engine.chat.commands import decoded, read_text
from engine.chat.display import Display
from engine.chat.evidence import watch_of
from engine.chat.repl import Chat
from engine.errors import EngineError, SettingError, UsageError
from engine.llm import LLM
from engine.methods.omnikv.settings import OmniKV
from engine.methods.registry import make, methods
from engine.sampling import SamplingParams
from engine.units import brief, first_line, human
from engine.version import VERSION

INTERRUPTED = 130  # as shells report a Ctrl-C
POCKET = Path(weights.__file__).parent / "pocket"
MAX_TOKENS = 1024  # an answer's default bound in the chat; the library's 64 is for programs
EPILOG = """With -p or -f it answers once and ends (-i stays). With both, the document comes first and the question after it.
Exit codes: 0, 1 (the run failed), 2 (usage), 130 (Ctrl-C). In the chat, /help lists the commands."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line that names the flag, with the nearest flag where one was
    misspelled.
    """

    def error(self, message: str):
        """Print one line and leave with 2."""
        message = message.removeprefix("argument ").replace(
            "expected one argument", "found nothing, expected a value"
        )
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[1].split("=")[0], flags, 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
            message = (
                f"{unknown[1]}: no such flag; {hint}"
                if unknown[1].startswith("-")
                else f"{unknown[1]!r}: not expected here (a model is named with --model, a prompt with -p)"
            )
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)


def scaled(text: str) -> int:
    """A number of tokens, with K (1024) or M (1024 x 1024): 32K, 1M, 131072."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    tokens = float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else 0
    if not found or tokens < 1 or tokens != int(tokens) or tokens > 2**31:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a number of tokens such as 131072, 128K or 1M"
        )
    return int(tokens)


def gigabytes(text: str) -> int:
    """An amount of memory in GB (10^9 bytes), or with a unit: 24, 24GB, 512M. Returns bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)[bB]?", text.strip())
    size = (
        int(float(found[1]) * 1000 ** ("kmgt".index(found[2].lower() or "g") + 1)) if found else 0
    )
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected gigabytes such as 24, or 24GB, 512MB"
        )
    return size


def layers(text: str) -> tuple[int, ...]:
    """Layer numbers: 2,8,18."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected layer numbers such as 2,8,18"
        ) from None


def auto_or(kind):
    """A value of this kind, or the word auto."""

    def parse(text: str):
        return text if text == "auto" else kind(text)

    parse.__name__ = kind.__name__
    return parse


def parser() -> Parser:
    """All flags."""
    p = Parser(
        prog="python -m engine.chat",
        allow_abbrev=False,
        epilog=EPILOG,
        description="Chat with a model over a very long context.",
    )
    p.add_argument(
        "--model",
        metavar="NAME",
        help="a folder in Hugging Face layout, an alias (--list-models) or a hub id",
    )
    group = p.add_argument_group("what to say")
    group.add_argument("-p", "--prompt", help="answer this once and end")
    group.add_argument(
        "-f", "--file", metavar="FILE", help="a document to read first; - is standard input"
    )
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument(
        "-i", "--interactive", action="store_true", help="stay in the chat after -p or -f"
    )
    group = p.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"most tokens of an answer ({MAX_TOKENS})",
    )
    group.add_argument(
        "--temp",
        "--temperature",
        dest="temp",
        type=float,
        default=0.0,
        metavar="T",
        help="temperature; 0 is greedy (0)",
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--repeat-penalty", type=float, default=1.0, metavar="R")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text (may be repeated)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="write on past the model's end tokens"
    )
    group = p.add_argument_group("context and placement")
    group.add_argument(
        "--ctx",
        "--max-model-len",
        dest="ctx",
        type=scaled,
        metavar="N",
        help="tokens of context, K and M allowed (the model's own, or what fits)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--chunk", type=int, metavar="N", help="tokens per prefill chunk")
    group.add_argument(
        "--compile",
        choices=("auto", "on", "off"),
        default="auto",
        help="torch.compile the step (auto: on a GPU)",
    )
    group.add_argument(
        "--offload",
        choices=("auto", "host", "device"),
        default="auto",
        help="where the context bank lives",
    )
    group.add_argument(
        "--vram-budget", type=gigabytes, metavar="GB", help="stay within this much GPU memory"
    )
    group.add_argument(
        "--ram-budget", type=gigabytes, metavar="GB", help="stay within this much RAM"
    )
    group = p.add_argument_group("method")
    group.add_argument(
        "--method",
        "--attention",
        dest="method",
        choices=tuple(methods()),
        metavar="NAME",
        help="default: OmniKV where the model's filter layers are known; omnikv, full, or a rival for comparison: "
        + ", ".join(name for name in methods() if name not in ("omnikv", "full")),
    )
    group.add_argument(
        "--filter-layers",
        type=layers,
        metavar="L,L,...",
        help="layers that attend to everything and choose",
    )
    group.add_argument(
        "--tokens",
        "--budget",
        dest="tokens",
        type=int,
        metavar="K",
        help="tokens that a sparse layer reads per step (2048)",
    )
    group.add_argument(
        "--share", type=float, metavar="X", help="the same as a share of the context"
    )
    group.add_argument(
        "--mem", type=float, metavar="X", help="the same from the paper's Mem%%, as a share"
    )
    group.add_argument("--selector", choices=("last", "exponential", "uniform"))
    group.add_argument(
        "--window", type=int, metavar="N", help="queries that a windowed selector looks at (16)"
    )
    group.add_argument(
        "--wait-layers",
        type=int,
        metavar="N",
        help="full layers after a filter (the calibration's, or 1)",
    )
    group.add_argument(
        "--tail", type=int, metavar="N", help="newest tokens that every layer sees (256)"
    )
    group.add_argument(
        "--sink", type=int, metavar="N", help="first tokens that are always chosen (0)"
    )
    group.add_argument(
        "--dense-below",
        type=auto_or(scaled_or_zero),
        metavar="N",
        help="full attention on shorter contexts; 0 never (auto)",
    )
    group.add_argument(
        "--prefill-ratio",
        type=int,
        metavar="R",
        help="sparse prefill: sparse layers read R blocks' worth of chosen tokens (exact prefill; docs/PREFILL.md)",
    )
    group = p.add_argument_group("proof")
    group.add_argument(
        "--watch",
        type=int,
        metavar="N",
        help="measure at every N-th step how much attention the sparse layers keep, and warn",
    )
    group.add_argument(
        "--exact-below",
        type=float,
        metavar="X",
        help="answer with full attention while less than this share is kept",
    )
    group = p.add_argument_group("what to show")
    group.add_argument(
        "--plan",
        "--dry-run",
        dest="plan",
        action="store_true",
        help="print what the model would need, and end",
    )
    group.add_argument("--json", action="store_true", help="one JSON object per answer on stdout")
    group.add_argument("--stats", action="store_true", help="all counters after each answer")
    group.add_argument("--list-models", action="store_true", help="print the aliases, and end")
    group.add_argument("--quiet", action="store_true", help="no progress and no figures")
    group.add_argument("--verbose", action="store_true", help="tracebacks")
    group.add_argument("--version", action="store_true", help="print versions, and end")
    return p


def scaled_or_zero(text: str) -> int:
    """As scaled, and 0."""
    return 0 if text.strip() == "0" else scaled(text)


OMNIKV_FLAGS = (
    "filter_layers",
    "tokens",
    "share",
    "mem",
    "selector",
    "window",
    "wait_layers",
    "tail",
    "sink",
    "dense_below",
    "prefill_ratio",
)
# Fields of the library's settings that have another name as a flag; the rest differ by a hyphen
# only.
FLAG_OF = {
    "max_tokens": "-n/--max-tokens",
    "temperature": "--temp",
    "repetition_penalty": "--repeat-penalty",
    "max_context": "--ctx",
    "vram_budget": "--vram-budget",
    "ram_budget": "--ram-budget",
}


def omnikv_of(args) -> OmniKV | None:
    """OmniKV with the flags' settings; None where no flag sets any. Raises SettingError."""
    given = {name: value for name in OMNIKV_FLAGS if (value := getattr(args, name)) is not None}
    return OmniKV(**given) if given else None


def method_of(args, pocket: bool):
    """The method that the flags ask for; None leaves the choice to the model."""
    if args.method not in (None, "omnikv"):
        return make(
            args.method,
            {name: value for name in OMNIKV_FLAGS if (value := getattr(args, name)) is not None},
        )
    omnikv = omnikv_of(args)
    if omnikv is None and pocket:
        # The share that Mem 30% is on the paper's models; at every length, so that /sources always
        # has something to show.
        return OmniKV(share=0.067, dense_below=0)
    return omnikv or (OmniKV() if args.method == "omnikv" else None)


def params_of(args) -> SamplingParams:
    """SamplingParams of the flags. Raises SettingError."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repeat_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def flag_named(message: str) -> str:
    """A setting's error message with the flag in place of the field's name."""
    field, colon, rest = message.partition(":")
    known = (
        {f.name for f in dataclasses.fields(SamplingParams)}
        | set(OMNIKV_FLAGS)
        | set(FLAG_OF)
        | {"threads", "chunk", "device", "dtype", "offload", "compile"}
    )
    return (
        f"{FLAG_OF.get(field, '--' + field.replace('_', '-'))}{colon}{rest}"
        if colon and field in known
        else message
    )


def versions() -> str:
    """One line for bug reports."""
    found = []
    for package in ("torch", "triton", "tokenizers", "safetensors"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return f"omnikv-engine {VERSION} (python {platform.python_version()}, {', '.join(found)}, {platform.system()} {platform.machine()})"


def open_model(args, display: Display) -> LLM:
    """The planned model, not loaded yet. Raises typed errors."""
    name, pocket = args.model, False
    if name is None:
        if not (POCKET / "model.safetensors").is_file():
            raise UsageError(
                "no model is shipped yet: name one with --model FOLDER-OR-NAME (--list-models prints the names)"
            )
        name, pocket = str(POCKET), True
    # The shipped model's products take microseconds: a second thread gains nothing, and on a
    # machine that does other work its spinning costs a factor of 50 (1900 tokens read in 30 s
    # instead of 0.5 s at load 7 on two cores).
    threads = 1 if pocket and args.threads is None else args.threads
    return LLM(
        name,
        device=args.device,
        dtype=args.dtype,
        max_context=args.ctx,
        threads=threads,
        chunk=args.chunk,
        compile={"auto": None, "on": True, "off": False}[args.compile],
        offload=args.offload,
        vram_budget=args.vram_budget,
        ram_budget=args.ram_budget,
        method=method_of(args, pocket),
        load=False,
        progress=display.loading(),
        download_progress=display.line,
    )


def introduce(llm: LLM, display: Display) -> None:
    """Lines that say what was chosen, before the weights are read."""
    plan, found = llm.plan().to_dict(), llm.resolved
    revision = f" at {found.revision[:12]}" if found.revision else ""
    display.note(f"{llm.name}: {found.folder}{revision}")
    display.note(
        f"{plan['dtype']} on {plan['device']}, {brief(llm.method)}, context {plan['max_context']:,} tokens, "
        f"{human(plan['total_bytes'])} of {human(plan['free_bytes'])} at the peak"
    )


def read_stdin() -> str:
    """All of standard input as text."""
    return decoded(sys.stdin.buffer.read(), "standard input")


def converse(args, llm: LLM, params: SamplingParams, display: Display) -> int:
    """Answer once or talk; the exit code."""
    once = (args.prompt is not None or args.file is not None) and not args.interactive
    document = (
        None if args.file is None else read_stdin() if args.file == "-" else read_text(args.file)
    )
    introduce(llm, display)
    llm.load()
    if llm.plan().placement is not None:
        display.note(f"{llm.plan().where}")
        display.note(f"{llm.link}")
    chat = Chat(
        llm,
        params,
        display,
        args.system,
        args.json,
        args.stats,
        omnikv=omnikv_of(args),
        watch=watch_of(args.watch, args.exact_below),
    )
    if args.model is None and not once:
        welcome(chat, display)
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
    """The shipped model's own document, read at the start, and what to ask about it."""
    path, hint = POCKET / "welcome.txt", POCKET / "hint.txt"
    if path.is_file():
        chat.read(read_text(str(path)), path.name)
    if hint.is_file():
        display.line(read_text(str(hint)).strip())
    display.note("/sources shows what an answer looked at")


def run(args, display: Display) -> int:
    """Do what the flags say; the exit code. Raises typed errors."""
    if args.version:
        print(versions())
        return 0
    if args.list_models:
        from weights.aliases import table

        print(table())
        return 0
    if args.file == "-" and args.interactive:
        raise UsageError(
            "-f -: takes all of standard input, so -i has nothing left to read; give the document as a file"
        )
    params = params_of(args)
    llm = open_model(args, display)
    if args.plan:
        plan = llm.plan()
        print(json.dumps(plan.to_dict()) if args.json else plan)
        return 0
    return converse(args, llm, params, display)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. Prints no traceback without --verbose."""
    args = parser().parse_args(arguments)
    display = Display(quiet=args.quiet)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that lacks a character shows a mark, not an error
            stream.reconfigure(errors="replace")
    try:
        import readline  # noqa: F401  (input() then has editing and a history)
    except ImportError:
        pass
    warnings.showwarning = lambda message, *rest, **more: display.line(f"note: {message}")
    try:
        return run(args, display)
    except KeyboardInterrupt:
        display.line()
        return INTERRUPTED
    except BrokenPipeError:
        # who read our text has left; nothing more to say, nor at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except EngineError as error:
        if args.verbose:
            traceback.print_exc()
        display.line(
            f"error: {flag_named(str(error)) if isinstance(error, SettingError) else error}"
        )
        return error.exit_code
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        message = f": {first_line(error)}" if str(error) else ""
        display.line(f"error: {type(error).__name__}{message} (--verbose shows where)")
        return 1
