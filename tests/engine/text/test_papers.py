"""The text of documents in other formats, and what is done to those that attack.

Stops: markup or a script read as text, chapters out of order, a bomb that unpacks, entities that
multiply, a document that never ends, an error of many lines or of no type.
"""

import gzip
import io
import sys
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import UsageError
from engine.text.papers.papers import paper
from tests.engine.text.papers_made import archive, docx, epub, odt, paragraph, pdf

MOST = 1 << 20
BOOM = '<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a "haha"><!ENTITY b "&a;&a;&a;&a;">]>'


def refused(data, *words, most=MOST, seconds=60):
    with pytest.raises(UsageError) as caught:
        paper(data, "given", most, seconds)
    line = str(caught.value)
    assert line.startswith("given") and "\n" not in line and len(line) <= 300
    assert all(word in line for word in words), line


def read(data, most=MOST):
    found = paper(data, "given", most)
    return found.text, found.was


def test_html_is_what_a_reader_sees():
    page = (
        "<!doctype html><html><head><title>T</title><style>p{}</style></head><body>"
        "<script>if (a < b) alert('x')</script><h1>Lily  &amp; I</h1><p>ran\nfar<br>away</p>"
        "<ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr></table>"
        "<pre>  kept\n    so</pre><p hidden>caf\u00e9</body></html>"
    )
    text, was = read(page.encode())
    assert was == "HTML" and "alert" not in text and "T\n" not in text and "p{}" not in text
    assert text.startswith("Lily & I\n\nran far\naway\n\none\ntwo") and "a\tb" in text
    assert "kept\n" in text and text.endswith("caf\u00e9")
    latin = b'<html><meta charset="iso-8859-1"><p>caf\xe9</html>'
    assert read(latin)[0] == "caf\u00e9"
    refused(b"<html><p>caf\xe9</html>", "0xe9", "HTML")
    assert read(b"<!-- -->" * 400 + b"<p>x")[1] == ""  # and is told in no time
    # code that speaks of HTML is no page
    code = 'page = "<html><p>x</p></html>"\n'
    assert read(code.encode()) == (code, "")


def test_word_documents():
    table = (
        "<w:tbl><w:tr><w:tc>" + paragraph("a") + "</w:tc><w:tc>" + paragraph("b") + "</w:tc></w:tr>"
        "</w:tbl>"
    )
    again = (
        '<mc:AlternateContent xmlns:mc="m"><mc:Choice>' + paragraph("box") + "</mc:Choice>"
        "<mc:Fallback>" + paragraph("box") + "</mc:Fallback></mc:AlternateContent>"
    )
    deleted = "<w:p><w:r><w:delText>gone</w:delText></w:r><w:r><w:t>x</w:t><w:tab/></w:r></w:p>"
    text, was = read(docx(paragraph("One &amp; ", "two") + table + again + deleted))
    assert was == "DOCX" and text.startswith("One & two\n\n") and text.count("box") == 1
    assert [cell.strip() for cell in text.split("\n\n")[1].split("\n")[0].split("\t")] == ["a", "b"]
    assert "gone" not in text and text.endswith("x")
    notes = '<w:footnotes xmlns:w="w">' + paragraph("a note") + "</w:footnotes>"
    assert read(docx(paragraph("One"), footnotes=notes))[0] == "One\n\na note"


def test_open_documents_and_books():
    body = '<text:h>Head</text:h><text:p>a<text:s text:c="999999999"/>b<text:line-break/>c</text:p>'
    text, was = read(odt(body))
    assert was == "ODT" and text.startswith("Head\n\na ") and text.endswith("b\nc")
    assert len(text) < 2000
    chapters = [f"<h1>{n}</h1><p>Chapter {n}.</p>" for n in "one two three".split()]
    text, was = read(epub(*chapters))
    assert was == "EPUB, 3 chapters" and text.index("one") < text.index("two") < text.index("three")
    locked = epub(
        "<p>x</p>", **{"META-INF/encryption.xml": '<e><EncryptionMethod Algorithm="a"/></e>'}
    )
    refused(locked, "is encrypted")


def test_pdf():
    pytest.importorskip("pypdf")
    assert read(pdf("Once there was Lily.", "", "She ran.")) == (
        "Once there was Lily.\n\n\n\nShe ran.".replace("\n\n\n", "\n"),
        "PDF, 3 pages (1 without text)",
    )
    refused(pdf("", ""), "PDF of 2 pages without text")
    assert read(b"\n" + pdf("Lily."))[1] == "PDF, 1 page"
    locked = "/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>]"
    refused(pdf("Lily.", trailer=locked % ("11" * 32, "22" * 32)), "is encrypted")
    refused(pdf("Lily.")[:200], "given: ")
    refused(b"%PDF-1.7\n" + b"\xff" * 999, "given: ")
    # a tree of pages that goes round
    refused(pdf("Lily.").replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"), "given: ")
    speaks = "A page says %PDF-1.4 and goes on.\n"
    assert read(speaks.encode()) == (speaks, "")


def test_without_the_library_a_pdf_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(pdf("Lily."), "found a PDF, expected text; pip install pypdf, or pdftotext FILE -")


def test_plain_text_in_its_encodings():
    text = "Die Stra\u00dfe \U0001f33f\n"
    for name in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert read(text.encode(name))[0] == text
    assert read(b"\xfe\xff" + text.encode("utf-16-be")) == (text, "UTF-16")
    assert read(gzip.compress(text.encode()[:3]) + gzip.compress(text.encode()[3:])) == (
        text,
        "gzip",
    )
    refused(b"\xff\xfea\0b", "UTF-16")
    refused("caf\xe9".encode("latin-1"), "0xe9 at 3", "iconv -f latin1")
    with pytest.raises(UsageError) as caught:
        paper(b"caf\xe9\0", "given", MOST)
    assert "latin1" not in str(caught.value) and "binary" in str(caught.value)
    refused(b"text\0text", "binary data (byte 0x00 at 4)")
    refused(b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "an image")
    refused(b"{\\rtf1 hello}", "RTF")
    refused(gzip.compress(text.encode())[:-9], "damaged gzip")
    refused(gzip.compress(gzip.compress(b"x")), "gzip within gzip")


def test_bombs_do_not_unpack():
    refused(gzip.compress(b"a" * (3 * MOST)), "unpacked: found more than")
    refused(docx(paragraph("a" * (20 * MOST))), "more than")
    large = archive({"word/document.xml": "<d/>", "word/footnotes.xml": " " * (9 * MOST)})
    refused(large, "unpacks to more")
    # a directory that understates what is packed
    lying = bytearray(large)
    at = lying.rindex(b"PK\x01\x02")
    lying[at + 24 : at + 28] = (9).to_bytes(4, "little")
    refused(bytes(lying), "given: ")
    many = archive({f"{n}": "" for n in range(20_001)})
    refused(many, "20,001 entries")
    refused(docx(paragraph("a" * 2000)), "more than 1,000 characters", most=1000)
    refused(b"<html><p>" + b"a" * 2000, "more than 1,000 characters", most=1000)


def test_entities_and_strange_archives_are_refused():
    refused(archive({"word/document.xml": BOOM + "<d>&b;</d>"}), "DOCTYPE")
    outside = BOOM.replace('"haha"', 'SYSTEM "file:///etc/passwd"')
    refused(archive({"word/document.xml": outside + "<d>&a;</d>"}), "DOCTYPE")
    refused(archive({"a.txt": "x"}), "found a ZIP archive, expected a document")
    refused(archive({"xl/workbook.xml": "<x/>"}), "found a spreadsheet")
    refused(docx("<w:p"), "is damaged")
    refused(docx(""), "found no text in this DOCX")
    refused(docx(paragraph("x"))[:-30], "is damaged")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as zipped:
        zipped.writestr("word/document.xml", "<d/>")
    refused(packed.getvalue(), "compression")


def test_a_document_that_never_ends_is_stopped():
    """HTML that the standard library's parser takes quadratic time over."""
    refused(b"<html>" + b"<!--" * 4_000_000, "stopped", seconds=3, most=1 << 24)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_damaged_documents_are_one_line_or_text(data):
    pytest.importorskip("pypdf")
    whole = data.draw(
        st.sampled_from([pdf("Lily."), docx(paragraph("Lily.")), epub("<p>Lily.</p>")])
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = paper(bytes(damaged), "given", MOST, 60)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        found.text.encode()
