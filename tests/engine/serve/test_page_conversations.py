"""A conversation on the page, as a person has it: several documents, questions that are edited and
asked anew, settings, export, and what is kept; by mouse, by keyboard, by ear and on a phone.

Stops: a document that is read again though nothing before it changed, or not though something did;
a passage named after another document; turns that are sent though they were dropped; a saved
conversation that comes back otherwise; a focus that is taken away; a control out of a phone's view.
"""

import base64
import json

import pytest

from tests.engine.serve.browser import browser_needed
from tests.engine.serve.test_page import CONTRAST, MARKS
from tests.engine.text.papers_made import docx, paragraph

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go.\n"
MAY = [FILLER.strip()] * 9 + ["The pass key of Alice is 48213."] + [FILLER.strip()] * 9
JUNE = FILLER * 9 + "The pass key of Ben is 90754.\n" + FILLER * 9
ALICE, BEN = "What is the pass key of Alice?", "What is the pass key of Ben?"
js = json.dumps
ENDED = "!state.running && state.turns.length && state.turns.at(-1).figures"
# what the page sends, kept beside
WATCH = """window.sent = []; window.fetched = window.fetch;
window.fetch = (path, more) => { if (more && more.body) sent.push([path, JSON.parse(more.body)]); return fetched(path, more); }; 0"""  # noqa: E501
# a model that thinks first, in the stream's field for that
THINKS = """window.fetch = (path) => { const chunk = (delta, more) => "data: " + JSON.stringify({ choices: [{ delta, ...more }] }) + "\\n\\n";
  return Promise.resolve(new Response([chunk({ reasoning_content: "<b>Hm.</b> " }), chunk({ reasoning_content: "Two keys." }), chunk({ content: "It is " }),
    chunk({ content: "**one**." }), chunk({}, { finish_reason: "stop" }),
    "data: " + JSON.stringify({ choices: [], usage: { prompt_tokens: 9, completion_tokens: 8, prompt_tokens_details: { cached_tokens: 0 } } }) + "\\n\\n"].join("")));
}; 0"""  # noqa: E501


def drop(page, *files):
    """Files fall on the page."""
    page.js("window.dropped = new DataTransfer(); 0")
    for name, data in files:
        text = js(base64.b64encode(data).decode())
        array = f"Uint8Array.from(atob({text}), (c) => c.charCodeAt(0))"
        page.js(f"dropped.items.add(new File([{array}], {js(name)})); 0")
    page.js(
        "document.dispatchEvent(new DragEvent('drop', { dataTransfer: dropped, bubbles: true })); 0"
    )


def both(page):
    """Two documents, read and counted."""
    drop(page, ("may.docx", docx("".join(map(paragraph, MAY)))), ("june.txt", JUNE.encode()))
    page.until("!state.running && state.documents.length === 2 && state.documents[1].tokens > 0")
    page.until("$('state').textContent.startsWith('Read ')")


def ask(page, question):
    page.js("$('question').focus(); 0")
    page.call("Input.insertText", text=question)
    page.key("Enter")
    page.until(f"{ENDED} && state.turns.at(-1).question === {js(question)}")
    return page.js("state.turns.at(-1).answer")


def held(page):
    return page.js("$('state').textContent")


@browser_needed
def test_several_documents_are_listed_named_and_removed(page):
    drop(page, ("may.docx", docx("".join(map(paragraph, MAY)))), ("image.png", b"\x89PNG\0"))
    page.until("$('state').textContent.includes('image.png')")
    page.until("$('state').textContent.includes('The others were read.')")
    assert page.js("state.documents.length") == 1
    _refused(page)
    drop(page, ("june.txt", JUNE.encode()))
    page.until("!state.running && state.documents.length === 2 && state.documents[1].tokens > 0")
    # the first was held: the second alone was read
    first, second = page.js("state.documents.map((one) => one.tokens)")
    all_, old = (int(n.replace(",", "")) for n in _numbers(held(page))[:2])
    assert old >= first - 4 and all_ - old < second + 40 and all_ >= first + second
    items = page.js("[...$('documents').querySelectorAll('li')].map((li) => li.textContent)")
    assert items[0].startswith(f"may.docx {first} tokens · DOCX, ") and items[2] == "Add"
    assert f"june.txt {second} tokens" in items[1]
    # a name stands before what did not come alone; text is sent as it is shown
    shown = page.js("$('document').textContent")
    assert shown == page.js("state.text") and shown.endswith("june.txt:\n\n" + JUNE.strip())
    assert "90754" in ask(page, BEN)
    assert "48213" in ask(page, ALICE)
    last = "$('log').lastElementChild"
    read = page.js(f"[...{last}.querySelectorAll('.sources button')].map((e) => e.textContent)")
    at = next(n for n, text in enumerate(read) if "may.docx, line 19 · The pass key of" in text)
    page.js(f"{last}.querySelectorAll('.sources button')[{at}].click(); 0")
    assert MAY[9] in page.js(MARKS)
    assert any("the name of a document · june.txt:" in text for text in read)
    ben = "placed(state.text.indexOf('The pass key of Ben'))"
    assert page.js(ben) == "june.txt, line 10"
    # what stands behind a document that is taken away is read again, and that is said
    page.js("$('documents').querySelector('[aria-label=\"Remove may.docx\"]').click(); 0")
    page.until("!state.running && / is read again. Read \\d+ tokens/.test($('state').textContent)")
    assert held(page).startswith("may.docx is removed; what stood behind it is read again.")
    assert "nothing was read again" not in held(page)
    assert page.js("document.activeElement.textContent").startswith("june.txt")
    assert page.js("document.querySelectorAll('mark, .read, .sources').length") == 0
    assert "48213" not in page.js("state.text")
    assert "90754" in ask(page, BEN)
    page.js("$('documents').querySelector('[aria-label^=Remove]').click(); 0")
    page.until("state.documents.length === 0")
    assert page.js("state.text") == "" and not page.js("$('start').hidden")


def _refused(page):
    """What the server refused is noted by the browser too."""
    assert ["400" in error.get("text", "") for error in page.errors] == [True]
    page.errors.clear()


def _numbers(text):
    return [word.strip(",:") for word in text.split() if word[0].isdigit()]


@browser_needed
def test_a_document_that_does_not_fit_leaves_the_others(page):
    drop(page, ("june.txt", JUNE.encode()))
    page.until("!state.running && state.documents.length === 1 && state.documents[0].tokens > 0")
    drop(page, ("big.txt", (FILLER * 400).encode()))
    page.until("!state.running && $('state').textContent.includes('context')")
    assert page.js("state.documents.map((one) => one.name)") == ["june.txt"]
    _refused(page)
    assert page.js("$('document').textContent") == JUNE.strip()
    assert "90754" in ask(page, BEN)


@browser_needed
def test_a_reading_that_is_stopped_is_done_by_the_next_question(page, sparse):
    page.js(WATCH)
    page.js(f"$('paste').value = {js(JUNE + FILLER * 60)}; $('read').click(); 0")
    page.until("/Reading: [1-9]/.test($('state').textContent)")
    page.key("Escape")
    page.until("!state.running && $('state').textContent.startsWith('Stopped. The next question')")
    assert page.js("document.querySelector('.unread') !== null && state.documents.length === 1")
    assert "90754" in ask(page, BEN)
    assert page.js("document.querySelector('.unread')") is None
    # and a server that has gone is said to have
    page.js("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
    page.js("$('retry').click(); 0")
    page.until("!state.running && $('log').querySelector('[role=alert]') !== null")
    assert "cannot be reached" in page.js("$('log').textContent")
    assert page.js("$('retry').disabled") is False


@browser_needed
def test_questions_are_edited_and_asked_anew(page):
    both(page)
    page.js(WATCH)
    assert "48213" in ask(page, ALICE)
    assert "90754" in ask(page, BEN)
    assert [m["role"] for m in page.js("sent.at(-1)[1].messages")] == ["user", "assistant", "user"]
    # the first is edited: what followed it goes
    page.js("$('log').querySelector('.asked button').click(); 0")
    assert page.js("document.activeElement.value") == ALICE
    page.key("Escape")
    assert page.js("state.turns.length") == 2 and page.js("$('log').querySelector('form')") is None
    page.js("$('log').querySelector('.asked button').click(); document.activeElement.select(); 0")
    page.call("Input.insertText", text=BEN + " Now.")
    page.key("Enter")
    page.until(f"{ENDED} && state.turns.length === 1 && state.turns[0].question.endsWith('Now.')")
    sent = page.js("sent.at(-1)[1].messages")
    assert len(sent) == 1 and sent[0]["content"].endswith("\n\n" + BEN + " Now.")
    assert page.js("$('log').querySelectorAll('article').length") == 2
    assert page.js("document.activeElement.id") == "question"
    # anew, with the settings of now
    page.js("$('settings').click(); $('temperature').value = 1.5; $('most').value = 3; 0")
    page.js("$('d-settings').querySelector('button').click(); 0")
    page.until("state.temperature === 1.5")
    page.js("window.before = state.turns[0]; $('retry').click(); 0")
    page.until(f"{ENDED} && state.turns[0] !== before")
    asked = page.js("sent.at(-1)[1]")
    assert asked["temperature"] == 1.5 and asked["max_tokens"] == 3 and len(asked["messages"]) == 1
    assert "that the settings allow" in page.js("state.turns[0].article.textContent")
    # a system prompt stands before the documents, so that all is read again
    page.js("$('settings').click(); $('system').value = 'The grass is red.'; 0")
    page.key("Escape")
    page.until("/^The system prompt is another: Read \\d/.test($('state').textContent)")
    assert page.js("sent.at(-1)[1].messages[0]") == {
        "role": "system",
        "content": "The grass is red.",
    }
    page.js("$('settings').click(); $('most').value = ''; $('temperature').value = 0; 0")
    page.js("$('d-settings').close(); 0")
    page.until("state.most === null")
    ask(page, ALICE)
    # its marks are those of the second message
    assert "may.docx" in page.js("$('log').querySelector('.sources button').textContent")


@browser_needed
def test_an_answer_is_copied_and_a_conversation_exported(page, tmp_path):
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    both(page)
    answer = ask(page, ALICE)
    page.js(
        "window.clip = []; navigator.clipboard.writeText = async (text) => { clip.push(text); }; 0"
    )
    page.key("c", 1)
    page.until("$('log').querySelector('.acts button').textContent === 'Copied'")
    assert page.js("clip") == [answer] and page.js("$('spoken').textContent") == "Copied"
    page.js("navigator.clipboard.writeText = () => Promise.reject(new Error('no')); 0")
    assert page.js("copied('by a selection')") in (True, False)  # where no one may write it
    assert page.js("document.querySelectorAll('body > textarea').length") == 0
    for name in ("as-markdown", "as-json"):
        page.key("x", 1)
        assert page.js("$('d-export').open")
        page.js(f"$('{name}').click(); 0")
        assert not page.js("$('d-export').open")
    stem = "What-is-the-pass-key-of-Alice"
    _until(lambda: {p.name for p in tmp_path.iterdir()} == {stem + ".md", stem + ".json"})
    text = (tmp_path / f"{stem}.md").read_text(encoding="utf-8")
    assert text.startswith(
        f"# {ALICE}\n\n- Model: pocket\n- Temperature: 0\n- Document: may.docx, "
    )
    assert text.endswith(f"## Question\n\n> {ALICE}\n\n## Answer\n\n{answer}\n")
    found = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in found["documents"]] == ["may.docx", "june.txt"]
    assert found["documents"][1]["text"] == JUNE.strip() and found["max_tokens"] is None
    assert found["messages"] == [
        {"role": "user", "content": ALICE},
        {"role": "assistant", "content": answer},
    ]


def _until(true):
    import time

    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@browser_needed
def test_a_conversation_is_kept_and_comes_back_whole(page, sparse):
    both(page)
    page.js("$('settings').click(); $('temperature').value = 0.5; $('d-settings').close(); 0")
    answer = ask(page, ALICE)
    page.js("$('list').click(); $('keep').click(); 0")
    page.until("shelf[0].kept")
    page.js("$('back').click(); 0")
    second = ask(page, BEN)  # written when it is there
    page.until("shelf.length === 1 && shelf[0].turns === 2")
    page.js("window.before = true; 0")
    page.call("Page.reload")
    page.until("!window.before && document.readyState === 'complete' && shelf.length === 1")
    page.until("state.model !== null && $('shelf').querySelector('button') !== null")
    said = page.js("$('shelf').querySelector('button').textContent")
    assert ALICE in said and "may.docx, june.txt · 2 questions · " in said
    page.js("$('shelf').querySelector('button').click(); 0")
    page.until("!state.running && $('state').textContent.includes('nothing was read again')")
    assert page.js("state.turns.map((turn) => turn.answer)") == [answer, second]
    shown = page.js("[...$('log').querySelectorAll('.words')].map((e) => e.textContent)")
    assert shown == [answer, second]
    assert page.js("state.temperature") == 0.5 and page.js("$('retry').disabled") is False
    assert page.js("$('log').querySelectorAll('.figures').length") == 2
    ask(page, ALICE)
    page.until("shelf.length === 1 && shelf[0].turns === 3")
    # a new one leaves it in the list; without documents it is a conversation too
    page.key("n", 1)
    page.until("state.turns.length === 0 && state.documents.length === 0")
    assert page.js("state.temperature") == 0
    page.js("$('settings').click(); $('most').value = 4; $('d-settings').close(); 0")
    ask(page, FILLER.strip())
    page.until("shelf.length === 2 && shelf.every((entry) => entry.kept)")
    page.js("$('list').click(); 0")
    titles = page.js(
        "[...$('shelf').querySelectorAll('li span:first-child')].map((e) => e.textContent)"
    )
    assert titles == [FILLER.strip(), ALICE]
    # removed, it is gone from here and from the server
    page.js("$('shelf').querySelectorAll('[aria-label^=Remove]')[1].click(); 0")
    page.until("/and the server \\(\\d sessions?, 0 blocks\\)/.test($('state').textContent)")
    kept = "within('readonly', (table) => table('talks').count())"
    assert page.js(kept) == 1 and page.js("shelf.length") == 1
    tokens = [slot.session.ids for slot in sparse.worker.slots.slots]
    assert not any("90754" in sparse.service.llm.tokenizer.decode(ids) for ids in tokens)


@browser_needed
def test_reasoning_is_folded_and_not_sent_again(page):
    page.js(THINKS)
    page.js("$('question').value = 'Which?'; $('ask').requestSubmit(); 0")
    page.until("!state.running && state.turns.length === 1 && state.turns[0].answer")
    folded = "$('log').querySelector('.reasoning')"
    assert page.js(f"{folded}.open") is False
    assert page.js(f"{folded}.querySelector('p').textContent") == "<b>Hm.</b> Two keys."
    assert page.js("$('log').querySelector('.words').textContent") == "It is one."
    assert page.js("$('log').querySelector('.words strong').textContent") == "one"
    assert page.js("messagesOf('And?')") == [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "It is **one**."},
        {"role": "user", "content": "And?"},
    ]
    exported = json.loads(page.js("asJson()"))
    assert exported["messages"][1]["reasoning_content"] == "<b>Hm.</b> Two keys."
    # kept and shown again
    page.js(
        "const again = state.turns.map(({ asked, article, words, ...turn }) => turn); drawTurns(again); 0"  # noqa: E501
    )
    assert page.js(f"{folded}.querySelector('p').textContent") == "<b>Hm.</b> Two keys."


@browser_needed
def test_it_is_heard_and_takes_no_focus(page):
    page.js(
        "window.heard = []; new MutationObserver(() => heard.push($('spoken').textContent))"
        ".observe($('spoken'), { childList: true }); 0"
    )
    # who writes a system prompt while a document is read keeps the focus
    page.js(f"$('paste').value = {js(JUNE)}; $('read').click(); $('settings').click(); 0")
    page.until("!state.running && state.documents.length === 1")
    assert page.js("document.activeElement.id") == "system"
    page.js("$('d-settings').close(); $('log').focus(); 0")
    page.js(f"ask({js(BEN)}); 0")
    page.until(ENDED)
    assert page.js("document.activeElement.id") == "log"
    heard = page.js("heard")
    assert any(text.startswith("Read ") for text in heard)
    assert "The pass key of Ben is 90754." in " ".join(heard)
    # what is written is said piece by piece, a sentence or a line, and once
    pieces = page.js(
        "(() => { const spoken = new Spoken(), said = []; const all = 'One is. Two is **not**. Thr'; "  # noqa: E501
        "for (const letter of all) { spoken.when = -9e9; spoken.add(letter); "
        "if (said.at(-1) !== $('spoken').textContent) said.push($('spoken').textContent); } "
        "spoken.add('ee', true); said.push($('spoken').textContent); return said; })()"
    )
    assert pieces[-3:] == ["One is.", "Two is  not .", "Three"]
    roles = "[...document.querySelectorAll('header, main, nav, form, section, [role=log], [role=status]')].length"  # noqa: E501
    assert page.js(roles) >= 9 and page.js("$('log').getAttribute('aria-live')") == "off"


@browser_needed
def test_every_shortcut_is_listed_and_works(page):
    both(page)
    ask(page, ALICE)
    page.key("k", 1)
    assert page.js("$('d-keys').open")
    listed = page.js("[...$('shortcuts').querySelectorAll('dt')].map((e) => e.textContent)")
    shown = page.js(
        "[...document.querySelectorAll('[aria-keyshortcuts]')].map((e) => e.getAttribute('aria-keyshortcuts'))"  # noqa: E501
    )  # noqa: E501
    assert set(shown) <= set(listed) and len(listed) == 13
    page.key("n", 1)  # not behind a dialog
    assert page.js("state.turns.length") == 1
    page.key("Escape")
    assert not page.js("$('d-keys').open")
    page.key("l", 1)
    assert page.js("!$('start').hidden && document.activeElement.closest('#shelf') !== null")
    page.key("l", 1)
    assert page.js("$('start').hidden")
    page.key("g", 1)
    assert page.js("$('d-settings').open && document.activeElement.id === 'system'")
    page.key("Escape")
    page.key("q", 1)
    assert page.js("document.activeElement.id") == "question"
    page.js("window.before = state.turns[0]; 0")
    page.key("r", 1)
    page.until(f"{ENDED} && state.turns[0] !== before")
    # Escape closes a dialog and leaves an answer, then stops the answer
    page.js("ask('Tell me all.'); $('keys').click(); 0")
    page.key("Escape")
    assert page.js("state.turns.at(-1).question === 'Tell me all.' && !$('d-keys').open")
    assert held(page) != "Stopped."


NARROW = "[document.documentElement.scrollWidth - innerWidth, document.documentElement.scrollHeight - innerHeight]"  # noqa: E501
# controls that no scrolling within the page brings into view
LOST = """[...document.querySelectorAll("button, input, textarea, summary")].filter((e) => {
  if (!e.getClientRects().length || e.closest("dialog:not([open])")) return false;
  e.scrollIntoView({ block: "nearest", inline: "nearest" });
  const b = e.getBoundingClientRect();
  return b.left < -1 || b.right > innerWidth + 1 || b.top < -1 || b.bottom > innerHeight + 1;
}).map((e) => e.id || e.textContent)"""
RICH = (
    "# Keys\\n\\n- **a** `b` [c](https://x.example/)\\n\\n| a | b |\\n|--|--|\\n| c | d |\\n\\n```\\n"  # noqa: E501
    + "x" * 200
    + "\\n```\\n\\n> q ~~r~~"
)  # noqa: E501


@browser_needed
@pytest.mark.parametrize("dark", [False, True])
def test_all_views_are_seen_on_a_phone(page, dark):
    both(page)
    ask(page, ALICE)
    page.js(
        f"const turn = shown({{ question: 'Rich?', answer: '', reasoning: '', figures: 'f' }}); "
        f"reason(turn, 'Why.'); turn.words = new Words(turn.article, 0); turn.words.add('{RICH}'); "
        "turn.words.end(); turn.answer = 'x'; finish(turn); state.turns.push(turn); "
        "$('log').querySelector('.reasoning').open = true; 0"
    )
    for width, height in ((360, 740), (320, 640), (1200, 760)):
        page.look(width, height, dark)
        for opened in ("", "settings", "export", "keys", "list"):
            if opened:
                page.js(f"$('{opened}').click(); 0")
            assert page.js(NARROW) == [0, 0], (width, opened)
            assert page.js(LOST) == [], (width, opened)
            assert page.js(CONTRAST) == [], (width, opened)
            page.js(
                "document.querySelector('dialog[open]')?.close(); "
                "if (!$('back').hidden) $('back').click(); 0"
            )
    page.look(1200, 760)
