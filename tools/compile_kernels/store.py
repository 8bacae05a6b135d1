"""Keeps reports of compiled variants, so that a table of thousands goes on where it was stopped and
a changed kernel alone is compiled again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kernels.launch.triton import triton
from tools.compile_kernels.compiler import COUNTED, Report, describe, examine
from tools.compile_kernels.variants import Launch


class Store:
    """Reports in a file, a line of JSON each. path: None keeps them in memory alone. A line that a
    stopped run left half written is left out.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._reports: dict[str, Report] = {}
        if path is None or not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                key, fields = json.loads(line)
                self._reports[key] = Report(**fields)
            except (ValueError, TypeError):
                continue

    def report(self, launch: Launch, target: str) -> Report:
        """The report of a variant for a target, compiled where it is not kept."""
        key = digest(launch, target)
        found = self._reports.get(key)
        if found is None:
            found = self._reports[key] = examine(launch, target)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    print(json.dumps([key, asdict(found)]), file=file)
        # the same code may have belonged to another case
        return replace(found, case=describe(launch), bounded=launch.case.bounded)


def digest(launch: Launch, target: str) -> str:
    """What decides about a variant's code: the source of the kernel and of all that it calls, its
    specialisation, the target and the compiler. Where it stands in its file does not, which
    Triton's own key counts too.
    """
    sources = sorted(set(_sources(launch.function, set())))
    known = triton.__version__, COUNTED, target, sources, launch.key
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _sources(function: Any, seen: set[int]) -> Iterator[str]:
    """The text of a kernel, and of every function and constant of ours that it names."""
    inner = getattr(function, "fn", function)
    if id(inner) in seen:
        return
    seen.add(id(inner))
    yield inspect.getsource(inner)
    for name in inner.__code__.co_names:
        value = inner.__globals__.get(name)
        ours = getattr(getattr(value, "fn", value), "__module__", "") or ""
        if hasattr(value, "fn") and ours.startswith("kernels."):
            yield from _sources(value, seen)
        elif isinstance(value, (int, float, str, tuple)) or hasattr(value, "value"):
            yield f"{name} = {getattr(value, 'value', value)!r}"
