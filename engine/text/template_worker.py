"""The child process that renders chat templates (see engine/text/template.py).

It imports jinja2 and nothing of the engine. Run it as a script, with the bytes of address space
that it may use; it reads one request per line and writes one answer per line.
"""

from __future__ import annotations

import sys

# Python puts a script's folder first on the path: its files must not shadow packages
sys.path.pop(0)

import datetime  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, with which transformers marks assistant tokens.

    Here it only renders its content.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Refuse the messages; templates call this."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does; jinja2's filter of this name escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(pattern: str) -> str:
    """Format the current date and time."""
    return datetime.datetime.now().strftime(pattern)


def environment() -> ImmutableSandboxedEnvironment:
    """Make the sandbox as transformers sets it up."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


def render(
    sandbox: ImmutableSandboxedEnvironment, request: dict[str, Any], max_characters: int
) -> str:
    """Render a request's template; ValueError if it writes more than `max_characters`."""
    written, size = [], 0
    for part in sandbox.from_string(request["template"]).generate(
        messages=request["messages"], **request["variables"]
    ):
        size += len(part)
        if size > max_characters:
            raise ValueError(f"wrote more than {max_characters} characters and was stopped")
        written.append(part)
    return "".join(written)


def answer(sandbox: ImmutableSandboxedEnvironment, line: str) -> dict[str, str]:
    """Return {"text": ...} or {"error": ...} for one request line, `max_characters {json}`."""
    most, _, request = line.partition(" ")
    try:
        return {"text": render(sandbox, json.loads(request), int(most))}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": f"is not valid: {error.message} (line {error.lineno})"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"is not safe: {error}"}
    except jinja2.exceptions.TemplateError as error:
        return {"error": f"refuses: {error}"}
    except MemoryError:
        return {"error": "asked for too much memory and was stopped"}
    except Exception as error:  # a template's code can raise anything; it is the template's failure
        return {"error": f"failed: {type(error).__name__}: {str(error)[:300]}"}


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        import resource

        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, ValueError, OSError):
        # Windows has no such limit; only the time is bounded there
        pass
    sandbox = environment()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(sandbox, line)), flush=True)


if __name__ == "__main__":
    main()
