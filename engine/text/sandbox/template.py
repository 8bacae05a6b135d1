"""Chat templates: the model's format for a dialogue, rendered in a process that can be stopped.

A template is code written by whoever made the checkpoint. It runs in jinja2's immutable sandbox, in
a child process (engine/text/sandbox/template_worker.py) that knows nothing of the model and is
killed when its time is over. So no loop, no huge power and no doubling string can hang or exhaust
this process. Names and filters are those of transformers' apply_chat_template.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from engine.base.errors import BadCheckpoint, SettingError, TemplateError, UsageError
from engine.text.boundary import one_line, valid
from weights.jsonfile import inside, present, read_text, shown

# a render takes milliseconds; a document of a million tokens adds one second
RENDER_SECONDS = 2.0
START_SECONDS = 30.0  # Python and jinja2 on a loaded machine
MEMORY_BYTES = 1 << 30  # address space of the child where the system can bound it
TEMPLATE_LIMIT = 4 << 20  # bytes of a template; the longest on the hub have 20 KB
# Python, the loader and the clock of the child read these
KEPT_VARIABLES = frozenset(
    "PATH HOME LANG LC_ALL LC_CTYPE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "PYTHONHOME PYTHONDONTWRITEBYTECODE SYSTEMROOT".split()
)
BLOCKS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
READ = re.compile(r"(?<![.\w])[a-z][a-z0-9_]{0,63}\b(?!\s*\()")
# what a template is given with its messages, and the words of its language
RESERVED = frozenset(
    "messages tools documents add_generation_prompt and block break call continue elif else endfor "
    "endgeneration endif endmacro endset false filter for generation if import in include is loop "
    "macro namespace none not or raw recursive scoped self set true".split()
)
SPARE_CHARACTERS = 1 << 20  # a template may write four times its messages and this


class ChatTemplate:
    """One template, with the special tokens that it may name."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None):
        self.source, self.variables = source, dict(variables or {})
        self._worker: _Worker | None = None
        self._turn = threading.Lock()  # the child answers one thread at a time

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that stand in its expressions, without those that it is always given: what a caller
        may set. A name that it sets for itself is one of them; that it then has its own value.
        """
        code = (QUOTED.sub("''", block) for block in BLOCKS.findall(self.source))
        found = {name for block in code for name in READ.findall(block)}
        return frozenset(found - RESERVED - self.variables.keys())

    @classmethod
    def load(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
        """Load a model folder's template; None if it has none.

        chat_template.jinja wins over `settings` (tokenizer_config.json). Raises as `of`.
        """
        path = folder / "chat_template.jinja"
        if present(path):
            source = read_text(inside(folder, path.name), TEMPLATE_LIMIT)
            return cls(source, _special_tokens(settings))
        return cls.of(settings, folder / "tokenizer_config.json")

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: Path) -> ChatTemplate | None:
        """The template in tokenizer settings, one or a list of named ones; None if there is none.

        where: the file, for messages. Raises BadCheckpoint if it is neither.
        """
        found = settings.get("chat_template")
        if isinstance(found, list):
            found = _choose_named(found, where)
        if found is None:
            return None
        if not isinstance(found, str):
            raise BadCheckpoint(
                f"{where}: chat_template: found {type(found).__name__}, "
                "expected text or a list of named templates"
            )
        if len(found) > TEMPLATE_LIMIT:
            raise BadCheckpoint(
                f"{where}: chat_template: found {len(found)} characters, expected at most "
                f"{TEMPLATE_LIMIT}"
            )
        return cls(found, _special_tokens(settings))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a dialogue as the model's text; messages are {"role": ..., "content": ...}. tools:
        the functions that the model may call, as transformers' apply_chat_template takes them.
        more: variables among `names`.

        Raises TemplateError if the template is not valid, refuses the messages, or takes too much
        time or memory.
        """
        variables: dict[str, Any] = {**(more or {}), **self.variables}
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        if tools:
            variables["tools"] = checked_messages(tools)
        request = json.dumps(
            {
                "template": self.source,
                "messages": checked_messages(messages),
                "variables": variables,
            }
        )
        size = sum(len(str(m.get("content", ""))) for m in messages)
        calls = [m["tool_calls"] for m in messages if "tool_calls" in m]
        size += len(json.dumps([tools, calls])) if tools or calls else 0
        with self._turn:
            answer = self._answer(request, RENDER_SECONDS + size / 2e6, 4 * size + SPARE_CHARACTERS)
        if "error" in answer:
            raise TemplateError(one_line(f"the model's chat template {answer['error']}"))
        try:
            return valid(answer["text"], "the model's chat template's output")
        except UsageError as error:
            raise TemplateError(str(error)) from None

    def _answer(self, request: str, seconds: float, max_characters: int) -> dict[str, str]:
        """The child's answer to one request. Linux ends a child with the thread that started it, a
        thread of some pool perhaps: then one more is started, once.
        """
        while True:
            old = self._worker is not None and self._worker.alive
            if not old:
                self._worker = _Worker()
            assert self._worker is not None
            try:
                return self._worker.ask(request, seconds, max_characters)
            # a timeout, or Ctrl-C while waiting: the next render starts a new child
            except BaseException as error:
                self._worker.kill()
                self._worker = None
                if not (old and isinstance(error, _ChildEnded)):
                    raise


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a template may name (bos_token and others), by their names."""
    variables = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                variables[name] = text
    return variables


def _choose_named(templates: list[Any], where: Path) -> Any:
    """Return the template named "default", or the only one."""
    named = {
        t["name"]: t["template"]
        for t in templates
        if isinstance(t, Mapping) and isinstance(t.get("name"), str) and "template" in t
    }
    found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if found is None:
        raise BadCheckpoint(
            f"{where}: chat_template: found templates named {shown(sorted(named))}, "
            "expected one named 'default'"
        )
    return found


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as dicts. Raises SettingError for anything but a sequence of mappings that JSON can
    write.
    """
    if isinstance(messages, Iterable) and not isinstance(messages, (str, bytes, Mapping)):
        listed = list(messages)
        if all(isinstance(message, Mapping) for message in listed):
            try:
                json.dumps(plain := [dict(message) for message in listed])
                return plain
            except (TypeError, ValueError, RecursionError) as error:
                raise SettingError(f"messages: found {shown(listed)}: {error}") from error
    raise SettingError(
        f'messages: found {shown(messages)}, expected a list of {{"role": ..., "content": ...}}'
    )


def child_environment() -> dict[str, str]:
    """The variables that the child needs, and no others: tokens and keys of this process are not
    for a stranger's template. Nor are packages from the working directory.
    """
    found = {name: value for name, value in os.environ.items() if name.upper() in KEPT_VARIABLES}
    here = os.path.realpath(os.curdir)
    paths = [p for p in sys.path if p and os.path.realpath(p) != here]
    return {**found, "PYTHONPATH": os.pathsep.join(paths)}


class _ChildEnded(TemplateError):
    """The child ended without an answer."""


class _Worker:
    """The child process. It reads and answers one line of JSON per request."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("template_worker.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(MEMORY_BYTES), str(os.getpid())],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
        except OSError as error:
            raise TemplateError(
                "the model's chat template is rendered in a separate Python process, which did not "
                f"start: {error}"
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._lines: Queue[str] = Queue()
        threading.Thread(
            target=_pump, args=(self._process.stdout, self._lines), daemon=True
        ).start()
        self.kill = weakref.finalize(self, _end, self._process)
        self._read(START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def ask(self, request: str, seconds: float, max_characters: int) -> dict[str, str]:
        """Return the child's answer to one request, {"text": ...} or {"error": ...}.

        Raises TemplateError after `seconds` or if the child has ended. The child stops a template
        that writes more than `max_characters`.
        """
        # Written by a thread, because a child that hangs would not read a request that is larger
        # than the pipe.
        threading.Thread(
            target=_write, args=(self._stdin, f"{max_characters} {request}\n"), daemon=True
        ).start()
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, str]:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            raise TemplateError(
                f"the model's chat template did not end within {seconds:.0f} s and was stopped"
            ) from None
        if not line:
            raise _ChildEnded(
                "the model's chat template ended its process "
                "(it may have asked for too much memory)"
            )
        return json.loads(line)


def _pump(stream: IO[str], lines: Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _write(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass  # the child has ended; the reader reports it


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
