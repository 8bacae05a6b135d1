"""The page's files: what is plainly text is decoded in the page, the rest is the server's to judge.

Stops: a page that reads bytes as text, other words than the chat's, a file without a bound.
"""

import base64
import json
import re
import shutil
import subprocess

import pytest

from engine.base.errors import UsageError
from engine.serve import documents
from engine.serve.page import TEXT
from engine.terminal.documents import read_document
from tests.engine.serve.conftest import serving
from tests.engine.text.papers_made import docx, paragraph, pdf

LATIN = "Die Stra\xdfe ist sch\xf6n.".encode("latin-1")
FILES = {
    "a.pdf": pdf("Once there was Lily."),
    "a.docx": docx(paragraph("Once there was Lily.")),
    "a.html": b"<html><script>alert(1)</script><p>Once there was Lily.</p></html>",
    "latin.txt": LATIN,
    "utf16.txt": "Once there was Lily.".encode("utf-16"),
    "image.png": b"\x89PNG\r\n\x1a\n\0\0",
    "binary": b"text\0text",
    "rtf.txt": b"{\\rtf1 hello}",
}


def sent(server, name, data, **more):
    body = {"name": name, "data": base64.b64encode(data).decode()}
    return server.post("/v1/text", body, **more)


@pytest.mark.parametrize("name", FILES)
def test_the_server_says_of_a_file_what_the_chat_says(server, name, tmp_path, monkeypatch):
    pytest.importorskip("pypdf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(FILES[name])
    reply = sent(server, name, FILES[name])
    try:
        found = read_document(name)
    except UsageError as error:
        assert reply.status_code == 400 and reply.json()["error"]["message"] == str(error)
    else:
        assert reply.json() == {"text": found.text, "note": found.note}
        assert reply.status_code == 200 and "Once there was Lily." in found.text


def test_what_is_no_document_is_refused(server, monkeypatch):
    for body in ({"name": "a", "data": "!"}, {"name": "a", "data": 7}, {"data": ""}, {"name": "a"}):
        assert server.post("/v1/text", body).status_code == 400
    hostile = sent(server, "a\x1b[2J\n" * 99, b"\0").json()["error"]["message"]
    assert "\x1b" not in hostile and "\n" not in hostile and len(hostile) < 200
    monkeypatch.setattr(documents, "MOST", 2 << 20)
    # more than other bodies may have, but no more than that
    assert sent(server, "a", b"a" * (1 << 20)).status_code == 200
    assert sent(server, "a", b"a" * (2 << 20)).status_code == 413


def test_a_document_needs_the_key(pocket):
    with serving(pocket, keys=["secret"]) as locked:
        assert sent(locked, "a", b"a").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert sent(locked, "a", b"a", headers=headers).json() == {"text": "a", "note": ""}


DRIVE = """
const log = [];
let said = "";
function tell(text) { said = text; }
async function call(path, body) { log.push([path, body]); return { json: async () => ({ text: "taken", note: "PDF" }) }; }
function begin(all) { log.push(["begin", ...all]); }
SCRIPT
(async () => {
  for (const [name, bytes] of FILES) {
    const file = { name, arrayBuffer: async () => new Uint8Array(bytes).buffer };
    await take([file]);
  }
  const folder = { name: "folder", arrayBuffer: async () => { throw Object.assign(new Error("x"), { name: "NotFoundError" }); } };
  await take([folder, ...["one", "two"].map((name) => ({ name, arrayBuffer: async () => new Uint8Array([65]).buffer }))]);
  console.log(JSON.stringify([log, said]));
})();
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
def test_the_page_sends_what_is_not_plainly_text():
    script = re.search(r"// -+ files\n.*?(?=// -{9})", TEXT, re.DOTALL)[0]
    text = "Die Stra\xdfe \U0001f33f <b> is fine".encode()
    given = [["plain.txt", list(text)], *([name, list(data)] for name, data in FILES.items())]
    program = DRIVE.replace("SCRIPT", script).replace("FILES", json.dumps(given))
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    log, state = json.loads(done.stdout)
    assert log[0] == ["begin", {"name": "plain.txt", "text": text.decode(), "note": ""}]
    for at, (name, data) in enumerate(FILES.items()):
        address, body = log[1 + 2 * at]
        assert address == "/v1/text" and body["name"] == name
        assert base64.b64decode(body["data"]) == data
        assert log[2 + 2 * at] == ["begin", {"name": name, "text": "taken", "note": "PDF"}]
    # of several, one that is refused keeps no other from being read
    several = [{"name": name, "text": "A", "note": ""} for name in ("one", "two")]
    assert log[1 + 2 * len(FILES) :] == [["begin", *several]]
    assert state == "folder: cannot be read; is it a folder? The others were read."


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node on this machine")
@pytest.mark.parametrize(
    ("method", "evidence", "words"),
    [
        ("sparse", {"selections": 0}, "Every step read everything: no passage was chosen."),
        ("sparse", {"selections": 9}, "more passages equally than can be listed"),
        ("exact", {"selections": 0, "figures": {"drafted": 7}}, "drafts were copied from where"),
        ("exact", {"selections": 0, "figures": {"drafted": 0}}, "nothing was drafted."),
    ],
)
def test_the_page_says_why_an_answer_has_no_passages(method, evidence, words):
    function = re.search(r"function nothing\(.*?\n}\n", TEXT, re.DOTALL)[0]
    given = json.dumps({"method": method, "evidence": evidence})
    program = f"{function}\nconsole.log(nothing({given}));"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert words in done.stdout, done.stderr
