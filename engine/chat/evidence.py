"""The chat's evidence that sparse answers are right: /check, --watch and /sources.

Thin over engine/session/check.py, engine/evidence/sources.py and engine/evidence/provenance.py.
"""

from __future__ import annotations

import dataclasses

from engine.base.errors import UsageError
from engine.base.figures import brief, count, human
from engine.chat.talk.chat import Chat
from engine.chat.talk.conversation import Conversation
from engine.cli.figures import bank_bytes
from engine.evidence.provenance import record, write_page, write_run
from engine.evidence.sources import Passage
from engine.methods.exact import Exact
from engine.methods.mass_meter import Watch
from engine.plan.layers import tail_start
from engine.session.session import Session

CHOOSES = "/method omnikv dense_below=0 chooses at every length"
EXPLAINED = (
    "(KL: how far the probabilities of the next token are from full attention's, 0: the same; mass "
    "kept: the share of full attention's weights that falls on the tokens that were read)"
)
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
    if why := _nothing_sparse(chat):
        display.line(f"nothing to compare: {why}")
        return
    steps = min(int(rest or 16), max(1, chat.last.new_tokens))
    display.line(
        f"checking {count(steps, 'step')}: each runs once more, with full attention over "
        f"{human(bank_bytes(chat.llm.planner, len(session)))} of K and V and with sparse attention"
    )
    with chat.interrupts:
        report = session.check(steps, chat.interrupts.watched(display.working("steps checked:")))
    display.clear()
    display.line(str(report))
    display.note(EXPLAINED)


def waits(session: Session) -> str:
    """From which length on a session's method is sparse, where that is not reached; else ""."""
    method, start = session.method, session.runner.dense_below
    if isinstance(method, Exact) or not session.plan.sparse_layers or len(session) >= start:
        return ""
    if start > session.limit:
        return f"sparse at no length within {session.limit:,} tokens"
    return f"sparse from {start:,} tokens on; this context has {len(session):,}"


def covers(session: Session) -> str:
    """That a step of a session's method may read as many tokens as there are, with both numbers;
    "" where it leaves some out.
    """
    sparse, n = session.plan.sparse_layers, len(session)
    if not sparse or isinstance(session.method, Exact):
        return ""
    rows = session.runner.rows_read(n, True)
    if any(rows[layer] < n for layer in sparse):
        return ""
    return f"its budget covers all {n:,} tokens of this context, and leaves none out"


def _nothing_sparse(chat: Chat) -> str:
    """Why no step of this session is sparse, and the command that changes it; "" where one is."""
    session = chat.conversation.session
    name = session.method.name
    if not session.plan.sparse_layers:
        reads = "drops tokens and chooses none" if session.plan.partial_layers else "reads all"
        begin = "a conversation without --forever can" if session.endless else CHOOSES
        return f"{name} {reads}; {begin}"
    if session.bank.forgets or session.bank.lacks:
        keeps = f"; /method {name} forget=False keeps them" if session.bank.lacks else ""
        return f"{name} has freed rows that full attention would read{keeps}"
    if found := waits(session):
        return f"{name} is {found}; {CHOOSES}"
    return f"{name}: {found}; {_fewer(session)}" if (found := covers(session)) else ""


def _fewer(session: Session) -> str:
    """The command that has a session's method read less than everything."""
    fields = {field.name for field in dataclasses.fields(session.method)}
    if "tokens" not in fields:
        return CHOOSES
    more = " dense_below=0" if "dense_below" in fields else ""
    return f"/method {session.method.name} tokens={max(1, len(session) // 8)}{more} chooses"


# ---------------------------------------------------------------- --watch


def watch_of(every: int | None, exact_below: float | None) -> Watch | None:
    """Return the Watch that --watch and --exact-below ask for; None where neither is given."""
    if every is None and exact_below is None:
        return None
    return Watch(every=EVERY if every is None else every, exact_below=exact_below)


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
        what = "ran full attention: it read every token and chose none"
        session = conversation.session
        plan = session.plan
        if plan.partial_layers and not plan.sparse_layers:
            what = "chose no passage"
        why = _how_to_choose(chat)
        if plan.sparse_layers and chat.last.sparse_steps and not _drafts(conversation):
            # what is read follows from places, as PoD's distant tokens do
            what, why = "chose no passage", f"{session.method.name} ranks none; {CHOOSES}"
        display.line(f"the last answer {what} ({why})")
        return
    if is_file:
        write_sources(chat, rest)
        return
    found = conversation.sources(int(rest or 5))
    if not found:
        alike = len(conversation.sources(len(conversation.ends)))
        why = covers(conversation.session)
        name = conversation.session.method.name
        why = f"{name}: {why}" if why else f"{name} does not rank them"
        display.line(
            f"the last answer read {alike:,} passages, all equally: {why} "
            f"({_fewer(conversation.session) if covers(conversation.session) else CHOOSES})"
            if alike
            else "the last answer chose no passage of the documents"
        )
        return
    display.line(sources_text(conversation, found))


def _drafts(conversation: Conversation) -> bool:
    """Whether the session is in exact mode, where only drafts choose."""
    return isinstance(conversation.session.method, Exact)


def _how_to_choose(chat: Chat) -> str:
    if not _drafts(chat.conversation):
        return _nothing_sparse(chat) or f"{CHOOSES}; /retry answers again"
    if chat.last is not None and chat.last.drafted:
        return (
            "its drafts were copied from where the same words stood before; "
            "/method exact lookup=False has sparse steps draft"
        )
    return "no draft was made by a sparse step; /method exact draft=4 drafts at every length"


def sources_text(conversation: Conversation, found: list[Passage]) -> str:
    """List passages with their share of the score of all passages listed."""
    total = sum(passage.score for passage in found)
    choices = count(conversation.choices.made, "choice")
    drafts = _drafts(conversation)
    lines = [
        f"the passages that {'the drafts of ' if drafts else ''}the last answer read most, in % of "
        f"all that are shown (from {choices} of tokens)"
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
    """Say how much is forgotten, and from which token on the tail, which every step reads whole,
    covers a document.
    """
    if gone := conversation.session.forgotten:
        return [f"({count(gone)} are forgotten, and no layer read them)"]
    start = tail_start(len(conversation.session), getattr(conversation.session.method, "tail", 0))
    character = conversation.ends[start - 1] if start else 0
    if all(document.stop <= character for document in conversation.documents):
        return []
    return [
        f"(tokens from {start:,} on, the newest, are read by every layer at every step and not "
        "ranked)"
    ]


def write_sources(chat: Chat, path: str) -> None:
    """Write what every token of the last answer read: a page, or a run for tools.repo.sources."""
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
        [d.name for d in conversation.documents],
    )
    (write_page if path.endswith(".html") else write_run)(run, path)
    ranked = any(run.reads)
    display.line(
        f"wrote {path}"
        + (
            ""
            if ranked
            else "; the answer read all its passages equally, so that the page shows none"
        )
    )
