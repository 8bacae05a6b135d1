"""From flags, and from what is typed in the chat, to LLM's settings, a method, SamplingParams."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from engine.base.errors import SettingError
from engine.cli.model_flags import Card
from engine.load.options import SAVEPOINTS
from engine.load.pocket import pocket_method
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.methods.omnikv.method import OmniKV
from engine.methods.registry import make, methods
from engine.sampling.params import SamplingParams

# flags that set a field of the method; the names are the fields'
METHOD_FLAGS = (
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
# fields whose flag has another name; the other flags replace underscores by hyphens only
FLAG_OF = {
    "max_tokens": "-n/--max-tokens",
    "temperature": "--temp",
    "repetition_penalty": "--repeat-penalty",
    "max_context": "--ctx",
    "vram_budget": "--vram-budget",
    "ram_budget": "--ram-budget",
}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return LLM's keyword arguments that the flags of `model_flags` ask for. Raises SettingError
    for settings of a method that do not fit it.
    """
    shipped = args.model is None
    # The shipped model's products take microseconds: a second thread gains nothing, and on a
    # machine that does other work its spinning costs a factor of 50 (1900 tokens read in 30 s
    # instead of 0.5 s at load 7 on two cores).
    threads = 1 if shipped and args.threads is None else args.threads
    planned = args.fits or Card()  # imagined; the programs take it with a plan alone
    return {
        "device": args.device,
        "devices": args.devices,
        "split": args.split,
        "dtype": args.dtype,
        "weights": args.weights,
        "activations": args.activations,
        "weights_offload": args.weights_offload,
        "bank": args.bank,
        "savepoints": SAVEPOINTS if args.savepoints is None else args.savepoints,
        "max_context": args.ctx,
        "threads": threads,
        "chunk": args.chunk,
        "compile": {"auto": None, "on": True, "off": False}[args.compile],
        "offload": args.offload,
        "vram_budget": args.vram_budget,
        "ram_budget": args.ram_budget,
        "rope": args.rope,
        "beyond": args.beyond,
        "forever": args.forever,
        "method": method_of(args, shipped),
        "imagined_gpu": planned.gpu,
        "imagined_host": planned.host,
    }


def method_of(args: argparse.Namespace, pocket: bool) -> Method | None:
    """Return the method that the flags ask for, wrapped by exact mode where they ask for that; None
    leaves the choice to the model. As `_method_of`.
    """
    method = _method_of(args, pocket)
    given = {name: getattr(args, name) for name in ("draft", "draft_weights")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not args.exact:
        raise SettingError(f"{next(iter(given))}: belongs to --exact, which was not given")
    return Exact(method or OmniKV(), **given) if args.exact else method


def exact_with(method: Method, settings: dict[str, object]) -> Exact:
    """Return exact mode over a session's method, or with other settings over what it wraps."""
    fields = [f.name for f in dataclasses.fields(Exact) if f.name != "method"]
    for key in settings:
        if key not in fields:
            raise SettingError(f"{key}: exact has no such setting; it takes {', '.join(fields)}")
    inner = method.method if isinstance(method, Exact) else method
    return Exact(inner, **settings)  # type: ignore[arg-type]


def _method_of(args: argparse.Namespace, pocket: bool) -> Method | None:
    """Return the method that the flags ask for, or None to leave the choice to the model.

    pocket: whether the shipped model runs. Raises SettingError for a setting that the method does
    not have or that is out of range.
    """
    name = args.method or ("streaming_llm" if args.forever else "omnikv")
    flags = {key: value for key in METHOD_FLAGS if (value := getattr(args, key)) is not None}
    if args.forever and not (args.method or flags or args.set):
        return None
    if name == "omnikv" and not flags and not args.set:
        if pocket:
            return pocket_method()
        return OmniKV() if args.method else None
    return method_with(name, dict(args.set), flags)


def method_with(name: str, settings: dict[str, object], flags: dict[str, object]) -> Method:
    """Make the method of this name with settings by field name and with OmniKV's own flags.

    Raises SettingError that lists the method's fields where it has no such setting.
    """
    fields = sorted(field.name for field in dataclasses.fields(methods()[name]))
    for key in settings:
        if key not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes none"
            raise SettingError(f"{key}: {name} has no such setting; {takes}")
    return make(name, flags | settings)


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Return the SamplingParams of the flags. Raises SettingError."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def flag_named(message: str, given: Collection[str] = ()) -> str:
    """Replace the field's name at the start of a setting's error message by its flag.

    given: fields that came through --set.
    """
    field, colon, rest = message.partition(":")
    if colon and field in given:
        return f"--set {message}"
    known = {
        *(f.name for f in dataclasses.fields(SamplingParams)),
        *METHOD_FLAGS,
        *FLAG_OF,
        *("draft", "threads", "chunk", "device", "devices", "split", "dtype", "offload", "compile"),
        *("gpus", "weights", "activations", "bank", "rope", "beyond", "forever", "savepoints"),
        *("weights_offload", "draft_weights"),
    }
    if not colon or field not in known:
        return message
    return f"{FLAG_OF.get(field, '--' + field.replace('_', '-'))}{colon}{rest}"
