"""Values of arguments: strict JSON, and the value that a text is by a parameter's JSON schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

ALL = frozenset("string number integer boolean null array object".split())
WORDS = {"True": "true", "False": "false", "None": "null"}  # as Jinja writes them
COMBINED = ("allOf", "anyOf", "oneOf")


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


# Python's own takes NaN and 1e999, which it then writes as no client reads them
DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def typed(text: str, key: str, parameters: Any) -> Any:
    """The value of a text that a model wrote for the parameter `key` of a function with this schema
    of its parameters. It is JSON where that is of a kind that the schema allows, else the text.
    """
    kinds = kinds_of(_schema(key, parameters), parameters)
    if kinds == {"string"}:
        return text
    try:
        value = DECODER.decode(WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    found = kinds_in(value)
    if isinstance(value, str) or not found & kinds:
        return text
    return int(value) if isinstance(value, float) and "number" not in kinds else value


def kinds_in(value: Any) -> set[str]:
    """JSON schema's names of what a value is."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value == int(value) else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def kinds_of(schema: Any, root: Any) -> set[str]:
    """The kinds of values that a schema allows as far as it names any: all where it names none."""
    found: set[str] = set()
    for part in _parts(schema, root):
        said = part.get("type")
        if "const" in part or isinstance(part.get("enum"), list):
            for value in part.get("enum", [part.get("const")]):
                found |= kinds_in(value)
        elif isinstance(said, (str, list)):
            found |= {kind for kind in ([said] if isinstance(said, str) else said) if kind in ALL}
        elif "properties" in part:
            found.add("object")
        if part.get("nullable") is True:
            found.add("null")
    return found or set(ALL)


def _schema(key: str, parameters: Any) -> Any:
    """The schema of one parameter; {} where none is said."""
    others: Any = {}
    for part in _parts(parameters, parameters):
        named = part.get("properties")
        if isinstance(named, Mapping) and key in named:
            return named[key]
        others = others or part.get("additionalProperties")
    return others


def _parts(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """A schema, what its $ref names within `root`, and what it is combined of."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in COMBINED:
            if isinstance(part.get(name), list):
                waiting += part[name]
        if isinstance(part.get("$ref"), str):
            waiting.append(_named(part["$ref"], root))


def _named(reference: str, root: Any) -> Any:
    """What a reference within a schema names (#/$defs/X); None where it names nothing there."""
    head, *steps = reference.split("/")
    found = root if head == "#" else None
    for step in steps:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
