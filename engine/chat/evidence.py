"""The chat's evidence: /check, --watch and the files that /sources writes. Thin over
engine/check.py and engine/chat/provenance.py.
"""

import time

from engine.chat.provenance import record, write_page, write_run
from engine.errors import UsageError
from engine.units import brief, human
from engine.watch import Watch

WARN_BELOW = 0.9  # mass kept under which --watch says so


def watch_of(every, exact_below):
    """The Watch that --watch and --exact-below ask for; None where neither is given."""
    if every is None and exact_below is None:
        return None
    return Watch(every=16 if every is None else every, exact_below=exact_below)


def run_check(chat, rest):
    """/check [N]: full against sparse attention at the last N positions, its cost stated first."""
    if rest and (not rest.isdigit() or int(rest) < 1):
        raise UsageError(f"/check: found {rest!r}, expected how many steps, such as /check 32")
    session, llm = chat.conversation.session, chat.llm
    if chat.last is None:
        chat.display.line("no answer yet")
        return
    steps = min(int(rest or 16), max(1, chat.last.new_tokens))
    bank = len(session) * llm.config.num_layers * llm.config.kv_bytes(llm.dtype.itemsize)
    chat.display.line(
        f"checking {steps} steps: each runs full attention ({human(bank)} of the bank) and sparse attention once more"
    )
    began = time.monotonic()
    report = session.check(
        steps,
        lambda done, total: chat.display.progress(f"checked {done}/{total}", began, done == total),
    )
    chat.display.clear()
    chat.display.line(str(report))


def watch_line(chat):
    """After an answer: what the watch saw, louder where the mass kept was low; nothing without a
    watch.
    """
    watch = chat.conversation.session.watch
    if watch is None or not watch.sampled:
        return
    text = f"attention mass kept: {watch.mass:.3f} now, lowest {watch.lowest:.3f}, sampled {watch.sampled} of {watch.steps} steps"
    if watch.exact_steps:
        text += (
            f"; {watch.exact_steps} steps ran full attention (--exact-below {watch.exact_below:g})"
        )
    if watch.lowest < WARN_BELOW:
        text += "; low: /check compares with full attention, /method full answers with it"
        chat.display.line(text)
    else:
        chat.display.note(text)


def sources_file(chat, path):
    """/sources FILE.html | FILE.json: what every token of the last answer read, as a page or as a
    run for python -m tools.sources.
    """
    conversation = chat.conversation
    spans = [(d.start, d.stop) for d in conversation.documents] or [(0, conversation.answer_start)]
    run = record(
        conversation.trace,
        conversation.text,
        conversation.ends,
        spans,
        chat.llm.name,
        brief(conversation.session.method),
    )
    (write_page if path.endswith(".html") else write_run)(run, path)
    chat.display.line(f"written: {path}")
