"""The flags of python -m engine.chat; engine/chat/settings.py makes settings of them."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from engine.chat.display import Display
from engine.chat.settings import setting
from engine.methods.registry import methods
from engine.settings import MOST

MAX_TOKENS = 1024  # default bound of an answer in the chat; the library's 64 is for programs
EPILOG = """With -p or -f the program answers once and ends (-i stays in the chat). With both, it
reads the document first and then asks the question.

examples:
  python -m engine.chat                             the shipped model and its document
  python -m engine.chat --model NAME --ctx 128K --plan
  python -m engine.chat --model NAME -f book.txt -p "Who is the narrator?"
  python -m engine.chat --model NAME --method quest --set page=32 --tokens 512

exit codes: 0 done, 1 the run failed, 2 wrong usage, 130 stopped with Ctrl-C, 143 and 129 ended by
SIGTERM and SIGHUP
In the chat, /help lists the commands."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints each error as one line, with the nearest flag or value."""

    def error(self, message: str) -> NoReturn:
        """Print one line that names the flag and exit with 2."""
        message = message.removeprefix("argument ").replace(
            "expected one argument", "found nothing, expected a value"
        )
        message = re.sub(
            r"invalid (int|float) value: (.*)", r"found \2, expected a number", message
        )
        choice = re.fullmatch(r"(.*): invalid choice: (.*) \(choose from (.*)\)", message)
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if choice:
            known = choice[3].replace("'", "").split(", ")
            near = difflib.get_close_matches(choice[2].strip("'"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"{choice[1]}: found {choice[2]}, expected one of {', '.join(known)}{hint}"
        elif unknown and unknown[1].startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[1].split("=")[0], flags, 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
            message = f"{unknown[1]}: no such flag; {hint}"
        elif unknown:
            message = (
                f"{unknown[1]!r}: not expected here; name a model with --model, "
                "give a prompt with -p"
            )
        Display().error(message)
        sys.exit(2)


# ---------------------------------------------------------------- values


def scaled(text: str) -> int:
    """Parse a number of tokens, with K (1024) or M (1024 x 1024): 32K, 1M, 131072."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kKmM]?)", text.strip())
    tokens = float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else 0
    if tokens < 1 or tokens != int(tokens) or tokens > 2**31:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a number of tokens such as 131072, 128K or 1M"
        )
    return int(tokens)


def gigabytes(text: str) -> int:
    """Parse an amount of memory in GB (10^9 bytes) or with a unit (24, 24GB, 512M) to bytes."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kKmMgGtT]?)[bB]?", text.strip())
    size = 0
    if found:
        power = "kmgt".index(found[2].lower() or "g") + 1
        size = int(float(found[1]) * 1000**power)
    if not 1 <= size <= MOST:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected gigabytes such as 24, or 24GB, 512MB"
        )
    return size


def layers(text: str) -> tuple[int, ...]:
    """Parse layer numbers: 2,8,18."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected layer numbers such as 2,8,18"
        ) from None


def auto_or_tokens(text: str) -> int | str:
    """Parse a number of tokens as `scaled` does, or 0, or the word auto."""
    return text if text == "auto" else 0 if text.strip() == "0" else scaled(text)


def drafts(text: str) -> int | str:
    """Parse a number of drafts or the word auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 0 to 7, or auto") from None


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
    _placement_flags(p.add_argument_group("context and placement").add_argument)
    group = p.add_argument_group("method")
    _method_flags(group.add_argument)
    _budget_flags(group.add_argument)
    _exact_flags(group.add_argument)
    _proof_flags(p.add_argument_group("proof").add_argument)
    _output_flags(p.add_argument_group("what to print").add_argument)
    return p


def _prompt_flags(add: Callable) -> None:
    add("-p", "--prompt", metavar="TEXT", help="answer this prompt once and end")
    add("-f", "--file", metavar="FILE", help="read this document first; - is standard input")
    add("--system", metavar="TEXT", help="set the system prompt")
    add(
        "--session",
        metavar="FILE",
        help="go on with the conversation in this file if it exists, and write it at the end",
    )
    add("--cache", metavar="DIR", help="keep the rows of documents in this folder, for ever")
    add("--cache-limit", type=gigabytes, metavar="GB", help="at most this much (default 50)")
    add("-i", "--interactive", action="store_true", help="stay in the chat after -p or -f")


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
        "--temperature",
        dest="temp",
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


def _placement_flags(add: Callable) -> None:
    add(
        "--ctx",
        "--max-model-len",
        dest="ctx",
        type=scaled,
        metavar="N",
        help="reserve a context of N tokens, such as 131072, 128K or 1M "
        "(default: the model's own length, or what fits)",
    )
    add(
        "--rope",
        metavar="KIND",
        help="another rope than the model's own: yarn:4, yarn:4:32768, linear:2, dynamic:4, "
        "theta:1e6, default or longrope; comma-separated where theta goes with another",
    )
    add(
        "--beyond",
        action="store_true",
        help="allow a --ctx beyond the positions that the model was made for",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add(
        "--weights",
        choices=("auto", "int8", "int4", "int4:64", "int4:128", "float"),
        default="auto",
        help="round the weights to few bits as they are read (int4: a scale for every 32 columns; "
        "int4:64 and int4:128 take less memory and lose more; auto: hold them as stored; float: "
        "dequantise them)",
    )
    add(
        "--bank",
        choices=("auto", "model", "int8", "int4", "fp8"),
        default="auto",
        help="hold keys and values in the model's dtype, in 8 bits, or keys in 5 bits and values "
        "in 4 (int4: a third of a 16-bit bank; fp8: 8-bit floats; auto: as model)",
    )
    add("--threads", type=int, metavar="N", help="use N CPU threads")
    add("--chunk", type=int, metavar="N", help="read prompts in chunks of N tokens")
    add(
        "--compile",
        choices=("auto", "on", "off"),
        default="auto",
        help="torch.compile the decode step (auto: on a GPU)",
    )
    add(
        "--offload",
        choices=("auto", "host", "device"),
        default="auto",
        help="keep the sparse layers' K and V in host memory or on the device "
        "(auto: on a GPU, move to the host what does not fit)",
    )
    add(
        "--vram-budget",
        type=gigabytes,
        metavar="GB",
        help="use at most this much GPU memory, such as 24 or 512MB",
    )
    add("--ram-budget", type=gigabytes, metavar="GB", help="use at most this much RAM")


def _method_flags(add: Callable) -> None:
    names = tuple(methods())
    add(
        "--method",
        "--attention",
        dest="method",
        choices=names,
        metavar="NAME",
        help="omnikv, full, or a baseline to compare with: "
        + ", ".join(name for name in names if name not in ("omnikv", "full"))
        + " (default: omnikv where the model's filter layers are known, else full)",
    )
    add(
        "--filter-layers",
        type=layers,
        metavar="L,L,...",
        help="layers that read the whole context and choose tokens for the sparse layers after "
        "them (default: from the model's calibration)",
    )
    add(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        help="find the filter layers of a model that nobody has calibrated on the first document "
        "that is read, and keep them (default: ask, on a terminal)",
    )
    add(
        "--wait-layers",
        type=int,
        metavar="N",
        help="layers after a filter layer that still read everything "
        "(default: the calibration's, 1 for a published set, or 0)",
    )
    add(
        "--dense-below",
        type=auto_or_tokens,
        metavar="N",
        help="use full attention on contexts shorter than N; 0: never (default auto)",
    )
    add(
        "--prefill-ratio",
        type=int,
        metavar="R",
        help="read prompts sparsely: sparse layers read R blocks' worth of chosen tokens "
        "(default: exact; see docs/PREFILL.md)",
    )
    add(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any field of the method, such as page=32 of quest (may be repeated)",
    )


def _budget_flags(add: Callable) -> None:
    add(
        "--tokens",
        "--budget",
        dest="tokens",
        type=int,
        metavar="K",
        help="let a sparse layer read K chosen tokens per step (default 2048)",
    )
    add("--share", type=float, metavar="X", help="--tokens as a share of the context, 0 to 1")
    add(
        "--mem",
        type=float,
        metavar="X",
        help="--tokens from the paper's Mem%%: the share of the context that a step reads over "
        "all layers, 0 to 1",
    )
    add(
        "--selector",
        choices=("last", "exponential", "uniform"),
        help="choose tokens by the last query or by a weighted window of queries (default last)",
    )
    add(
        "--window",
        type=int,
        metavar="N",
        help="queries in the window of an exponential or uniform selector (default 16)",
    )
    add(
        "--tail",
        type=int,
        metavar="N",
        help="let every layer read the newest N tokens (default 256)",
    )
    add("--sink", type=int, metavar="N", help="always choose the first N tokens (default 0)")


def _exact_flags(add: Callable) -> None:
    add(
        "--exact",
        action="store_true",
        help="write what full attention writes: the method drafts, full attention verifies "
        "(docs/EXACT.md)",
    )
    add(
        "--draft",
        type=drafts,
        metavar="N",
        help="with --exact: draft N tokens before each verification, 0 to 7, or as many as pay "
        "(default auto)",
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
        "--dry-run",
        dest="plan",
        action="store_true",
        help="print the memory and layer plan, load nothing, and end",
    )
    add("--json", action="store_true", help="print one JSON object per answer on stdout")
    add("--stats", action="store_true", help="print the figures of /stats after each answer")
    add(
        "--fits",
        nargs="?",
        const=0,
        type=gigabytes,
        metavar="GB",
        help="with --list-models: only those that fit here, or on an imagined GPU of GB gigabytes, "
        "with context and settings; with --plan: plan for that GPU",
    )
    add("--list-models", action="store_true", help="print the model aliases and end")
    add("--quiet", action="store_true", help="print no progress and no figures")
    add("--verbose", action="store_true", help="print a traceback with each error")
    add(
        "--version",
        action="store_true",
        help="print the versions of the engine and its libraries and end",
    )
