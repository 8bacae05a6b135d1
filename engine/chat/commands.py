"""What a person can type after a slash: each command is a function of the chat and the rest of the
line. Commands print on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import SettingError, UsageError
from engine.base.figures import brief
from engine.chat.evidence import run_check, run_sources, waits
from engine.chat.talk import keeping
from engine.chat.talk.chat import Chat
from engine.cli.figures import (
    all_stats_text,
    full_attention_cost,
    memory_text,
    plan_text,
    reading_time,
    stats_text,
)
from engine.cli.model_flags import setting
from engine.cli.settings import exact_with, method_with
from engine.methods.exact import Exact
from engine.methods.registry import methods
from engine.sampling.params import SamplingParams
from engine.terminal.documents import longest_document, read_document

LEAVE = object()  # what /quit returns
SPELLINGS = {"temp": "temperature", "repeat_penalty": "repetition_penalty", "n": "max_tokens"}
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
WHOLE = "a whole number"
EXPECTED = {
    "max_tokens": WHOLE,
    "top_k": WHOLE,
    "logprobs": WHOLE,
    "seed": "a whole number or none",
    "stop_token_ids": "token ids such as 2 128009",
    "ignore_eos": "on or off",
}
SWITCH = {
    "true": True,
    "on": True,
    "1": True,
    "false": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True)
class Command:
    """A command: its names, what follows them, one line of help, and what it does."""

    names: tuple[str, ...]
    arguments: str
    text: str
    call: Callable[[Chat, str], object]


def run(chat: Chat, line: str) -> object:
    """Run the command in a line that begins with a slash; return LEAVE where the chat must end.

    Raises UsageError for an unknown command and for arguments that a command does not take.
    """
    name, _, rest = line[1:].strip().partition(" ")
    for command in COMMANDS:
        if name.lower() in command.names:
            return command.call(chat, rest.strip())
    near = difflib.get_close_matches(name, [n for c in COMMANDS for n in c.names], 1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
    raise UsageError(
        f"/{name}: no such command; {hint} (to send a message that begins with a slash, type //)"
    )


def _help(chat: Chat, rest: str) -> None:
    rows = [
        ("/" + " /".join(c.names) + (f" {c.arguments}" if c.arguments else ""), c.text)
        for c in COMMANDS
    ]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {text}" for left, text in rows]
    lines += [
        'To send several lines, end each with \\, or write them between """ and """.',
        "Ctrl-C stops an answer, a reading or a command and keeps what is done; pressed twice, it "
        "leaves. "
        "Ctrl-D leaves.",
    ]
    chat.display.line("\n".join(lines))


def _quit(chat: Chat, rest: str) -> object:
    return LEAVE


def _reset(chat: Chat, rest: str) -> None:
    if rest not in ("", "all"):
        raise UsageError(f"/reset: found {rest!r}, expected nothing or all")
    talk, before = chat.conversation, [d.name for d in chat.conversation.documents]
    talk.reset() if rest else talk.rewind()
    system = "the system prompt stays" if talk.system is not None else ""
    if len(talk.session) or talk.opened:
        held = ", ".join(d.name for d in talk.documents) or "the document"
        stay, them = ("stay", "them") if len(talk.documents) > 1 else ("stays", "it")
        stays = f"{held} {stay} read (/reset all drops {them})"
    else:
        stays = "the context is empty"
    parts = [stays, system, _dropped(before, [d.name for d in talk.documents])]
    chat.display.line("a new conversation begins: " + "; ".join(part for part in parts if part))


def _dropped(before: list[str], kept: list[str]) -> str:
    """What is said of documents that a new conversation has no more."""
    gone = before[len(kept) :]
    are, them = ("are", "them") if len(gone) > 1 else ("is", "it")
    return f"{', '.join(gone)} {are} no longer read: /read {them} again" if gone else ""


def _system(chat: Chat, rest: str) -> None:
    if not rest:
        chat.display.line(f"system prompt: {chat.conversation.system or 'none'}")
        return
    before, chat.conversation.system = chat.conversation.system, rest
    gone = _dropped([d.name for d in chat.conversation.documents], [])
    try:
        chat.conversation.reset()
    except Exception:
        chat.conversation.system = before
        raise
    chat.display.line(
        "system prompt set; a new conversation begins, since the prompt stands at its start"
        + (f"; {gone}" if gone else "")
    )


def _retry(chat: Chat, rest: str) -> None:
    chat.retry()


def _read(chat: Chat, rest: str) -> None:
    if not rest:
        raise UsageError("/read: found nothing, expected a file, such as /read notes.txt")
    found = read_document(rest, longest_document(chat.llm.max_context))
    name = Path(rest.strip("'\"")).name
    if found.note:
        chat.display.line(f"{name}: {found.note}")
    chat.read(found.text, name)


def _save(chat: Chat, rest: str) -> None:
    keeping.save(chat, keeping.named(rest, "save"))


def _load(chat: Chat, rest: str) -> None:
    keeping.load(chat, keeping.named(rest, "load"))


# ---------------------------------------------------------------- figures


def _stats(chat: Chat, rest: str) -> None:
    session = chat.conversation.session
    if rest not in ("", "all"):
        raise UsageError(f"/stats: found {rest!r}, expected nothing or all")
    chat.display.line(
        all_stats_text(session, chat.last)
        if rest
        else stats_text(chat.llm.planner, session, chat.last)
    )


def _plan(chat: Chat, rest: str) -> None:
    chat.display.line(plan_text(chat.llm.planner))


def _memory(chat: Chat, rest: str) -> None:
    chat.display.line(memory_text(chat.llm.planner, chat.conversation.session))


# ---------------------------------------------------------------- settings


def _set(chat: Chat, rest: str) -> None:
    key, _, value = rest.partition(" ")
    if not key:
        chat.display.line("\n".join(f"{f} = {getattr(chat.params, f)!r}" for f in sorted(FIELDS)))
        return
    chat.sample_with(changed(chat.params, key, value.strip()))
    name = _field(key)
    chat.display.line(f"{name} = {getattr(chat.params, name)!r}")


def _field(key: str) -> str:
    name = key.lower().strip("-").replace("-", "_")
    name = SPELLINGS.get(name, name)
    if name not in FIELDS:
        near = difflib.get_close_matches(name, [*FIELDS, *SPELLINGS], 1)
        raise UsageError(
            f"/set: found {key!r}, expected one of {', '.join(sorted(FIELDS))}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return name


def changed(params: SamplingParams, key: str, value: str) -> SamplingParams:
    """Return SamplingParams with one field set from text. Raises UsageError or SettingError."""
    name = _field(key)
    try:
        settings = {name: _value(name, value)}
    except (ValueError, KeyError):
        expected = EXPECTED.get(name, "a number")
        raise SettingError(f"{name}: found {value!r}, expected {expected}") from None
    return dataclasses.replace(params, **settings)


def _value(name: str, text: str) -> Any:
    """Parse the value of a field of SamplingParams. Raises ValueError or KeyError."""
    none = text.lower() in ("", "none")
    if name == "seed":
        return None if none or text.lower() == "random" else int(text)
    if name == "stop":
        if none:
            return ()
        # \\n may be typed for a line's end
        return (text.encode().decode("unicode_escape") if text.isascii() else text,)
    if name == "stop_token_ids":
        return tuple(int(part) for part in text.replace(",", " ").split())
    if name == "ignore_eos":
        return SWITCH[text.lower()]
    return int(text) if EXPECTED.get(name) == WHOLE else float(text)


def _method(chat: Chat, rest: str) -> None:
    session, (name, *words) = chat.conversation.session, rest.split() or [""]
    name = name.lower()
    if not name:
        chat.display.line(brief(session.method))
        return
    if name not in (names := [*methods(), "exact"]):
        chat.display.line(f"the methods are {', '.join(names)}")
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"/method: found {name[:80]!r}, expected one of these names{hint}")
    try:
        settings = dict(setting(word) for word in words)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"/method: {error}") from None
    # without settings, the method that the chat began with comes back as it was
    first = chat.llm.method
    inner = first.method if isinstance(first, Exact) and name != "exact" else first
    if not settings and name == getattr(inner, "name", None):
        method = inner
    elif name == "exact":
        method = exact_with(session.method, settings)
    else:
        method = method_with(name, settings, {})
    again = session.reads_again(method)
    if again:
        chat.display.line(
            f"{session.method.name} has freed rows that {method.name} needs: {again:,} tokens are "
            f"read again{reading_time(session, again)}"
        )
    elif freed := session.frees(method):
        chat.display.line(
            f"{method.name} frees the rows that it does not keep of {freed:,} tokens: another "
            f"method will read them again{reading_time(session, freed)}; forget=False keeps them"
        )
    # one that sums attention runs the queries once more: between two chunks it can be stopped
    with chat.interrupts:
        session.set_method(method, chat.interrupts.watched(chat.display.reading()))
    done = f"{again:,} tokens were read again" if again else "nothing is read again"
    if getattr(method, "scored", False) and not again:
        done = "the queries ran once more to sum their attention"
    length = len(session)
    if name == "full" and length:
        done += f"; {full_attention_cost(chat.llm.planner, length, chat.last, chat.last_bytes)}"
    if found := waits(session):
        done += f"; full attention until then: {found}"
    chat.display.line(f"{brief(session.method)}: {done}")


COMMANDS = (
    Command(("help", "?"), "", "list the commands", _help),
    Command(("quit", "exit", "bye"), "", "leave the chat", _quit),
    Command(
        ("reset", "clear"),
        "[all]",
        "begin a new conversation behind the documents that were read; all: with nothing read",
        _reset,
    ),
    Command(("system",), "[TEXT]", "set the system prompt and begin anew; alone: show it", _system),
    Command(
        ("retry",),
        "",
        "answer the last message again; after an interruption, read on and answer",
        _retry,
    ),
    Command(
        ("read",),
        "FILE",
        "read a document into the conversation: text, HTML, PDF, DOCX, ODT or EPUB",
        _read,
    ),
    Command(("save",), "FILE", "write the conversation to a file", _save),
    Command(("load",), "FILE", "go on with a saved conversation; nothing is read again", _load),
    Command(
        ("sources",),
        "[N|FILE.html]",
        "show the passages that the last answer read most, or write them as a page",
        run_sources,
    ),
    Command(
        ("check",),
        "[N]",
        "compare the last N steps with full attention over the same K and V",
        run_check,
    ),
    Command(
        ("stats", "tps"),
        "[all]",
        "show tokens, speed, memory and what attention reads; all: every counter",
        _stats,
    ),
    Command(("plan",), "", "show the layer plan and the memory plan", _plan),
    Command(("memory",), "", "show the memory that was planned and that is held", _memory),
    Command(
        ("set",),
        "[KEY VALUE]",
        "change a sampling setting (temp, top_p, max_tokens, seed, stop ...); alone: show all",
        _set,
    ),
    Command(
        ("method", "attention"),
        "[NAME ...]",
        "go on with full, omnikv, exact (what is on drafts for full attention) or a baseline "
        "(/method quest page=32); alone: show the method",
        _method,
    ),
)
