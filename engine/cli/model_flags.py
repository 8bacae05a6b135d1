"""The flags that say what runs: model, context, placement and method, for the chat and the server.

`model_flags` adds them to either's parser, engine/cli/settings.py makes LLM's keyword arguments of
them. Nothing here imports torch: a wrong flag is said at once.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from typing import NamedTuple

from engine.base.checks import MOST
from engine.methods.names import NAMES

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


class Card(NamedTuple):
    """Bytes of a GPU to plan for, and of host memory beside it; None: what this machine has."""

    gpu: int | None = None
    host: int | None = None


def card(text: str) -> Card:
    """Parse the memory of a GPU and of its host: 80, or 80+128."""
    try:
        gpu, *host = map(gigabytes, text.split("+"))
        return Card(gpu, *host)
    except (argparse.ArgumentTypeError, TypeError):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected gigabytes such as 24, or 80+128 with its host's memory"
        ) from None


def layers(text: str) -> tuple[int, ...]:
    """Parse layer numbers: 2,8,18."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected layer numbers such as 2,8,18"
        ) from None


def devices(text: str) -> tuple[str, ...]:
    """Parse names of devices: 0,1 or cuda:0,cpu."""
    return tuple(part.strip() for part in text.split(","))


def shares(text: str) -> tuple[int, ...]:
    """Parse how layers are divided: 1:3."""
    try:
        return tuple(int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected numbers of layers such as 12:20, or proportions such as 1:3"
        ) from None


def auto_or_tokens(text: str) -> int | str:
    """Parse a number of tokens as `scaled` does, or 0, or the word auto."""
    return text if text == "auto" else 0 if text.strip() == "0" else scaled(text)


def streamed_layers(text: str) -> int | str:
    """Parse a number of layers or one of the words auto, off and all."""
    if text in ("auto", "off", "all"):
        return text
    if not re.fullmatch("[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a number of layers, or auto, off, all"
        )
    return int(text)


def drafts(text: str) -> int | str:
    """Parse a number of drafts or the word auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 0 to 7, or auto") from None


def setting(text: str) -> tuple[str, object]:
    """Parse KEY=VALUE. A value is a Python literal (page=32, filter_layers=2,8,18) or else text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected KEY=VALUE such as page=32")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


# ---------------------------------------------------------------- the flags


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the groups of flags that say what runs, and where. --model is the caller's."""
    add = parser.add_argument_group("context and placement").add_argument
    _length_flags(add)
    _placement_flags(add)
    add = parser.add_argument_group("method").add_argument
    _method_flags(add)
    _budget_flags(add)
    _exact_flags(add)


def fits_flag(add: Callable, about: str) -> None:
    """Add --fits, whose value is a Card. about: what the program does with it."""
    add(
        "--fits",
        nargs="?",
        const=Card(),
        type=card,
        metavar="GB[+GB]",
        help=f"{about} a GPU of so many gigabytes that need not be here, such as 80, or 80+128 "
        "with its host's memory (default: this machine's)",
    )


def _length_flags(add: Callable) -> None:
    add(
        "--ctx",
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
    add(
        "--forever",
        action="store_true",
        help="conversations without end in constant memory: what is beyond the sinks and the "
        "newest --tokens of streaming_llm (the default here), lm_infinite or window is forgotten; "
        "of infllm what is in no window and none of its blocks",
    )


def _placement_flags(add: Callable) -> None:
    _device_flags(add)
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
        "--activations",
        choices=("auto", "int8"),
        default="auto",
        help="with weights in few bits on a CPU: int8 rounds what a prompt multiplies by them to 8 "
        "bits for every 32 columns, and its queries where the bank is int8, which is faster and "
        "moves answers two to four times as far as weights in few bits do (docs/QUANTISATION.md; "
        "auto: 16 bits or more)",
    )
    add(
        "--bank",
        choices=("auto", "model", "int8", "int4", "fp8"),
        default="auto",
        help="hold keys and values in the model's dtype, in 8 bits, or keys in 6 bits and values "
        "in 4 (int4: a third of a 16-bit bank; fp8: 8-bit floats; auto: as model)",
    )
    add(
        "--savepoints",
        type=int,
        metavar="N",
        help="keep N earlier states of a model's recurrent layers to go back to (default 12; "
        "0: none), or stores of a method that forgets (2 at most)",
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
        help="keep K and V in host memory, of all layers that the method can spare, or on the "
        "device (auto: on a GPU, move to the host what does not fit)",
    )
    add(
        "--weights-offload",
        type=streamed_layers,
        default="auto",
        metavar="N",
        help="keep the weights of N layers in host memory and stream them to the device in every "
        "step and chunk; all, off, or auto (default: on a GPU as many as the model needs that "
        "would not fit otherwise)",
    )
    add(
        "--vram-budget",
        type=gigabytes,
        metavar="GB",
        help="use at most this much GPU memory, such as 24 or 512MB",
    )
    add("--ram-budget", type=gigabytes, metavar="GB", help="use at most this much RAM")


def _device_flags(add: Callable) -> None:
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add(
        "--devices",
        type=devices,
        metavar="D,D,...",
        help="divide the layers, with their weights and their part of the bank, over several "
        "devices: numbers of GPUs, cuda:N or cpu, such as 0,1 (docs/PARALLEL.md)",
    )
    add(
        "--split",
        type=shares,
        metavar="N:N:...",
        help="with --devices: the layers of each device, or what they are in proportion to, such "
        "as 1:3 (default: by bytes and free memory)",
    )


def _method_flags(add: Callable) -> None:
    add(
        "--method",
        choices=NAMES,
        metavar="NAME",
        help="omnikv, full, or a baseline to compare with: "
        + ", ".join(name for name in NAMES if name not in ("omnikv", "full"))
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
        help="find the filter layers of an uncalibrated model on the first document "
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
    add(
        "--draft-weights",
        choices=("model", "int8"),
        help="with --exact on a CPU: int8 drafts by a copy of the weights in 8 bits, which the "
        "plan counts; the text stays full attention's by the model's own (default model)",
    )
