"""Markdown in answers: in a real browser, as it streams, and under 200 hostile answers.

Stops: an answer that becomes a script, a request, an attribute or an address of its own, that
loses words, that looks otherwise streamed than whole, or that takes longer than its length.
"""

import json
import random
import re

import pytest

from tests.engine.serve.browser import browser_needed, tab
from tests.engine.serve.scripted import saying

js = json.dumps
# draw a text in pieces, each drawn at once, and as a whole
DRAWN = """(pieces) => {
  const drawn = (parts) => {
    const article = document.createElement("article"), words = new Words(article, 0);
    $("log").append(article);
    for (const part of parts) { words.add(part); words.draw(); }
    words.end();
    return words.element;
  };
  const began = performance.now(), whole = drawn([pieces.join("")]), took = performance.now() - began;
  const same = drawn(pieces).outerHTML === whole.outerHTML, all = [...whole.querySelectorAll("*")];
  const found = {
    same, took, text: whole.textContent, html: whole.innerHTML,
    tags: [...new Set(all.map((e) => e.localName))],
    attributes: [...new Set(all.flatMap((e) => e.getAttributeNames()))],
    links: all.filter((e) => e.href !== undefined).map((e) => [e.protocol, e.rel, e.target]),
    classes: [...new Set(all.flatMap((e) => [...e.classList]))],
  };
  $("log").replaceChildren();
  return found;
}"""  # noqa: E501
TAGS = set(
    "p h3 h4 h5 h6 ul ol li blockquote hr pre code table thead tbody tr th td strong em del a span "
    "div".split()
)
ATTRIBUTES = set("class href rel target title start tabindex role aria-label scope".split())


def drawn(page, pieces):
    return page.js(f"({DRAWN})({js(pieces)})")


def plain(html):
    """Markup without the elements of words."""
    return re.sub(r"</?span[^>]*>", "", html)


LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer" title="{0}">{1}</a>'
CASES = [
    ("One.\nTwo.\n\nThree.", "<p>One.\nTwo.</p><p>Three.</p>"),
    ("# A\n## B #\n####### no", "<h3>A</h3><h4>B </h4><p>####### no</p>"),
    (
        "**a** *b* ***c*** __d__ _e_ ~~f~~",
        "<p><strong>a</strong> <em>b</em> <em><strong>c</strong></em> <strong>d</strong> <em>e</em> "  # noqa: E501
        "<del>f</del></p>",
    ),
    (
        "2 * 3 * 4, snake_case_name, a~b~c, **open",
        "<p>2 * 3 * 4, snake_case_name, a~b~c, **open</p>",
    ),
    ("*a **b** c* and **a*b**", "<p><em>a <strong>b</strong> c</em> and <strong>a*b</strong></p>"),
    (r"\*no\* \[x\](y) \\", "<p>*no* [x](y) \\</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    (
        '[a *b*](https://x.example/p?q=1 "t") (see [c](mailto:a@x.example))',
        "<p>"
        + LINK.format("https://x.example/p?q=1", "a <em>b</em>")
        + " (see "
        + LINK.format("mailto:a@x.example", "c")
        + ")</p>",
    ),
    (
        "https://x.example/a_b_c. [no](/etc) [1] [](https://x.example/)",
        "<p>"
        + LINK.format("https://x.example/a_b_c", "https://x.example/a_b_c")
        + ". [no](/etc) [1] "
        "[](" + LINK.format("https://x.example/", "https://x.example/") + ")</p>",
    ),
    (
        "![a chart](https://x.example/c.png)",
        "<p>" + LINK.format("https://x.example/c.png", "a chart") + "</p>",
    ),
    (
        "- a\n- b\n  - c\n    more\n- d\n\nend",
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c\nmore</p></li></ul></li>"
        "<li><p>d</p></li></ul><p>end</p>",
    ),
    (
        "3. a\n4. b\n\n   c\n\n5) d",
        '<ol start="3"><li><p>a</p></li><li><p>b</p><p>c</p></li></ol>'
        '<ol start="5"><li><p>d</p></li></ol>',
    ),
    ("It was\n1986. A year\n- yes", "<p>It was\n1986. A year</p><ul><li><p>yes</p></li></ul>"),
    ("48213. is the key", "<p>48213. is the key</p>"),
    (
        "> a\n> > b\n\n---\nc",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr><p>c</p>",
    ),
    (
        "```py\n*a*\n\n<b>\n```\nend",
        '<pre tabindex="0" role="region" aria-label="code, py"><code>*a*\n\n&lt;b&gt;\n</code></pre><p>end</p>',  # noqa: E501
    ),
    (
        "1. Do:\n   ```\n   x\n     y\n   ```\n2. Done",
        "<ol><li><p>Do:</p>"
        '<pre tabindex="0" role="region" aria-label="code"><code>x\n  y\n</code></pre></li><li><p>Done</p></li></ol>',  # noqa: E501
    ),
    ("~~~\nopen", '<pre tabindex="0" role="region" aria-label="code"><code>open\n</code></pre>'),
    (
        "Keys:\n| a | b |\n|:--|--:|\n| `x` | **y** |\n| p \\| q |\nend",
        '<p>Keys:</p><div class="table" tabindex="0" role="region" aria-label="table"><table><thead><tr>'  # noqa: E501
        '<th scope="col">a</th><th class="right" scope="col">b</th></tr></thead><tbody><tr><td>'
        '<code>x</code></td><td class="right"><strong>y</strong></td></tr><tr><td>p | q</td></tr></tbody>'  # noqa: E501
        "</table></div><p>end</p>",
    ),
    ("a | b\nno table", "<p>a | b\nno table</p>"),
]


@browser_needed
@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_markdown_becomes(page, number):
    text, html = CASES[number]
    for pieces in ([text], list(text)):
        found = drawn(page, pieces)
        assert plain(found["html"]) == html.replace(' class=""', "") and found["same"]


# ---------------------------------------------------------------- hostile answers

EVIL = "evil.example"
RUNS = "window.pwned=1"
MARKUP = [
    f"<script>{RUNS}</script>",
    f"<img src=https://img.{EVIL}/x onerror={RUNS}>",
    f"<svg onload={RUNS}><animate onbegin={RUNS}>",
    f"<iframe src=https://frame.{EVIL}/></iframe>",
    f"<iframe srcdoc='<script>parent.{RUNS}</script>'>",
    f"<a href='javascript:{RUNS}' onclick={RUNS}>go</a>",
    f"<style>@import 'https://style.{EVIL}/s.css'; body{{display:none}}</style>",
    f"<link rel=dns-prefetch href=//dns.{EVIL}><link rel=preload href=https://pre.{EVIL}/a as=image>",  # noqa: E501
    f"<meta http-equiv=refresh content='0;url=https://meta.{EVIL}/'>",
    f"<base href=https://base.{EVIL}/>",
    f"<form action=https://form.{EVIL}/><input autofocus onfocus={RUNS}>",
    f"<video poster=https://video.{EVIL}/p src=https://video.{EVIL}/v autoplay>",
    f"<object data=https://object.{EVIL}/></object><embed src=https://embed.{EVIL}/>",
    f"<details open ontoggle={RUNS}><summary>s</summary></details>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUNS}>",
    f"</code></pre></td></table></div><script>{RUNS}</script>",
    f"&lt;script&gt;{RUNS}&lt;/script&gt; &#60;img src=x onerror={RUNS}&#62;",
    f"<![CDATA[<script>{RUNS}</script>]]><!-- --!><img src=x onerror={RUNS}>",
    f"\"><img src=x onerror={RUNS}> ' onmouseover={RUNS} x='",
]
ADDRESSES = [
    f"javascript:{RUNS}",
    f"JaVaScRiPt:{RUNS}",
    f"java\tscript:{RUNS}",
    f"\x01javascript:{RUNS}",
    f"javascript://{EVIL}/%0a{RUNS}",
    f"&#106;avascript:{RUNS}",
    f"javascript&colon;{RUNS}",
    f"data:text/html,<script>{RUNS}</script>",
    f"data:image/svg+xml,<svg/onload={RUNS}>",
    f"vbscript:{RUNS}",
    "file:///etc/passwd",
    "blob:https://x/y",
    f"//{EVIL}/x",
    "/v1/forget",
    f"http:javascript:{RUNS}",
    f"view-source:https://{EVIL}/",
    f"ws://{EVIL}/",
]
FOLLOWED = [
    f"https://plain.{EVIL}/x\"onmouseover='{RUNS}'",
    f"https://user:{RUNS}@host.{EVIL}/",
    f"mailto:a@{EVIL}?body=<script>{RUNS}</script>",
    f"HTTPS://CASE.{EVIL}/<img/onerror={RUNS}>",
]
AROUND = [
    "{}",
    "# {}",
    "- {}\n  - {}",
    "> {}",
    "1. {}",
    "**{}**",
    "*a _{}_ b*",
    "`{}`",
    "``` {}\n{}\n```",
    "```\n{}\n```",
    "|{}|b|\n|--|--|\n|{}|c|",
    "~~{}~~ {}",
    "[{}](https://text." + EVIL + "/)",
    "![{}](https://alt." + EVIL + "/i.png)",
    "[t](https://title." + EVIL + '/ "{}")',
]
LINKED = [
    "[go]({})",
    "[go](<{}>)",
    "![go]({})",
    "<{}>",
    "{}",
    "[![go]({})]({})",
    "- [go]({})",
    "|[go]({})|b|\n|--|--|\n",
    "[go]: {}\n\n[go]",
    '[go]( {} "title")',
    "> **[go]({})**",
]
BOMBS = [
    "*a **b " * 6000,
    "**a *" * 4000 + "b*" * 4000,
    "[" * 30000,
    "[a](b" * 6000,
    "![" * 9000 + "](x)" * 9000,
    "`" * 9999 + " a " + "`" * 9998,
    "".join("`" * n + " " for n in range(1, 250)),
    ">" * 20000 + "x",
    "- " * 8000 + "x",
    "".join("  " * n + "- x\n" for n in range(300)),
    "|" * 20000 + "\n|-\n",
    "|a" * 5000 + "\n" + "|-" * 5000 + "\n",
    "https://(" * 6000,
    "(https://x." + EVIL + "/" + "(" * 20000,
    "#" * 20000 + " x",
    "# " + " #" * 9000,
    " " * 30000 + "x",
    "\n" * 30000 + "x",
    "-" * 30000 + "x",
    "~" * 30000 + "`",
    "\\" * 30000,
    "_a_" * 9000,
    "1. a\n" * 5000,
    "\t- x\n" * 5000,
    "x" * 200000,
    "```\n" * 5001,
]


def words_of(text):
    return re.findall(r"[A-Za-z0-9]+", text)


def hostile():
    """200 answers: (text, words that must be on the page)."""
    chance, found = random.Random(0), []
    for bomb in BOMBS:
        found.append((f"first {bomb}\n\nlast", ["first", "last"]))
    for around in LINKED:
        for address in (*ADDRESSES[len(found) % 2 :: 2], chance.choice(FOLLOWED)):
            kept = words_of(address) if address in ADDRESSES else []
            text = "first " * (around[0] not in "-|>") + around.replace("{}", address) + "\n\nlast"
            found.append((text, ["last", *kept]))
    while len(found) < 200:
        around, markup = AROUND[len(found) % len(AROUND)], chance.choice(MARKUP)
        # a title is an attribute of no element here, the words behind three backticks are a label
        kept = [] if "title." in around else words_of(markup)
        found.append((around.replace("{}", markup) + " last", kept if "```" in around else kept))
    return found[:200]


@browser_needed
def test_two_hundred_hostile_answers_do_nothing(sparse, tmp_path_factory):
    folder, answers = tmp_path_factory.mktemp("hostile"), hostile()
    log, chance, seen, links = folder / "net.json", random.Random(1), set(), 0
    assert len(answers) == 200
    with tab(folder, f"--log-net-log={log}", "--net-log-capture-mode=Everything") as page:
        page.open(sparse.url)
        page.until("state.model !== null")
        page.requests.clear()
        for text, kept in answers:
            cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(8))})
            found = drawn(page, [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
            assert found["same"], text[:200]
            assert found["took"] < 5000, (text[:60], found["took"])
            assert set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES
            assert set(found["classes"]) <= {"read", "table", "right", "centre"}
            for protocol, rel, target in found["links"]:
                assert protocol in ("http:", "https:", "mailto:")
                assert rel == "noopener noreferrer" and target == "_blank"
            links += len(found["links"])
            seen |= set(found["tags"])
            written = found["text"]
            for word in kept:
                assert word in written, (word, text[:200])
        page.js("new Promise((done) => setTimeout(done, 300))")  # what would have been put off
        assert page.js("window.pwned") is None and page.requests == [] and page.errors == []
        assert page.js("document.title") == "Ask a document"
        # they were Markdown to it all the same, and its log would have shown a look-up
        assert seen >= TAGS - {"h4", "h5", "h6", "hr"} and links > 40
        page.call("Page.navigate", url="http://control.invalid/")
        page.call("Browser.close")
        page.ended()
    events = log.read_text(encoding="utf-8", errors="replace")
    assert "control.invalid" in events and EVIL not in events.lower()


@browser_needed
def test_a_hostile_answer_comes_through_the_whole_server(page, sparse, monkeypatch):
    said = (
        f"# Keys\n\n[go](javascript:{RUNS}) and [on](https://{EVIL}/) ![x](https://{EVIL}/i.png)"
        f"\n\n<img src=x onerror={RUNS}>\n\n- **48213**"
    )
    page.requests.clear()
    with saying(sparse.service.llm, said, monkeypatch):
        page.js("$('question').focus(); 0")
        page.call("Input.insertText", text="Who?")
        page.key("Enter")
        page.until("!state.running && state.turns.length === 1 && state.turns[0].answer")
    words = "$('log').querySelector('.words')"
    assert page.js(f"{words}.querySelector('h3').textContent") == "Keys"
    assert page.js(f"[...{words}.querySelectorAll('a')].map((a) => a.href)") == [
        f"https://{EVIL}/",
        f"https://{EVIL}/i.png",
    ]
    assert page.js(f"{words}.querySelector('li strong').textContent") == "48213"
    assert page.js("state.turns[0].answer") == said and page.js("window.pwned") is None
    assert all(url.startswith(sparse.url) for url in page.requests)
