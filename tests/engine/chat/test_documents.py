"""Documents that a chat is given: in other formats than text, and several of them.

Stops: a document's source read as its text, a document dropped or cut without a word, a passage
said to be of another file.
"""

import gzip
import io
import json

import pytest

from engine.chat.cli import main
from tests.builders import POCKET
from tests.engine.chat.typed_chat import chat, typed
from tests.engine.text.papers_made import docx, epub, odt, paragraph, pdf

HTML = (
    b"<!DOCTYPE html><html><head><title>T</title><style>p { color: red }</style>"
    b"<script>alert(1)</script></head><body><h1>Lily</h1><p>She &amp; I<br>ran.</p></body></html>"
)
READ = {
    "a.pdf": (pdf("Once there was Lily.", "She ran."), "PDF, 2 pages, read as text"),
    "a.docx": (docx(paragraph("Once there ", "was Lily.") + paragraph("She ran.")), "DOCX, read"),
    "a.odt": (odt("<text:p>Once there was Lily.</text:p><text:p>She ran.</text:p>"), "ODT, read"),
    "a.epub": (epub("<p>Once there was Lily.</p>", "<p>She ran.</p>"), "EPUB, 2 chapters, read"),
    "a.txt.gz": (gzip.compress(b"Once there was Lily.\n\nShe ran.\n"), "gzip, read as text"),
    "utf16.txt": ("Once there was Lily.\n\nShe ran.".encode("utf-16"), "UTF-16, read as text"),
    "a.html": (
        b"<html><script>alert(1)</script><p>Once there was <b>Lily</b>.<p>She ran.",
        "HTML, read as text",
    ),
}


def held(llm):
    return llm.tokenizer.backend.decode(llm.sessions[0].ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("renamed", [False, True])
def test_a_document_is_read_as_text_by_its_first_bytes(fake, capsys, tmp_path, name, renamed):
    if name.endswith("pdf"):
        pytest.importorskip("pypdf")
    llm, (data, said) = fake("Lily."), READ[name]
    path = tmp_path / ("renamed.txt" if renamed else name)
    path.write_bytes(data)
    assert main(["--model", "x", "-f", str(path), "-p", "Who?"]) == 0
    assert "user: Once there was Lily.\n\nShe ran.\n\nWho?<|end|>" in held(llm)
    assert f"{path.name}: {said}" in capsys.readouterr().err


def test_several_documents_are_read_in_order_with_their_names(fake, capsys, tmp_path):
    llm = fake("Lily.")
    for name, text in (("b.txt", "Lily ran."), ("a.txt", "Tom sat.")):
        (tmp_path / name).write_text(text + "\n")
    flags = [part for name in ("b.txt", "a.txt") for part in ("-f", str(tmp_path / name))]
    assert main(["--model", "x", *flags, "-p", "Who?", "--json"]) == 0
    out = capsys.readouterr().out
    assert "user: b.txt:\n\nLily ran.\n\na.txt:\n\nTom sat.\n\nWho?<|end|>" in held(llm)
    assert json.loads(out)["documents"] == [
        {"name": "b.txt", "characters": 9},
        {"name": "a.txt", "characters": 8},
    ]


def test_a_document_given_twice_is_read_once_and_of_one_name_two_are_told_apart(
    fake, capsys, tmp_path
):
    llm = fake("Lily.")
    (tmp_path / "d").mkdir()
    for place in (tmp_path / "a.txt", tmp_path / "d" / "a.txt"):
        place.write_text(f"In {place.parent.name}.")
    given = [tmp_path / "a.txt", tmp_path / "d" / "a.txt", tmp_path / "d" / ".." / "a.txt"]
    flags = [part for path in given for part in ("-f", str(path))]
    assert main(["--model", "x", *flags, "-p", "Who?"]) == 0
    assert held(llm).count("In ") == 2 and f"{given[1]}:\n\nIn d." in held(llm)
    assert f"{given[2]}: given twice, read once" in capsys.readouterr().err


def test_documents_alone_are_read_and_each_piped_line_is_a_question(
    fake, monkeypatch, capsys, tmp_path
):
    llm = fake("Lily.", "A goat.")
    (tmp_path / "a.txt").write_text("Lily had a goat.")
    flags = ["-f", str(tmp_path / "a.txt")]
    code, out, err = chat(llm, monkeypatch, capsys, "Who?", "What had she?", flags=flags)
    assert (code, out) == (0, "Lily.\nA goat.\n") and "no question" not in err
    spelled = held(llm)
    assert "Lily had a goat.\n\nWho?<|end|>" in spelled and "What had she?<|end|>" in spelled
    assert "/help" not in err and "ask about the document" not in err


def test_documents_without_any_question_say_that_none_came(fake, monkeypatch, capsys, tmp_path):
    llm = fake("Lily.")
    flags = []
    for name in "ab":
        (tmp_path / name).write_text("Lily ran.")
        flags += ["-f", str(tmp_path / name)]
    code, out, err = chat(llm, monkeypatch, capsys, flags=flags)
    assert (code, out) == (0, "") and "no question came on standard input: ask one with -p" in err


def test_on_a_terminal_a_document_alone_opens_the_chat(fake, monkeypatch, capsys, tmp_path):
    class Person(io.StringIO):
        def isatty(self):
            return True

    llm = fake("Lily.")
    (tmp_path / "a.txt").write_text("Lily ran.")
    monkeypatch.setattr("sys.stdin", Person("Who?\n"))
    assert main(["--model", "x", "-f", str(tmp_path / "a.txt")]) == 0
    out, err = capsys.readouterr()
    assert out == "Lily.\n" and "Lily ran.\n\nWho?<|end|>" in held(llm)
    assert "ask about the document" in err and "no question came" not in err


def test_standard_input_beside_a_document_leaves_nothing_to_ask_with(
    fake, monkeypatch, capsys, tmp_path
):
    fake("Lily.")
    (tmp_path / "a.txt").write_text("Lily ran.")
    piped = io.TextIOWrapper(io.BytesIO(b"Lily sat."))
    monkeypatch.setattr("sys.stdin", piped)
    assert main(["--model", "x", "-f", str(tmp_path / "a.txt"), "-f", "-"]) == 2
    said = "-f: found 2 documents, standard input (-) among them, and no question, expected -p"
    assert said in capsys.readouterr().err


def test_read_takes_the_same_formats(fake, monkeypatch, capsys, tmp_path):
    (tmp_path / "a.docx").write_bytes(READ["a.docx"][0])
    llm = fake("Lily.")
    code, out, err = chat(llm, monkeypatch, capsys, f"/read {tmp_path / 'a.docx'}", "Who?")
    assert code == 0 and "a.docx: DOCX, read as text" in err
    assert "Once there was Lily.\n\nShe ran.\n\nWho?" in held(llm)


def begun(fake, monkeypatch, capsys, tmp_path, *lines):
    """(model, stderr) of a chat over two documents that begins with a question."""
    llm = fake("Lily.")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"The text of {name} is a long one.")
    flags = ["-i", "-f", str(tmp_path / "a.txt"), "-f", str(tmp_path / "b.txt")]
    code, _, err = chat(llm, monkeypatch, capsys, "Who?", *lines, flags=flags)
    assert code == 0
    return llm, err


def test_reset_goes_back_to_the_end_of_the_documents(fake, monkeypatch, capsys, tmp_path):
    llm, err = begun(fake, monkeypatch, capsys, tmp_path, "/reset", "What?")
    spelled, log = held(llm), llm.sessions[0].log
    assert "text of b.txt is a long one.\n\nWhat?<|end|>" in spelled and "Who?" not in spelled
    assert "a new conversation begins: a.txt, b.txt stay read (/reset all drops them)" in err
    assert not any(entry[0] == "truncate" and entry[2] == 0 for entry in log)


def test_a_document_read_behind_a_question_is_dropped_by_name(fake, monkeypatch, capsys, tmp_path):
    (tmp_path / "c.txt").write_text("The last one.")
    lines = (f"/read {tmp_path / 'c.txt'}", "/reset", "What?")
    llm, err = begun(fake, monkeypatch, capsys, tmp_path, *lines)
    assert "b.txt stay read (/reset all drops them); c.txt is no longer read: /read it again" in err
    assert "The last one." not in held(llm)


def test_reset_all_and_a_system_prompt_say_what_they_drop(fake, monkeypatch, capsys, tmp_path):
    said = "a.txt, b.txt are no longer read: /read them again"
    llm, err = begun(fake, monkeypatch, capsys, tmp_path, "/reset all", "What?")
    assert f"the context is empty; {said}" in err and "a.txt" not in held(llm)
    llm, err = begun(fake, monkeypatch, capsys, tmp_path, "/system Be brief.", "/reset")
    assert f"since the prompt stands at its start; {said}" in err
    assert "the context is empty; the system prompt stays" in err
    _, err = begun(fake, monkeypatch, capsys, tmp_path, "/reset some")
    assert "/reset: found 'some', expected nothing or all" in err


def test_a_question_to_the_shipped_model_is_about_its_own_document(capsys):
    flags = ["--threads", "1", "-n", "16", "-p", "What is the pass key of Alice?"]
    assert main(flags) == 0
    out, err = capsys.readouterr()
    assert "66160" in out and "this model's own, welcome.txt, is read" in err


@pytest.mark.parametrize("more", [[], ["-i"]], ids=["alone", "stays"])
def test_beside_a_given_document_the_shipped_models_own_is_not_read(
    monkeypatch, capsys, tmp_path, more
):
    (tmp_path / "mine.txt").write_text("The pass key of Zoe is 11223. Remember it.")
    typed(monkeypatch, "What is the pass key of Alice?")
    assert main(["--threads", "1", "-n", "16", "-f", str(tmp_path / "mine.txt"), *more]) == 0
    out, err = capsys.readouterr()
    assert "66160" not in out and "welcome.txt" not in err and "a town's news" not in err
    assert "mine.txt: " in err


OWN = (POCKET / "welcome.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "folder, text, warned",
    [(POCKET, "My book.\n", True), (POCKET, OWN, False), ("/elsewhere", "My book.\n", False)],
)
def test_the_model_in_the_box_says_once_that_it_knows_no_other_texts(
    fake, monkeypatch, capsys, tmp_path, folder, text, warned
):
    """A newcomer's own file got nonsense for an answer, and no word on why."""
    llm = fake("nonsense")
    llm.folder = folder
    path = tmp_path / "mine.txt"
    path.write_text(text)
    _, _, err = chat(
        llm, monkeypatch, capsys, "Who?", f"/read {path}", flags=["-f", str(path), "--quiet"]
    )
    assert err.count("expect nonsense") == warned
    assert err.count("--list-models --fits") == warned
    main(["--model", "x", "-f", str(path), "-p", "Who?", "--json"])
    out, err = capsys.readouterr()
    assert "expect nonsense" not in out and err.count("expect nonsense") == warned
