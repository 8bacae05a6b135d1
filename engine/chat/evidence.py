"""The chat's evidence that sparse answers are right: /check, --watch and /sources.

Thin over engine/check.py, engine/chat/sources.py and engine/chat/provenance.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.chat.figures import bank_bytes
from engine.chat.provenance import record, write_page, write_run
from engine.errors import UsageError
from engine.methods.exact import Exact
from engine.plan.layers import tail_start
from engine.units import brief, count, human
from engine.watch import Watch

if TYPE_CHECKING:
    from engine.chat.conversation import Conversation
    from engine.chat.display import Display
    from engine.chat.repl import Chat
    from engine.chat.sources import Passage

WARN_BELOW = 0.9  # share of the attention mass below which --watch warns
EVERY = 16  # steps between measurements where only --exact-below is given


# ---------------------------------------------------------------- /check


def is_count(text: str) -> bool:
    """Whether a text is a number that can be typed: at most 9 digits 0 to 9."""
    return text.isascii() and text.isdigit() and len(text) < 10


def run_check(chat: Chat, rest: str) -> None:
    """Compare the last `rest` (default 16) steps with full attention; state the cost first."""
    if rest and (not is_count(rest) or int(rest) < 1):
        raise UsageError(f"/check: found {rest!r}, expected a number of steps, such as /check 32")
    session, display = chat.conversation.session, chat.display
    if chat.last is None:
        display.line("no answer yet to check: ask something first")
        return
    steps = min(int(rest or 16), max(1, chat.last.new_tokens))
    display.line(
        f"checking {count(steps, 'step')}: each runs once more, with full attention over "
        f"{human(bank_bytes(chat.llm, len(session)))} of K and V and with sparse attention"
    )
    with chat.interrupts:
        report = session.check(steps, chat.interrupts.watched(display.working("steps checked:")))
    display.clear()
    display.line(str(report))


# ---------------------------------------------------------------- --watch


def watch_of(every: int | None, exact_below: float | None) -> Watch | None:
    """Return the Watch that --watch and --exact-below ask for; None where neither is given."""
    if every is None and exact_below is None:
        return None
    return Watch(every=EVERY if every is None else every, exact_below=exact_below)


def print_watch(watch: Watch, display: Display) -> None:
    """Print what the watch measured; as a warning where the mass kept was low."""
    if not watch.sampled:
        return
    text = (
        f"attention mass kept: {watch.mass:.3f} now, lowest {watch.lowest:.3f}, "
        f"measured at {watch.sampled} of {count(watch.steps, 'step')}"
    )
    if watch.exact_steps:
        text += (
            f"; {count(watch.exact_steps, 'step')} ran full attention "
            f"(--exact-below {watch.exact_below:g})"
        )
    if watch.lowest < WARN_BELOW:
        display.line(
            f"{text}; this is low: /check compares with full attention, "
            "/method full answers with it"
        )
    else:
        display.note(text)


# ---------------------------------------------------------------- /sources


def run_sources(chat: Chat, rest: str) -> None:
    """Print the passages that the last answer read most (`rest` of them), or write a file."""
    conversation, display = chat.conversation, chat.display
    is_file = rest.endswith((".html", ".json"))
    if rest and not is_count(rest) and not is_file:
        raise UsageError(
            f"/sources: found {rest!r}, expected a number of passages such as /sources 10, "
            "or a file to write such as FILE.html"
        )
    if chat.last is None:
        display.line("no answer yet: ask something first")
        return
    if not conversation.choices.made:
        display.line(
            "the last answer ran full attention: it read every token and chose none "
            f"({_how_to_choose(conversation)})"
        )
        return
    if is_file:
        write_sources(chat, rest)
        return
    found = conversation.sources(int(rest or 5))
    if not found:
        display.line("the last answer chose no passage of the documents")
        return
    display.line(sources_text(conversation, found))


def _drafts(conversation: Conversation) -> bool:
    """Whether the session is in exact mode, where only drafts choose."""
    return isinstance(conversation.session.method, Exact)


def _how_to_choose(conversation: Conversation) -> str:
    if _drafts(conversation):
        return "no draft was made by a sparse step: --draft 4 drafts at every length"
    return "--method omnikv --dense-below 0 chooses at every length"


def sources_text(conversation: Conversation, found: list[Passage]) -> str:
    """List passages with their share of the score of all passages listed."""
    total = sum(passage.score for passage in found)
    choices = count(conversation.choices.made, "choice")
    drafts = _drafts(conversation)
    lines = [
        f"what {'the drafts of ' if drafts else ''}the last answer read, most read first, in % of "
        f"the passages shown ({choices} of tokens)"
    ]
    if drafts:
        lines.append("full attention read every token and decided every word; drafts guessed them")
    for passage in found:
        name = next(
            (d.name for d in conversation.documents if d.start <= passage.start < d.stop),
            "conversation",
        )
        lines += [
            f"{100 * passage.score / total:3.0f}  {name}, line {passage.line}, "
            f"tokens {passage.first:,}-{passage.last:,}",
            f'     "{" ".join(passage.text.split())}"',
        ]
    return "\n".join([*lines, *_tail_note(conversation)])


def _tail_note(conversation: Conversation) -> list[str]:
    """Say from which token on the tail, which every step reads whole, covers a document."""
    start = tail_start(len(conversation.session), getattr(conversation.session.method, "tail", 0))
    character = conversation.ends[start - 1] if start else 0
    if all(document.stop <= character for document in conversation.documents):
        return []
    return [
        f"(from token {start:,} on every layer reads everything at every step: "
        "the tail is not ranked)"
    ]


def write_sources(chat: Chat, path: str) -> None:
    """Write what every token of the last answer read: a page, or a run for tools.sources."""
    conversation, display = chat.conversation, chat.display
    spans = [(d.start, d.stop) for d in conversation.documents] or [(0, conversation.answer_start)]
    run = record(
        conversation.trace,
        conversation.text,
        conversation.ends,
        spans,
        chat.llm.name,
        brief(conversation.session.method) + (", its drafts" if _drafts(conversation) else ""),
        display.working("steps of the answer:"),
    )
    (write_page if path.endswith(".html") else write_run)(run, path)
    display.line(f"wrote {path}")
