"""From names to methods: the choices of a command line."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import engine.methods
from engine.base.errors import SettingError
from engine.methods.base import Method


def methods() -> dict[str, type[Method]]:
    """{name: class} of every named method in engine/methods (Method.named), sorted by name."""
    for found in pkgutil.walk_packages(engine.methods.__path__, "engine.methods."):
        importlib.import_module(found.name)
    classes: dict[str, type[Method]] = {}
    todo: list[type[Method]] = [Method]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if vars(cls).get("named", True):
            classes[cls().name] = cls
    return dict(sorted(classes.items()))


def make(name: str, settings: dict[str, Any], flag_owner: str = "omnikv") -> Method:
    """The method of this name with settings {field: value}.

    flag_owner: method named in the error when a setting does not belong to this one. Raises
    SettingError for an unknown name or field.
    """
    known = methods()
    if name not in known:
        raise SettingError(f"method: found {name!r}, expected one of {', '.join(known)}")
    fields = {field.name for field in dataclasses.fields(known[name])}
    for field in settings:
        if field not in fields:
            raise SettingError(
                f"{field}: belongs to --method {flag_owner}, but --method {name} was given"
            )
    return known[name](**settings)
