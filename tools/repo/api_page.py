"""Write docs/API.md from the public signatures and docstrings.

`--check` writes nothing and exits 1 where the page is stale; tests/test_docs.py does the same. A
class shows its whole docstring, a member the first paragraph of its own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import engine
from engine.base.errors import EngineError
from engine.methods.base import Method

PAGE = Path(__file__).resolve().parents[2] / "docs/API.md"
WIDTH = 100
STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
HEAD = """
# API

Written by `python -m tools.repo.api_page` from signatures and docstrings; do not edit it by hand.

The public names are those of `from engine import ...`: `LLM`, `AsyncLLM`, `SamplingParams`,
`EngineError` and the methods. The other classes here are what their calls return. Everything else
may move. For runnable programs see [examples/](../examples/README.md).
"""
# (section, sentence under it, classes as module:name)
SECTIONS = (
    (
        "Models and sessions",
        "",
        (
            "engine.llm:LLM",
            "engine.asynchronous.llm:AsyncLLM",
            "engine.load.options:Options",
            "engine.session.session:Session",
            "engine.batch.batch:Batch",
        ),
    ),
    ("Sampling", "", ("engine.sampling.sampler:SamplingParams",)),
    (
        "What calls return",
        "",
        (
            "engine.session.results:Completion",
            "engine.session.generate:Piece",
            "engine.session.generate:GenerationStats",
            "engine.forward.scores:PromptScores",
            "engine.runner.state:SessionStats",
            "engine.load.memory:Plan",
            "engine.session.check:Report",
        ),
    ),
)
METHODS = """
Methods are frozen values: `LLM(..., method=OmniKV(tokens=2048))`, or for one session
`llm.session(method=...)` and `session.set_method(...)`. Unknown fields raise `TypeError`,
values out of range `SettingError`. What each method does, and where it comes from, is on
[the page of methods](../docs/METHODS.md).
"""
ERRORS = """
All derive from `EngineError`; each message says what was found, what was expected and what to do.
"""


def signature(name: str, function: Callable[..., object]) -> str:
    """`name(arguments) -> result` as one line, or one argument a line where that is too long."""
    found = inspect.signature(function)
    shown: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            if not any(text.startswith("*") for text in shown):
                shown.append("*")
        text = STARS.get(parameter.kind.name, "") + parameter.name
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            space = " " if ":" in text else ""
            text += f"{space}={space}{default(parameter.default)}"
        shown.append(text)
    returns = found.return_annotation
    tail = (
        "" if returns in (inspect.Signature.empty, None, "None") else f" -> {annotation(returns)}"
    )
    line = f"{name}({', '.join(shown)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in shown), f"){tail}"])


def annotation(value: object) -> str:
    """A type as the source spells it."""
    return value if isinstance(value, str) else inspect.formatannotation(value)


def default(value: object) -> str:
    """A default value without a memory address: dataclass factories and objects by their type."""
    if isinstance(value, str):
        return f'"{value}"'
    text = repr(value)
    return "..." if " object at 0x" in text or text == "<factory>" else text


def prose(text: str) -> str:
    """Docstring paragraphs wrapped at the page's width, as Markdown takes them."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        words = " ".join(paragraph.split())
        pieces = re.split(r"(`[^`]*`)", words)  # what stands in backticks is code already
        pieces[::2] = [re.sub(r"([*<])", r"\\\1", piece) for piece in pieces[::2]]
        paragraphs.append(
            textwrap.fill("".join(pieces), WIDTH, break_long_words=False, break_on_hyphens=False)
        )
    return "\n\n".join(paragraphs)


def members(cls: type) -> Iterator[tuple[str, object]]:
    """(name, function or property) of the public members that a class itself defines."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, (property, classmethod))
        ):
            yield name, member


def class_text(cls: type, level: str = "###", with_members: bool = True) -> Iterator[str]:
    """A class's part of the page, block by block."""
    yield f"{level} {cls.__name__}"
    yield f"```python\n{signature(cls.__name__, cls)}\n```"
    yield prose(cls.__doc__ or "")
    for name, member in members(cls) if with_members else ():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        shown, doc = f"{cls.__name__}.{name}", inspect.cleandoc(function.__doc__ or "")
        first = doc.split("\n\n")[0]
        if isinstance(member, property):
            yield prose(f"`{shown}` (property): {first}")
            continue
        yield f"```python\n{signature(shown, getattr(cls, name))}\n```"
        yield prose(first)


def page() -> str:
    """The whole page."""
    blocks = [HEAD.strip()]
    for title, sentence, names in SECTIONS:
        blocks += [f"## {title}", sentence]
        for name in names:
            module, _, cls = name.partition(":")
            blocks += class_text(getattr(importlib.import_module(module), cls))
    blocks += ["## Methods", METHODS.strip()]
    public = [getattr(engine, name) for name in engine.__all__]
    public = [cls for cls in public if isinstance(cls, type) and issubclass(cls, Method)]
    blocks += ["### Settings that methods share"]
    blocks += [f"- **`{cls.__name__}`**: {one_line(cls)}" for cls in families(public)]
    for cls in public:
        blocks += class_text(cls, with_members=False)
        shared = [f"`{base.__name__}`" for base in families([cls])]
        if shared:
            blocks.append(f"Shared settings: {', '.join(shared)}.")
    blocks += ["## Errors", ERRORS.strip()]
    errors = importlib.import_module("engine.base.errors")
    for name in sorted(errors.__all__):
        cls = getattr(errors, name)
        if issubclass(cls, EngineError):
            blocks.append(f"- **`{name}`**: {one_line(cls)}")
    text = "\n\n".join(block for block in blocks if block)
    return "\n".join(wrapped_item(line) for line in text.splitlines()) + "\n"


def families(classes: list[type]) -> list[type]:
    """Classes of engine.methods that these derive from and that no user makes, each once."""
    found = [base for cls in classes for base in cls.__mro__[1:] if base is not Method]
    inside = [base for base in found if base.__module__.startswith("engine.methods")]
    return list(dict.fromkeys(base for base in inside if base.__name__ not in engine.__all__))


def one_line(cls: type) -> str:
    """A class's docstring on one line."""
    return " ".join(prose(cls.__doc__ or "").split())


def wrapped_item(line: str) -> str:
    """A list item longer than the page, wrapped with its indent; any other line as it is."""
    if not line.startswith("- ") or len(line) <= WIDTH:
        return line
    return textwrap.fill(
        line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is current."""
    parser = argparse.ArgumentParser(prog="python -m tools.repo.api_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is stale")
    options = parser.parse_args(arguments)
    text = page()
    if options.check:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE}: {'current' if current else 'stale: run python -m tools.repo.api_page'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
