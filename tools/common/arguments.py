"""Flags that programs of tools share, by name: one spelling, one default, one sentence of help; and
the model that they name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import LLM, Full
from engine.base.errors import UsageError
from tools.common.program import JUDGE, POCKET

# of programs that tell methods apart, as the model of the demonstration cannot
JUDGED = dict(default=str(JUDGE), help="alias, hub id or folder (default: judge, in the box)")
NUMBER, NUMBERS = dict(type=int), dict(type=int, nargs="+")
FLAGS: dict[str, dict[str, Any]] = {
    "model": dict(default=str(POCKET), help="alias, hub id or folder (default: the shipped model)"),
    "methods": dict(nargs="+", metavar="NAME[@BUDGETS]", help="full attention always runs"),
    "import": dict(
        dest="imports",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Python files with methods of your own; a class is asked for by its name in small "
        "letters (docs/METHODS.md)",
    ),
    "filters": NUMBERS | dict(help="OmniKV's filter layers (default: those the model comes with)"),
    "wait": NUMBER
    | dict(help="OmniKV's wait layers (default: those the model comes with, else 0)"),
    "tail": NUMBER
    | dict(default=64, help="newest tokens that OmniKV's layers always see, outside its budget"),
    "seed": NUMBER | dict(default=0, help="of the documents"),
    "device": dict(default="auto", help="auto, cpu or cuda"),
    "dtype": dict(default="auto", help="auto, bfloat16, float16 or float32"),
    "threads": NUMBER | dict(help="CPU threads"),
    "minutes": dict(type=float, help="stop at whole work before so many minutes are over"),
    "estimate": dict(action="store_true", help="say how long it would take, and stop"),
    "fresh": dict(action="store_true", help="start over instead of going on with --out"),
    "out": dict(type=Path, help="folder (default: {})"),
}


def command(prog: str, about: str, epilog: str = "") -> argparse.ArgumentParser:
    """The parser of a program, whose texts keep their lines. prog: `python -m tools.X` as it is
    typed in a clone; a wheel has another name in its place (setup.py).
    """
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=prog, description=about, epilog=epilog, formatter_class=form
    )


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, names: str, **own: Any
) -> None:
    """Add the flags of FLAGS that `names` lists. own: the default of one, or a dict of what else
    differs: out=Path("x-out"), seed=dict(help="of the texts").
    """
    for name in names.split():
        given = own.pop(name, {})
        flag = FLAGS[name] | (given if isinstance(given, dict) else {"default": given})
        flag["help"] = flag["help"].format(flag.get("default"))
        parser.add_argument(f"--{name}", **flag)
    assert not own, f"no such flag among {names}: {own}"


def require_least(args: argparse.Namespace, **least: int) -> None:
    """Raise UsageError for a number, or one of several, below its least; None is left alone."""
    for name, low in least.items():
        value = getattr(args, name)
        found = min(value) if isinstance(value, Sequence) else value
        if found is not None and found < low:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: found {found}, expected at least {low}")


def require_minutes(args: argparse.Namespace) -> None:
    """Raise UsageError for --minutes that are no time."""
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"--minutes: found {args.minutes:g}, expected a number above 0")


def loaded(args: argparse.Namespace, texts: bool = False, **more: Any) -> LLM:
    """The model of --model on --device in --dtype with --threads, as far as there are such flags,
    under full attention. more: LLM's options, which come first. Raises UsageError where `texts` are
    to be made of its tokens and it has none.
    """
    flags = {n: getattr(args, n) for n in ("device", "dtype", "threads") if hasattr(args, n)}
    llm = LLM(str(args.model), **{"method": Full(), **flags, **more})
    if texts and llm.tokenizer is None:
        raise UsageError("this model has no tokenizer, and prompts are made of its tokens")
    return llm


def require_plain(llm: LLM, cap: bool = True) -> None:
    """Raise UsageError where not every layer sees everything by heads with keys of their own. cap:
    whether a cap on scores is left alone.
    """
    config = llm.config
    other = config.latent or config.local_layers or config.recurrent_layers
    if other or (config.block.score_cap and not cap):
        raise UsageError(f"--model: found {config.family}, expected layers of plain full attention")
