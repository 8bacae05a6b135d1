"""The page of what an answer read: the planted passage is the darkest, and a hostile document stays
text.

Stops: markup of a document becoming markup of the page, a passage credited with its neighbour's
tokens, a half-written page.
"""

import json
import os
import re
import shutil
import subprocess
from array import array

import pytest
import torch

from engine.base.errors import BadCheckpoint, UsageError
from engine.evidence.provenance import Run, Trace, page, record, write_page, write_run
from tools.repo.sources import main

FACT = "The vault opens with the number 48213 and nothing else."
HOSTILE = (
    "</script><script>alert(1)</script> <img src=x onerror=alert(2)> "
    '"quoted" &amp; \u2028 <!-- and a comment.'
)


def planted(extra=""):
    """A Run over a document with FACT in its middle: two answer tokens read it, one reads another
    passage.
    """
    filler = [
        f"Line {i} says that nothing of interest happened on this quiet day." for i in range(40)
    ]
    document = "\n".join([*filler[:20], FACT, extra, *filler[20:]]).strip()
    text = document + "\nQ"
    words = list(re.finditer(r"\S+\s*", text))
    ends, at = array("q", [m.end() for m in words]), text.index(FACT)
    fact = torch.tensor([i for i, m in enumerate(words) if at <= m.start() < at + len(FACT)])
    other = torch.tensor([i for i, end in enumerate(ends) if 0 < end <= 30])
    trace = Trace()
    trace.add("48", {2: fact, 5: fact}, {5: torch.full((len(fact),), 0.5)})
    trace.add(
        "213",
        {5: torch.cat([other, fact])},
        {5: torch.cat([torch.full((len(other),), 0.05), torch.full((len(fact),), 0.4)])},
    )
    trace.add(".", {5: other}, {})
    return record(trace, text, ends, [(0, len(document))], "a <model>", "OmniKV()"), at


def test_the_planted_passage_is_the_darkest():
    run, at = planted()
    totals = run.totals()
    best = max(range(len(totals)), key=totals.__getitem__)
    start, stop, line = run.passages[best]
    assert run.text[start:stop] == FACT and start == at and line == 21
    assert max(run.reads[0], key=run.reads[0].get) == best and run.reads[0][best] == pytest.approx(
        0.5
    )
    assert max(run.reads[2], key=run.reads[2].get) == 0 and best not in run.reads[2]
    assert "".join(run.answer) == "48213."


def test_tokens_outside_every_passage_count_for_none():
    """The selection may hold tokens of the template, of the question and of empty lines; once an
    IndexError.
    """
    text, trace = "<s>One fact.\n\nQ", Trace()
    trace.add("A", {1: torch.arange(5)}, {1: torch.tensor([0.9, 0.1, 0.2, 0.9, 0.9])})
    run = record(trace, text, array("q", [3, 6, 12, 14, 15]), [(3, 12)], "m", "OmniKV()")
    assert run.reads == ({0: pytest.approx(0.15)},)


def test_a_document_of_markup_stays_text():
    run, _ = planted(HOSTILE)
    html = page(run)
    body = html.split('<script type="application/json" id="data">')[1]
    data, rest = body.split("</script>", 1)
    assert "<" not in data and ">" not in data and "&" not in data and "\u2028" not in data
    assert json.loads(data)["text"] == run.text and HOSTILE in run.text
    assert (
        "alert" not in html.replace(data, "")
        and "innerHTML" not in rest
        and "http://" not in html
        and "https://" not in html
    )
    assert "default-src 'none'" in html


DRIVE = """
const made = [];
function node(tag, text) {
  const one = { tag, textContent: text || "", children: [], style: {}, attributes: {}, on: null };
  one.appendChild = (child) => { one.children.push(child); return child; };
  one.setAttribute = (key, value) => { one.attributes[key] = value; };
  one.removeAttribute = () => {};
  one.replaceChildren = () => { one.children = []; };
  one.querySelectorAll = () => [];
  one.addEventListener = (kind, call) => { one.on = call; };
  return one;
}
const byId = {};
const document = {
  getElementById: (id) => byId[id] || (byId[id] = node(id)),
  createElement: (tag) => node(tag),
  createTextNode: (text) => node("", text),
  addEventListener: () => {},
};
byId.data = node("data", DATA);
SCRIPT
const texts = (one) => one.tag === "" || !one.children.length ? one.textContent : one.children.map(texts).join("");
console.log(JSON.stringify([byId.answer.children.map((c) => [c.tag, c.textContent]), texts(byId.list)]));
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
def test_the_answers_line_ends_are_outside_of_its_buttons():
    """A button is laid out as a box of its own, so that a line's end in it ends no line."""
    trace, text = Trace(), "One fact about a gate.\n\nAnother fact about a door.\n"
    trace.add("modify\nthe", {1: torch.tensor([0])}, {1: torch.tensor([0.9])})
    trace.add("\n\n- free", {1: torch.tensor([1])}, {1: torch.tensor([0.5])})
    ends, spans = array("q", [22, 50]), [(0, 22), (24, 50)]
    run = record(trace, text, ends, spans, "m", "o", names=["a.txt", "b.txt"])
    html = page(run)
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    data = json.dumps(html.partition('id="data">')[2].partition("</script>")[0])
    program = DRIVE.replace("SCRIPT", script).replace("DATA", data)
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer, listed = json.loads(done.stdout)
    assert "".join(text for _, text in answer) == "modify\nthe\n\n- free"
    assert [text for tag, text in answer if tag == "button"] == ["modify", "the", "-", "free"]
    assert listed.startswith("a.txt, line 1 ") and "b.txt, line 1 " in listed


def test_runs_survive_the_file_and_the_tool_makes_the_same_page(tmp_path, capsys):
    run, _ = planted(HOSTILE)
    write_run(run, tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
    assert main([str(tmp_path / "run.json")]) == 0
    assert (tmp_path / "run.html").read_text() == page(
        run
    ) and capsys.readouterr().out.strip().endswith("run.html")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 9, "text": "", "passages": [], "answer": [], "model": "", "method": ""}',
        '{"format": 1, "text": "a", "passages": [[0, 5, 1]], "answer": [], '
        '"model": "", "method": ""}',
        '{"format": 1, "text": "a", "passages": [], "answer": [["x", [[3, 1.0]]]], '
        '"model": "", "method": ""}',
    ],
)
def test_what_is_no_run_is_refused(tmp_path, text, capsys):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="run.json"):
        Run.load(tmp_path / "run.json")
    assert main([str(tmp_path / "run.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    run, _ = planted()
    with pytest.raises(UsageError, match="nowhere"):
        write_page(run, tmp_path / "nowhere" / "page.html")
    with pytest.raises(UsageError, match="absent.json"):
        Run.load(tmp_path / "absent.json")


def test_a_megabyte_of_document_is_recorded_in_bounded_time():
    text = "A sentence of some forty characters here. " * 25000
    ends = array("q", range(6, len(text) + 1, 6))
    trace = Trace()
    for _ in range(20):
        trace.add("x", {1: torch.randint(0, len(ends), (2048,))}, {})
    run = record(trace, text, ends, [(0, len(text))], "m", "o")
    assert (
        len(run.passages) > 20000
        and all(len(read) <= 12 for read in run.reads)
        and len(page(run)) < 4 * len(text)
    )


@pytest.mark.parametrize("write", [write_page, write_run])
def test_what_is_in_the_way_of_a_file_stays(write, tmp_path):
    """A device, a folder and a link keep their places; a name too long is one line."""
    run, _ = planted()
    (tmp_path / "folder").mkdir()
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    write(run, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and FACT in (tmp_path / "target").read_text()
    for name in ("folder", "pipe", "loop", "x" * 5000, "nul\0"):
        with pytest.raises(UsageError) as caught:
            write(run, tmp_path / name)
        assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "folder",
        "link",
        "loop",
        "pipe",
        "target",
    ]
