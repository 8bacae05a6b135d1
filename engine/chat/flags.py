"""The flags of python -m engine.chat: its own, beside those of engine/cli/model_flags.py that say
what runs. engine/cli/settings.py makes settings of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from engine.base.errors import UsageError
from engine.cli.model_flags import fits_flag, gigabytes, model_flags
from engine.cli.parser import Parser, version_flag
from engine.cli.ranks_flags import flag_of, ranks_flags
from weights.aliases import table

# flags that one process alone takes
ONE_PROCESS = (
    "calibrate",
    "forever",
)
MAX_TOKENS = 1024  # default bound of an answer in the chat; the library's 64 is for programs
EPILOG = """With -p the program answers once and ends (-i stays in the chat), with -f it reads the
document first. With -f alone the chat opens behind the document: you type the questions, or a pipe
brings one a line. -f - alone answers standard input itself, as one message.

examples:
  python -m engine.chat                             the shipped model and its document
  python -m engine.chat --model NAME --ctx 128K --plan
  python -m engine.chat --model NAME -f book.txt
  python -m engine.chat --model NAME -f book.txt -p "Who is the narrator?"
  python -m engine.chat --model NAME -f book.txt < questions.txt
  python -m engine.chat --model NAME -f may.pdf -f june.pdf -p "What has changed?"
  python -m engine.chat --model NAME --method quest --set page=32 --tokens 512

exit codes: 0 done, 1 the run failed, 2 wrong usage, 130 stopped with Ctrl-C, 143 and 129 ended by
SIGTERM and SIGHUP
In the chat, /help lists the commands."""


# ---------------------------------------------------------------- the flags


def parser() -> Parser:
    """Make the parser with all flags."""
    p = Parser(
        prog="python -m engine.chat",
        allow_abbrev=False,
        description="Chat with a model over a very long context.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--model",
        metavar="NAME",
        help="a folder in Hugging Face layout, a GGUF file, an alias (--list-models) or a hub id; "
        "default: the model that is shipped with the engine",
    )
    _prompt_flags(p.add_argument_group("what to ask").add_argument)
    group = p.add_argument_group("sampling")
    _sampling_flags(group.add_argument)
    _penalty_flags(group.add_argument)
    model_flags(p)
    ranks_flags(p.add_argument_group("several processes").add_argument)
    _proof_flags(p.add_argument_group("proof").add_argument)
    _output_flags(p.add_argument_group("what to print").add_argument)
    return p


def require_sense(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that do not go together."""
    if args.list_models:
        return
    if "-" in args.file and args.interactive:
        raise UsageError(
            "-f -: reads standard input to its end, so -i has nothing left to read; "
            "give the document as a file"
        )
    _require_one_process(args)
    if args.calibrate and not args.file and args.prompt is not None and not args.interactive:
        raise UsageError("--calibrate: found no document, expected one to read (-f FILE)")


def _require_one_process(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that several processes do not take (docs/PARALLEL.md)."""
    if not (flag := flag_of(args)):
        return
    if args.devices is not None:
        raise UsageError(f"--devices: found beside {flag}; layers or heads are split, not both")
    for name in ONE_PROCESS:
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: works on one process; leave it or {flag} out"
            )


def answer_at_once(args: argparse.Namespace) -> str | None:
    """The table of aliases, where these flags ask for that; None where the engine must run."""
    return table() if args.list_models and args.fits is None else None


def _prompt_flags(add: Callable) -> None:
    add("-p", "--prompt", metavar="TEXT", help="answer this prompt once and end")
    add(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="read this document first: text, HTML, PDF, DOCX, ODT or EPUB; - is standard input "
        "(may be repeated: all are read in order, each with its name before it)",
    )
    add("--system", metavar="TEXT", help="set the system prompt")
    add(
        "--session",
        metavar="FILE",
        help="go on with the conversation in this file if it exists, and write it at the end",
    )
    add("--cache", metavar="DIR", help="keep what was read in this folder, for any method")
    add("--cache-limit", type=gigabytes, metavar="GB", help="at most this much (default 50)")
    add("-i", "--interactive", action="store_true", help="stay in the chat after -p")


def _sampling_flags(add: Callable) -> None:
    add(
        "-n",
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"write at most N tokens per answer (default {MAX_TOKENS})",
    )
    add(
        "--temp",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 always takes the likeliest token (default 0)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the smallest set of tokens with probability P (default 1: all)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens (default 0: all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less likely than P times the likeliest (default 0: none)",
    )
    add("--seed", type=int, metavar="N", help="seed of the sampling (default: a new one each time)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text (may be repeated)",
    )
    add("--ignore-eos", action="store_true", help="write on past the model's end tokens")


def _penalty_flags(add: Callable) -> None:
    add(
        "--repeat-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="make tokens that have occurred less likely by the factor R (default 1: off)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="subtract P from the logits of tokens that the answer has (default 0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="subtract P for each time that the answer has a token (default 0)",
    )


def _proof_flags(add: Callable) -> None:
    add(
        "--watch",
        type=int,
        metavar="N",
        help="measure at every N-th step how much attention mass the sparse layers keep, and warn "
        "where it is low",
    )
    add(
        "--exact-below",
        type=float,
        metavar="X",
        help="answer with full attention while less than this share of the mass is kept",
    )


def _output_flags(add: Callable) -> None:
    add(
        "--plan",
        action="store_true",
        help="print the memory and layer plan, load nothing, and end",
    )
    add("--json", action="store_true", help="print one JSON object per answer on stdout")
    add("--stats", action="store_true", help="print the figures of /stats after each answer")
    fits_flag(
        add,
        "with --list-models: which of them fit here, in which form, with --weights, --bank, --ctx "
        "and the budgets as they are given, or on the GPU that it names; with --plan: plan for",
    )
    add("--list-models", action="store_true", help="print the model aliases and end")
    add("--quiet", action="store_true", help="print no progress and no figures")
    add("--verbose", action="store_true", help="print a traceback with each error")
    version_flag(add)
