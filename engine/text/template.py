"""Chat templates: the model's own recipe for a dialogue, rendered in a process that can be stopped.

A template is code from whoever made the checkpoint. It runs in jinja2's immutable sandbox, in a
child process (engine/text/template_worker.py) that knows nothing of the model and is killed when
its time is over: no loop, no huge power and no doubling string can hang or exhaust this one. Names
and filters are those of transformers' apply_chat_template.
"""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue

from engine.errors import BadCheckpoint, TemplateError

# a render takes milliseconds; a document of a million tokens adds one second
RENDER_SECONDS = 2.0
START_SECONDS = 30.0  # Python and jinja2 on a loaded machine
MEMORY_BYTES = 1 << 30  # address space of the child where the system can bound it
SPARE_CHARACTERS = 1 << 20  # what a template may write beyond four times its messages


class ChatTemplate:
    """One template with the special tokens that it may name. render() is all there is."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None):
        self.source, self.variables = source, dict(variables or {})
        self._worker: _Worker | None = None

    @classmethod
    def load(cls, folder: Path, settings: Mapping) -> "ChatTemplate | None":
        """The folder's chat_template.jinja, else chat_template in tokenizer_config.json (or several
        named ones).
        """
        variables = {}
        for name, value in settings.items():
            if name.endswith("_token"):
                text = value.get("content") if isinstance(value, Mapping) else value
                if isinstance(text, str):
                    variables[name] = text
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), variables)
        found = settings.get("chat_template")
        if isinstance(found, list):
            named = {
                t["name"]: t["template"]
                for t in found
                if isinstance(t, Mapping) and {"name", "template"} <= set(t)
            }
            found = named.get("default") or (
                next(iter(named.values())) if len(named) == 1 else None
            )
            if found is None:
                raise BadCheckpoint(
                    f"{folder / 'tokenizer_config.json'}: chat_template: found templates named "
                    f"{sorted(named)}, expected one named 'default'"
                )
        if found is None:
            return None
        if not isinstance(found, str):
            raise BadCheckpoint(
                f"{folder / 'tokenizer_config.json'}: chat_template: found {type(found).__name__}, "
                "expected text or a list of named templates"
            )
        return cls(found, variables)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> str:
        """The dialogue as the model's text; messages are {"role": ..., "content": ...}.

        Raises TemplateError where the template is not valid, refuses the messages, or takes too
        much time or memory.
        """
        plain = json.dumps(
            {
                "template": self.source,
                "messages": [dict(m) for m in messages],
                "variables": {
                    **self.variables,
                    "add_generation_prompt": bool(add_generation_prompt),
                },
            }
        )
        if self._worker is None or not self._worker.alive:
            self._worker = _Worker()
        size = sum(len(str(m.get("content", ""))) for m in messages)
        try:
            answer = self._worker.ask(
                plain, RENDER_SECONDS + size / 2e6, 4 * size + SPARE_CHARACTERS
            )
        # a timeout, or Ctrl-C while waiting: the next render starts a new one
        except BaseException:
            self._worker.kill()
            self._worker = None
            raise
        if "error" in answer:
            raise TemplateError(f"the model's chat template {answer['error']}")
        return answer["text"]


class _Worker:
    """The child process and one line of JSON each way."""

    def __init__(self):
        script = Path(__file__).with_name("template_worker.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(MEMORY_BYTES)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
        except OSError as error:
            raise TemplateError(
                "the model's chat template needs a Python process of its own, which did not start: "
                f"{error}"
            ) from error
        self._lines: Queue = Queue()
        threading.Thread(
            target=_pump, args=(self._process.stdout, self._lines), daemon=True
        ).start()
        self.kill = weakref.finalize(self, _end, self._process)
        self._read(START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, request: str, seconds: float, most: int) -> dict:
        """The worker's answer to one request of at most `most` characters out, within `seconds`."""
        # Written beside the wait, since a child that hangs would not read a request that is larger
        # than the pipe.
        threading.Thread(
            target=_write, args=(self._process.stdin, f"{most} {request}\n"), daemon=True
        ).start()
        return self._read(seconds)

    def _read(self, seconds: float) -> dict:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            raise TemplateError(
                f"the model's chat template did not end within {seconds:.0f} s and was stopped"
            ) from None
        if not line:
            raise TemplateError(
                "the model's chat template ended its process (it may have asked for too much memory)"
            )
        return json.loads(line)


def _pump(stream, lines: Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _write(stream, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass  # the child is gone; the reader says so


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        try:
            stream.close()
        except OSError:
            pass
