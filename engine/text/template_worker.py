"""The child process that renders chat templates: imports jinja2 and nothing of the engine (see
engine/text/template.py).

Run as a script with the bytes of address space it may use; reads one request per line, writes one
answer per line.
"""

import sys

# this folder, which Python puts first for a script: its files must not pass for packages
sys.path.pop(0)

import datetime  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: transformers marks assistant tokens with it; here
    it is plain.
    """

    tags = {"generation"}

    def parse(self, parser):
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message):
    """What templates call to refuse messages."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """json.dumps: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(form):
    """The date and time now, as templates ask for it."""
    return datetime.datetime.now().strftime(form)


def environment():
    """The sandbox, as transformers sets it up."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


def render(sandbox, request, most):
    """The rendered text; ValueError past `most` characters."""
    written, size = [], 0
    for part in sandbox.from_string(request["template"]).generate(
        messages=request["messages"], **request["variables"]
    ):
        size += len(part)
        if size > most:
            raise ValueError(f"wrote more than {most} characters and was stopped")
        written.append(part)
    return "".join(written)


def answer(sandbox, line):
    """{"text": ...} or {"error": ...} for one request line: `most {json}`."""
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
    except Exception as error:  # whatever a template's code can raise is the template's failure
        return {"error": f"failed: {type(error).__name__}: {str(error)[:300]}"}


def main():
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        import resource

        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, ValueError, OSError):
        # Windows has no such limit; time bounds it there
        pass
    sandbox = environment()
    sys.stdin.reconfigure(encoding="utf-8")
    sys.stdout.reconfigure(encoding="utf-8")
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(sandbox, line)), flush=True)


if __name__ == "__main__":
    main()
