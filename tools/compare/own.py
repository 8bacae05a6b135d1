"""Methods that the table does not list: those of a file of one's own, and those that only the
engine's registry knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from engine.base.errors import EngineError, UsageError
from engine.methods.base import Method
from engine.methods.evict.shared.settings import Evicting
from engine.methods.omnikv.method import OmniKV
from engine.methods.registry import methods
from tools.compare.build import Entry, Facts, evicting, keeps_all, omnikv


def load(paths: Sequence[str]) -> dict[str, Entry]:
    """{name: Entry} of every named method that these files define. Raises UsageError where a file
    cannot be read or run, defines none, or takes the name of a method that there is.
    """
    taken = {name: cls for name, cls in methods().items() if cls.__module__.startswith("engine.")}
    found: dict[str, Entry] = {}
    for path in paths:
        classes = _classes(_module(path))
        if not classes:
            raise UsageError(
                f"--import: {path} defines no method, expected a class derived from Evicting, "
                "Budgeted or Method (docs/METHODS.md)"
            )
        for cls in classes:
            try:
                name = cls().name
            except Exception as error:
                raise _refused(path, error) from error
            if name in taken or name in found:
                raise UsageError(
                    f"--import: {path}: {cls.__name__} is called {name!r}, and there is a method "
                    "of this name: rename the class"
                )
            found[name] = entry(cls, f"of {Path(path).name}")
    return found


def digests(paths: Sequence[str]) -> dict[str, str]:
    """{file name: SHA-256 of its text}: answers of another text are another method's."""
    return {Path(path).name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


def entry(cls: type[Method], note: str = "of the engine's registry") -> Entry:
    """A row of the table for a method: its budget a share of the tokens where it has one. It reads
    every document itself, since it may read in its own way.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    if issubclass(cls, OmniKV):
        return Entry(note, omnikv(cls), keeps_all, group="others", reads="own")
    if issubclass(cls, Evicting):
        return evicting(note, cls, reads="own")
    if not fields & {"share", "tokens"}:
        return _without_budget(cls, note)

    def build(facts: Facts, share: float) -> Method:
        tokens = max(1, math.floor(share * facts.capacity))
        return cls(share=share) if "share" in fields else cls(tokens=tokens)  # type: ignore[call-arg]

    return Entry(note, build, keeps_all, group="others", reads="own", sparse=False)


def _without_budget(cls: type[Method], note: str) -> Entry:
    return Entry(
        note, lambda facts, share: cls(), budget=False, group="others", reads="own", sparse=False
    )


def _module(path: str) -> ModuleType:
    """The file, run as a module."""
    file = Path(path)
    name = f"imported_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if file.suffix != ".py" or spec is None or spec.loader is None:
        raise UsageError(f"--import: found {path}, expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _refused(path, error) from error
    return module


def _refused(path: str, error: Exception) -> UsageError:
    said = str(error) if isinstance(error, EngineError | OSError) else None
    said = said or f"{type(error).__name__}: {error}"
    return UsageError(f"--import: found {Path(path).name}: {said}")


def _classes(module: ModuleType) -> list[type[Method]]:
    """The named methods that a module itself defines, in the order of its text."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
        and vars(value).get("named", True)
    ]
