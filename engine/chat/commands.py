"""What can be typed after a slash. Each command is a function of the chat and the rest of the line;
all print on stderr.
"""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.chat.display import resident_bytes
from engine.chat.evidence import run_check, sources_file
from engine.errors import SettingError, UsageError
from engine.methods.omnikv.settings import OmniKV
from engine.methods.registry import make, methods
from engine.plan.layers import tail_start
from engine.sampling import SamplingParams
from engine.units import brief, clock, count, human

LEAVE = object()  # what /quit returns
SPELLINGS = {"temp": "temperature", "repeat_penalty": "repetition_penalty", "n": "max_tokens"}
FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True)
class Command:
    """A command's names, what follows it, one line of help, and what it does."""

    names: tuple[str, ...]
    arguments: str
    text: str
    call: Callable


def run(chat, line: str):
    """Do what a line that begins with a slash says; LEAVE where it says to leave. Raises UsageError
    for what it cannot mean.
    """
    name, _, rest = line[1:].strip().partition(" ")
    for command in COMMANDS:
        if name.lower() in command.names:
            return command.call(chat, rest.strip())
    near = difflib.get_close_matches(name, [n for c in COMMANDS for n in c.names], 1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists them"
    raise UsageError(
        f"/{name}: no such command; {hint} (a message that begins with a slash: type // )"
    )


def _help(chat, rest: str):
    rows = [
        ("/" + " /".join(c.names) + (f" {c.arguments}" if c.arguments else ""), c.text)
        for c in COMMANDS
    ]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {text}" for left, text in rows]
    chat.display.line(
        "\n".join(
            [
                *lines,
                'Several lines: end a line with \\, or write them between """ and """.',
                "Ctrl-C stops an answer or a reading and keeps what is done; twice leaves. Ctrl-D leaves.",
            ]
        )
    )


def _quit(chat, rest: str):
    return LEAVE


def _reset(chat, rest: str):
    chat.conversation.reset()
    chat.display.line(
        "a new conversation; nothing is remembered"
        + (" but the system prompt" if chat.conversation.system is not None else "")
    )


def _system(chat, rest: str):
    if not rest:
        chat.display.line(f"system prompt: {chat.conversation.system or 'none'}")
        return
    before, chat.conversation.system = chat.conversation.system, rest
    try:
        chat.conversation.reset()
    except Exception:
        chat.conversation.system = before
        raise
    chat.display.line(
        "system prompt set; a new conversation begins, since it stands before everything else"
    )


def _retry(chat, rest: str):
    chat.retry()


def _read(chat, rest: str):
    if not rest:
        raise UsageError("/read: found nothing, expected a file: /read notes.txt")
    chat.read(read_text(rest), Path(rest).name)


def read_text(name: str) -> str:
    """A file's text, nothing in it changed but a byte order mark dropped. UsageError where it
    cannot be read or is not UTF-8.
    """
    path = Path(name.strip("'\"")).expanduser()
    try:
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def decoded(data: bytes, name: str) -> str:
    """Bytes as UTF-8 text. UsageError naming the first byte that is not, and what to do: text is
    never changed silently.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: found byte 0x{data[error.start]:02x} at {error.start}, expected UTF-8 text; "
            f"convert it first (iconv -f latin1 -t utf-8)"
        ) from error


def stats_text(chat) -> str:
    """The session's counters and the last answer's figures, aligned."""
    data = dict(chat.conversation.session.stats.to_dict())
    if chat.last is not None:
        data |= {f"last answer: {name}": value for name, value in chat.last.to_dict().items()}
    width = max(len(name) for name in data)
    return "\n".join(
        f"{name.replace('_', ' '):<{width}}  {_figure(name, value)}" for name, value in data.items()
    )


def _figure(name: str, value) -> str:
    if "bytes" in name and isinstance(value, (int, float)):
        return human(value)
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _stats(chat, rest: str):
    chat.display.line(stats_text(chat))


def _plan(chat, rest: str):
    chat.display.line(str(chat.llm.plan()))


def _memory(chat, rest: str):
    plan, lines = chat.llm.plan(), []
    for name, size in plan.to_dict()["items"].items():
        lines.append((f"planned: {name}", human(size)))
    lines.append(("planned: total", human(plan.to_dict()["total_bytes"])))
    for name, size in chat.conversation.session.stats.to_dict().items():
        if name.endswith("_bytes"):
            lines.append((f"held: {name.removesuffix('_bytes').replace('_', ' ')}", human(size)))
    if (held := resident_bytes()) is not None:
        lines.append(("this process, RAM", human(held)))
    width = max(len(name) for name, _ in lines)
    chat.display.line("\n".join(f"{name:<{width}}  {size:>10}" for name, size in lines))


def _set(chat, rest: str):
    key, _, value = rest.partition(" ")
    if not key:
        chat.display.line("\n".join(f"{f} = {getattr(chat.params, f)!r}" for f in sorted(FIELDS)))
        return
    chat.params = changed(chat.params, key, value.strip())
    name = _field(key)
    chat.display.line(f"{name} = {getattr(chat.params, name)!r}")


def _field(key: str) -> str:
    name = SPELLINGS.get(
        key.lower().strip("-").replace("-", "_"), key.lower().strip("-").replace("-", "_")
    )
    if name not in FIELDS:
        near = difflib.get_close_matches(name, [*FIELDS, *SPELLINGS], 1)
        raise UsageError(
            f"/set: found {key!r}, expected one of {', '.join(sorted(FIELDS))}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return name


def changed(params: SamplingParams, key: str, value: str) -> SamplingParams:
    """SamplingParams with one field set from what was typed. Raises UsageError or SettingError."""
    name = _field(key)
    kinds = {
        "temperature": float,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
        "stop": str,
    }
    try:
        if name == "seed":
            found = None if value.lower() in ("", "none", "random") else int(value)
        elif name == "stop":
            found = (
                ()
                if value.lower() in ("", "none")
                else (value.encode().decode("unicode_escape") if value.isascii() else value,)
            )
        elif name == "stop_token_ids":
            found = tuple(int(part) for part in value.replace(",", " ").split())
        elif name == "ignore_eos":
            found = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[
                value.lower()
            ]
        else:
            found = kinds.get(name, int)(value)
    except (ValueError, KeyError):
        raise SettingError(f"{name}: found {value!r}, which is no value for it") from None
    return dataclasses.replace(params, **{name: found})


def _method(chat, rest: str):
    session, name = chat.conversation.session, rest.lower()
    if name not in methods():
        if rest:
            raise UsageError(f"/method: found {rest!r}, expected one of {', '.join(methods())}")
        chat.display.line(brief(session.method))
        return
    method = (chat.omnikv or OmniKV()) if name == "omnikv" else make(name, {})
    session.set_method(method)
    done = (
        "its attention was summed once more"
        if getattr(method, "scored", False)
        else "nothing is read again"
    )
    chat.display.line(f"{brief(session.method)}: {done}{expected_speed(chat, name)}")


def expected_speed(chat, name: str) -> str:
    """What full attention costs on this bank, by the bytes that a step reads; from the last
    answer's own rate where there is one.
    """
    length, llm = len(chat.conversation.session), chat.llm
    if name != "full" or not length:
        return ""
    weights = llm.plan().bytes_of("weights")
    bank = length * llm.config.num_layers * llm.config.kv_bytes(llm.dtype.itemsize)
    text = f"; a step of full attention reads {human(weights + bank)} here ({human(bank)} of them the bank)"
    steps = chat.last.sparse_steps + chat.last.dense_steps if chat.last else 0
    if steps and chat.last.decode_seconds:
        rate = (chat.last_bytes + steps * weights) / chat.last.decode_seconds
        text += f": about {clock((weights + bank) / rate) if weights + bank > 10 * rate else f'{1000 * (weights + bank) / rate:.1f} ms'}"
        text += f" per token, after {1000 * chat.last.decode_seconds / steps:.1f} ms"
    return text


def _sources(chat, rest: str):
    conversation = chat.conversation
    page = rest.endswith((".html", ".json"))
    if rest and not rest.isdigit() and not page:
        raise UsageError(
            f"/sources: found {rest!r}, expected how many passages, such as /sources 10, or a FILE.html"
        )
    if chat.last is None:
        chat.display.line("no answer yet")
        return
    if not conversation.choices.made:
        chat.display.line(
            "the last answer ran full attention: every token was read, none was chosen "
            "(--method omnikv --dense-below 0 chooses at every length)"
        )
        return
    if page:
        sources_file(chat, rest)
        return
    found = conversation.sources(int(rest or 5))
    if not found:
        chat.display.line("the last answer chose no passage of the documents")
        return
    lines, total = [], sum(passage.score for passage in found)
    for passage in found:
        name = next(
            (d.name for d in conversation.documents if d.start <= passage.start < d.stop),
            "conversation",
        )
        where = f"{name}, line {passage.line}, tokens {passage.first:,}-{passage.last:,}"
        lines.append(
            f'{100 * passage.score / total:3.0f}  {where}\n     "{" ".join(passage.text.split())}"'
        )
    chat.display.line(
        "\n".join(
            [
                f"what the last answer looked at, most read first (100: the passages shown together; "
                f"{count(conversation.choices.made, 'choice')} in all)",
                *lines,
                *_tail_note(conversation),
            ]
        )
    )


def _tail_note(conversation) -> list[str]:
    """A line where the tail reaches into a document: it is read whole at every step, so there is
    nothing to rank.
    """
    start = tail_start(len(conversation.session), getattr(conversation.session.method, "tail", 0))
    if all(
        document.stop <= (conversation.ends[start - 1] if start else 0)
        for document in conversation.documents
    ):
        return []
    return [
        f"(from token {start:,} on every layer reads everything at every step: the tail is not ranked)"
    ]


COMMANDS = (
    Command(("help", "?"), "", "this list", _help),
    Command(("quit", "exit", "bye"), "", "leave", _quit),
    Command(("reset", "clear"), "", "a new conversation", _reset),
    Command(("system",), "TEXT", "set the system prompt and begin anew", _system),
    Command(
        ("retry",),
        "",
        "answer the last message again; after an interruption, read on and answer",
        _retry,
    ),
    Command(("read",), "FILE", "read a document into the conversation", _read),
    Command(
        ("sources",),
        "[N|FILE.html]",
        "which passages the last answer looked at, most read first; or as a page",
        _sources,
    ),
    Command(
        ("check",),
        "[N]",
        "compare the last N steps with full attention, over the same bank",
        run_check,
    ),
    Command(
        ("stats", "tps"), "", "counters of this session and figures of the last answer", _stats
    ),
    Command(("plan",), "", "layer plan and memory plan", _plan),
    Command(("memory",), "", "memory planned and held", _memory),
    Command(
        ("set",),
        "KEY VALUE",
        "change a sampling setting (temp, top_p, max_tokens, seed, stop ...); alone: show all",
        _set,
    ),
    Command(
        ("method", "attention"), "full|omnikv", "change the method; nothing is read again", _method
    ),
)
