"""The page: in a real browser where there is one, and its headers without.

Stops: a policy that the page itself breaks, a document or an answer that becomes markup, marks in
the wrong place, a word that shows another's passages, a control without a name or without contrast,
an answer that cannot be stopped, a page that needs another host, a text that is kept unasked.
"""

import json
import re

from engine.serve.page import TEXT, policy
from tests.builders import POCKET
from tests.engine.serve.browser import browser_needed
from tests.engine.serve.conftest import serving
from tests.engine.serve.scripted import saying

FACT = "The pass key of Alice is 48213."
FILLER = "The grass is green. The sky is blue \U0001f33f. The sun is yellow. Here we go.\n"
HOSTILE = "<img src=x onerror=document.title='forged'><script>document.title='forged'</script>\n"
DOCUMENT = HOSTILE + FILLER * 15 + FACT + "\n" + FILLER * 30
IDLE = "!state.running && $('retry').disabled === false"
MARKS = "[...document.querySelectorAll('#document mark')].map((m) => m.textContent)"
js = json.dumps


def test_the_page_needs_nobody_else_and_its_policy_allows_no_more(server):
    reply = server.http.get("/")
    assert reply.status_code == 200 and reply.text == TEXT
    rules = reply.headers["content-security-policy"]
    assert rules == policy(TEXT) and "unsafe" not in rules and "default-src 'none'" in rules
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", rules)) == 2
    assert "require-trusted-types-for 'script'" in rules
    assert reply.headers["x-content-type-options"] == "nosniff"
    # else a browser looks up the hosts of an answer's links, and their owners hear of it
    assert reply.headers["x-dns-prefetch-control"] == "off"
    elsewhere = r"""src=|href=(?!"#)|https?://|\son\w+=|innerHTML|insertAdjacent|style="|eval\("""
    assert not re.findall(elsewhere, TEXT)
    assert policy(TEXT.replace("use strict", "use  strict")) != rules


def test_a_model_without_a_document_offers_none(server, pocket, monkeypatch):
    found = server.http.get("/example").json()
    assert found["text"] == (POCKET / "welcome.txt").read_text(encoding="utf-8")
    assert (
        len(found["questions"]) == 4 and found["questions"][0] == "What is the pass key of Alice?"
    )
    assert server.http.get("/v1/models").json()["data"][0]["meta"]["example"] is True
    monkeypatch.setattr(pocket, "folder", None)
    assert server.http.get("/example").status_code == 404
    assert server.http.get("/v1/models").json()["data"][0]["meta"]["example"] is False


def read(page, text=DOCUMENT):
    page.js(f"$('paste').value = {js(text)}; $('read').click(); 0")
    page.until("!state.running && $('state').textContent.startsWith('Read ')")


def ask(page, question="What is the pass key of Alice?"):
    page.call("Input.insertText", text=question)
    page.key("Enter")
    page.until(IDLE)


@browser_needed
def test_a_person_reads_asks_and_sees(page, sparse):
    assert "pocket" in page.js("$('about').textContent")
    seen = (
        "window.heard = []; new MutationObserver(() => heard.push($('state').textContent))"
        ".observe($('state'), { childList: true }); window.dimmed = 0; "
        "new MutationObserver(() => { dimmed = Math.max(dimmed, "
        "document.querySelectorAll('.unread').length); }).observe($('document'), "
        "{ attributes: true, subtree: true }); 0"
    )
    page.js(seen)
    read(page)
    shown = page.js("heard.filter((text) => text.startsWith('Reading: '))")
    assert any(re.search(r"of [\d,]+ tokens, about \d+ s left", text) for text in shown)
    assert page.js("dimmed") and not page.js("document.querySelector('.unread')")
    assert page.js("$('document').textContent") == DOCUMENT.strip()
    # by keyboard: the question has the focus; Enter asks
    assert page.js("document.activeElement.id") == "question"
    ask(page)
    answer = page.js("$('log').querySelector('.words').textContent")
    assert "48213" in answer and "held already" in page.js("$('state').textContent")
    marks = page.js(MARKS)
    assert FACT in marks and len(marks) <= 8
    best = page.js("$('log').querySelector('li button').textContent")
    assert "line 17" in best and FACT in best
    said = page.js("$('log').querySelector('.figures').textContent")
    assert re.search(r"sparse: \d+ tokens · [\d.]+ a second · 1\.\d\d times full .*counted", said)
    assert page.js("$('document').textContent") == DOCUMENT.strip()
    # an answer that is stopped leaves the page ready, and its slot free
    page.js("$('question').value = 'Tell me all.'; $('ask').requestSubmit(); 0")
    page.key("Escape")
    page.until("!state.running && $('state').textContent === 'Stopped.'")
    sparse.until(lambda: sparse.worker.running == 0)
    # retried under full attention: the same document, nothing read again, nothing chosen
    page.js("document.querySelector('[value=full]').click(); $('retry').click(); 0")
    page.until(f"{IDLE} && $('log').querySelectorAll('.answer').length === 2")
    whole = "$('log').querySelectorAll('.answer')[1]"
    assert page.js(f"{whole}.textContent").count("full: ") == 1
    assert page.js(f"{whole}.querySelectorAll('.read').length") == 0
    page.js("document.querySelector('[value=exact]').click(); $('retry').click(); 0")
    page.until(f"{IDLE} && {whole}.textContent.includes('exact: ')")
    text = "querySelector('.words').textContent"
    assert page.js(f"{whole}.{text}") and page.js("$('log').querySelectorAll('.asked').length") == 2


@browser_needed
def test_each_word_shows_what_it_read(page):
    read(page)
    follow = (
        "new MutationObserver(() => lit.push(document.querySelectorAll('#document mark').length))"
    )
    page.js(
        f"window.lit = []; {follow}.observe($('document'), {{ childList: true, subtree: true }}); 0"
    )
    ask(page)
    assert max(page.js("lit")) > 0  # while it was written
    page.js("$('log').querySelector('.words').focus(); 0")
    page.key("Tab")
    page.key("Tab", 8)  # and back, by the keyboard
    assert page.js("document.activeElement.className") == "words"
    words = page.js(
        "$('log').querySelector('.words').words.spans.map((w) => w.elements[0].textContent)"
    )
    at = next(n for n, word in enumerate(words) if "48213" in word)
    while page.js("chosen.at") < at:
        page.key("ArrowRight")
    assert page.js("document.querySelector('.now').textContent") == words[at]
    assert page.js("$('readout').getAttribute('role')") == "status"
    told = page.js("$('readout').textContent")
    assert words[at] in told and "% line 17: " + FACT in told
    assert page.js("document.querySelector('mark.best').textContent") == FACT
    seen = "(() => { const m = document.querySelector('mark.best').getBoundingClientRect(), "
    seen += "d = $('document').getBoundingClientRect(); return m.top > d.top && m.bottom < d.bottom"
    seen += "; })()"
    assert page.js(seen) and page.js("document.querySelectorAll('#ruler i').length") >= 1
    page.key("ArrowLeft")
    assert page.js("chosen.at") == at - 1
    page.key("End")
    assert page.js("chosen.at") == len(words) - 1
    page.key("Escape")
    assert page.js("chosen") is None and len(page.js(MARKS)) > 1
    page.js("$('question').focus(); 0")
    page.over(f"document.querySelectorAll('.words span')[{at}]")
    page.until(f"chosen && chosen.at === {at}")
    page.over("$('question')")
    page.until("chosen === null")
    assert page.js("$('document').textContent") == DOCUMENT.strip()


@browser_needed
def test_nothing_that_is_read_or_written_becomes_markup(page, sparse, monkeypatch):
    forged = "<b>bold</b> [a](javascript:alert(1)) <a href='javascript:alert(1)'>x</a> "
    forged += "<img src=x onerror=alert(1)><script>alert(1)</script>"
    read(page)
    with saying(sparse.service.llm, forged, monkeypatch):
        ask(page)
    assert page.js("$('log').querySelector('.words').textContent") == forged
    tags = "img, a:not(.skip), script:not(body > script), b, iframe, svg"
    assert page.js(f"document.querySelectorAll({js(tags)}).length") == 0
    assert page.js("document.title") == "Ask a document"
    # and what would come to be all the same could do nothing
    tried = """new Promise((done) => {
      const refused = [];
      document.addEventListener("securitypolicyviolation", (event) => {
        refused.push(event.effectiveDirective);
        if (refused.length === 5) done(refused.sort());
      });
      const script = document.createElement("script"), image = document.createElement("img");
      try { script.textContent = "document.title = 'forged'"; } catch (typed) { /* refused */ }
      image.src = "https://example.com/x.png";
      document.body.append(image);
      const style = document.createElement("style");
      style.textContent = "body { display: none }";
      document.body.append(style);
      try { document.body.innerHTML = "<p>forged</p>"; } catch (typed) { /* refused */ }
      fetch("https://example.com/").catch(() => {});
      const frame = document.createElement("iframe");
      frame.src = "https://example.com/";
      document.body.append(frame);
    })"""
    refused = page.js(tried)
    assert {"img-src", "connect-src", "style-src-elem", "require-trusted-types-for"} <= set(refused)
    assert page.js("document.title") == "Ask a document"
    page.errors.clear()  # these were asked for


@browser_needed
def test_documents_are_kept_when_asked_and_opened_without_being_read_again(page, sparse):
    stored = (
        "within('readonly', (table) => table('texts').getAll()).then((all) => JSON.stringify(all))"
    )
    read(page)
    assert page.js("shelf.length") == 1 and "grass" not in page.js(stored)
    page.js("$('other').click(); $('keep').click(); 0")
    page.until("shelf[0].kept")
    assert "grass" in page.js(stored)
    page.js("window.before = true; 0")
    page.call("Page.reload")
    page.until("!window.before && document.readyState === 'complete' && shelf.length === 1")
    page.until("state.model !== null && $('shelf').querySelector('button') !== null")
    page.js("$('shelf').querySelector('button').click(); 0")
    page.until("!state.running && $('state').textContent.includes('nothing was read again')")
    assert page.js("$('document').textContent") == DOCUMENT.strip()
    page.js("$('other').click(); $('shelf').querySelector('[aria-label^=Remove]').click(); 0")
    page.until("/ and the server \\([12] sessions?, 0 blocks\\)/.test($('state').textContent)")
    held = [slot.session.ids for slot in sparse.worker.slots.slots]
    assert not any("48213" in sparse.service.llm.tokenizer.decode(ids) for ids in held)
    assert "grass" not in page.js(stored) and page.js("$('saved').hidden")
    assert page.js("document.activeElement.id") == "paste"


@browser_needed
def test_with_a_key_what_is_kept_is_sealed_with_it(chromium, pocket):
    with serving(pocket, keys=["correct-horse"]) as locked:
        chromium.open(locked.url)
        chromium.until("!$('unlock').hidden")

        def unlock(key):
            chromium.js(f"$('key').value = {js(key)}; $('unlock').requestSubmit(); 0")

        unlock("correct-horse")
        chromium.until("state.model !== null && $('unlock').hidden && !$('example').hidden")
        chromium.js("$('keep').click(); 0")
        read(chromium, FILLER * 20)
        chromium.until("shelf.length === 1 && shelf[0].kept && shelf[0].documents[0].tokens > 0")
        chromium.js("writes.then(() => 0)")
        sealed = chromium.js(
            "within('readonly', (table) => table('texts').getAll()).then(([held]) => "
            "[Object.keys(held).sort().join(), held.data.byteLength])"
        )
        assert sealed[0] == "data,iv" and sealed[1] > len(FILLER) * 20
        # another key, even one that the server takes, opens nothing
        opened = "(async () => { state.key = 'wrong-horses'; shelf = []; await openShelf(); "
        assert chromium.js(opened + "return shelf.length; })()") == 0
        again = "(async () => { state.key = 'correct-horse'; shelf = []; await openShelf(); "
        text = "return (await load(shelf[0])).documents[0].text; })()"
        assert chromium.js(again + text) == (FILLER * 20).strip()


CONTRAST = """(() => {
  const seen = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const over = (top, under) => top.length < 4 ? top : top.slice(0, 3).map((v, n) => v * top[3] + under[n] * (1 - top[3]));
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const ground = (e) => e ? over(seen(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : [255, 255, 255];
  return [...document.querySelectorAll("h1, h2, p, mark, span, label, legend, summary, button:not(:disabled)")]
    .filter((e) => e.textContent.trim() && e.getClientRects().length).map((e) => {
      const [a, b] = [light(over(seen(getComputedStyle(e).color), ground(e))), light(ground(e))];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName + "." + e.className + " " + e.textContent.slice(0, 30)];
    }).filter(([ratio]) => ratio < 4.5);
})()"""  # noqa: E501


@browser_needed
def test_it_is_named_seen_and_narrow(page):
    """Every control has a name, every text a contrast of 4.5, light and dark; nothing overflows."""
    read(page)
    ask(page)
    page.js("choose({ words: $('log').querySelector('.words').words, at: 5, held: true }); 0")
    nameless = page.js(
        "[...document.querySelectorAll('button, input:not([hidden]), textarea, progress, "
        '[tabindex="0"], [role]\')].filter((e) => !(e.textContent.trim() || '
        "e.getAttribute('aria-label') || e.labels?.length || "
        "e.getAttribute('role') === 'status')).map((e) => e.outerHTML)"
    )
    assert nameless == []
    for dark in (False, True):
        page.look(1200, 760, dark=dark)
        assert page.js(CONTRAST) == []
    page.look(360, 800)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.js("document.documentElement.scrollHeight <= innerHeight")


@browser_needed
def test_a_megabyte_is_marked_by_its_blocks_alone(page):
    lines = "\\u0041 line of text that is long enough, and another one.\\n".replace("\\\\", "\\")
    page.js(
        f"show([{{ name: 'big', text: Array.from({{ length: 20000 }}, (_, n) => n + ' {lines}').join('') }}]); 0"  # noqa: E501
    )
    size = page.js("state.text.length")
    assert size > 1_000_000 and page.js("$('document').textContent === state.text")
    guessed = page.js("$('document').scrollHeight")
    page.js("for (const b of blocks) b.element.style.contentVisibility = 'visible'; 0")
    assert 0.8 < guessed / page.js("$('document').scrollHeight") < 1.25
    page.js("for (const b of blocks) b.element.style.contentVisibility = ''; 0")
    page.js(
        "window.changed = new Set(); new MutationObserver((all) => all.forEach((m) => "
        "changed.add(m.target))).observe($('document'), { childList: true, subtree: true }); 0"
    )
    places = [10, size // 2, size - 60]
    page.js(f"mark({[[place, place + 40, 1] for place in places]}); 0")
    page.js(f"reach({places[2]}); 0")
    assert page.js("changed.size") <= 6 and page.js("blocks.length") > 200
    assert page.js(MARKS) == page.js(f"{places}.map((at) => state.text.slice(at, at + 40))")
    page.until("document.querySelectorAll('mark')[2].getBoundingClientRect().top < innerHeight")
    page.js("mark([]); 0")
    assert page.js(MARKS) == [] and page.js("$('document').textContent === state.text")
