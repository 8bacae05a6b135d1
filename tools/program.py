"""What every program of tools shares: one-line errors and exit codes, progress, files that are
whole or absent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import EngineError

# the shipped model, which programs use where no --model is given
POCKET = Path(__file__).resolve().parents[1] / "weights" / "pocket"


def model_label(model: str) -> str:
    """A model as reports name it: the shipped one by its place in the repository."""
    return "weights/pocket" if model == str(POCKET) else model


def guarded(work: Callable[[], int | None], stopped: str = "") -> int:
    """Run a program and return its exit code.

    work: returns an exit code, or None for 0. An EngineError becomes one line on stderr and its own
    code, Ctrl-C becomes 130 after the line `stopped`.
    """
    try:
        return work() or 0
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if stopped:
            print(f"\n{stopped}", file=sys.stderr)
        return 130


def say(line: str) -> None:
    """One line of news on stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Write the progress line over itself on stderr; call `say("")` at the end."""
    print(f"\r{text}   ", end="", file=sys.stderr, flush=True)


def replace_text(path: Path, text: str) -> Path:
    """Write a file beside its place and rename it: a reader finds the old one or the new one."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path


def replace_json(path: Path, data: Any) -> Path:
    """`replace_text` of JSON."""
    return replace_text(path, json.dumps(data, indent=1) + "\n")
