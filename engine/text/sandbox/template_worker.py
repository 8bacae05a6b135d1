"""The child process that renders chat templates (see engine/text/sandbox/template.py).

It imports jinja2 and nothing of the engine. Run it as a script, with the bytes of address space
that it may use and its parent's process id; it reads one request per line and writes one answer per
line. Where the system can, it ends with its parent and cannot start a process (`confine`).
"""

from __future__ import annotations

import sys

# Python puts a script's folder first on the path: its files must not shadow packages
sys.path.pop(0)

import contextlib  # noqa: E402
import ctypes  # noqa: E402
import datetime  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import signal  # noqa: E402
import struct  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

CPU_SECONDS = 30  # of one render, should the parent not be there to stop it

# Linux: prctl(2), seccomp(2), and per machine its audit number and the system calls that start a
# process: clone, fork, vfork, execve, execveat, clone3
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
STARTS = {
    "x86_64": (0xC000003E, (56, 57, 58, 59, 322, 435)),
    "aarch64": (0xC00000B7, (220, 221, 281, 435)),
}
# classic BPF: load a word, jump if equal, jump if at least, return; and what a filter may return
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM


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


def confine(memory_bytes: int, parent: int) -> None:
    """Bound this process's memory, end it with its parent, and refuse it to start others: as far
    as the system can.
    """
    # Windows has no limits; only the time is bounded there
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # root is not bound by it
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it ended before the line above
        refuse_processes(prctl)


def refuse_processes(prctl: Any) -> None:
    """Make the kernel refuse every system call that starts a process or a program (seccomp)."""
    if platform.machine() not in STARTS:
        return
    audit, calls = STARTS[platform.machine()]
    checks = [(IF_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    steps = [
        (LOAD, 0, 0, 4),  # the machine that the call is for
        (IF_EQUAL, 0, len(calls) + 3, audit),
        (LOAD, 0, 0, 0),  # the call's number
        (IF_AT_LEAST, len(calls) + 1, 0, 0x40000000),  # x32 has numbers of its own
        *checks,
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(head), 0, 0)


def allow_cpu(seconds: int) -> None:
    """End this process when it has used so many more seconds of a CPU."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    confine(int(sys.argv[1]), int(sys.argv[2]))
    sandbox = environment()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    print("{}", flush=True)
    for line in sys.stdin:
        allow_cpu(CPU_SECONDS)
        print(json.dumps(answer(sandbox, line)), flush=True)


if __name__ == "__main__":
    main()
