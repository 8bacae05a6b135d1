"""The text of documents that are ZIP archives of XML: DOCX, ODT and EPUB.

Part of the child process engine/text/papers/worker.py; imports the standard library alone. Archives
are untrusted: entries and unpacked bytes are bounded before they are read, XML with a DOCTYPE (so
with entities of its own) is refused.
"""

from __future__ import annotations

import io
import posixpath
import re
import urllib.parse
import zipfile
from collections.abc import Callable
from xml.parsers import expat

ENTRIES = 20_000
ENTRY = b"PK\x01\x02"  # begins every entry of an archive's directory
RATIO = 8  # XML takes so many bytes for one of text, at most; ordinary documents 3 to 5
SPACES = 1000  # most that one <text:s> of an ODT writes
FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


class Refused(Exception):
    """What is wrong with a document, as the rest of a sentence that begins with its name."""


class Archive:
    """An archive whose parts may unpack to RATIO * most bytes together."""

    def __init__(self, data: bytes, most: int) -> None:
        # bounded before the directory becomes objects
        if (found := data.count(ENTRY)) > ENTRIES:
            raise Refused(f"found an archive of {found:,} entries, expected at most {ENTRIES:,}")
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self.names = frozenset(self._zip.namelist())
        self.left = RATIO * most

    def read(self, name: str) -> bytes:
        """One part, whole. Raises Refused, KeyError, and zipfile's and zlib's errors."""
        part = self._zip.getinfo(name)
        if part.flag_bits & 1:
            raise Refused("is encrypted, expected a document that anybody can open")
        if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Refused("found a compression that documents do not have")
        if part.file_size > self.left:
            raise Refused("unpacks to more than the context can hold")
        with self._zip.open(part) as file:
            data = file.read(self.left + 1)
        self.left -= len(data)
        if self.left < 0:  # the directory understated it
            raise Refused("unpacks to more than the context can hold")
        return data


def _parse(data: bytes, start: Callable[[str, dict[str, str]], None], **more: Callable) -> None:
    """Walk over XML; `start`, `end` and `text` get names as namespace URI, space, local name."""
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True

    def refuse(*_: object) -> None:
        raise Refused("found XML with a DOCTYPE, expected none in such a document")

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = more.get("end")
    parser.CharacterDataHandler = more.get("text")
    parser.Parse(data, True)


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def docx(archive: Archive) -> str:
    """Paragraphs and tables, then footnotes and endnotes."""
    parts = ["word/document.xml", "word/footnotes.xml", "word/endnotes.xml"]
    return "\n\n".join(_word(archive.read(name)) for name in parts if name in archive.names)


def _word(data: bytes) -> str:
    written: list[str] = []
    inside = {"t": 0, "tc": 0, "Fallback": 0}
    marks = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
    ends = {"tc": "\t", "tr": "\n"}

    def start(name: str, attributes: dict[str, str]) -> None:
        tag = _local(name)
        if tag in inside:
            inside[tag] += 1
        elif tag in marks and not inside["Fallback"]:
            # a <w:tab> within <w:tabs> is a stop of the ruler and has a position
            if not any(_local(key) == "pos" for key in attributes):
                written.append(marks[tag])

    def end(name: str) -> None:
        tag = _local(name)
        if tag in inside:
            inside[tag] -= 1
        if inside["Fallback"]:
            return
        if tag == "p":
            written.append(" " if inside["tc"] else "\n\n")
        elif tag in ends:
            written.append(ends[tag])

    def text(data: str) -> None:
        if inside["t"] and not inside["Fallback"]:  # which says again what came before it
            written.append(data)

    _parse(data, start, end=end, text=text)
    return "".join(written)


def odt(archive: Archive) -> str:
    """Paragraphs and headings."""
    written: list[str] = []
    open_ = [0, 0]  # paragraphs; notes and changes that are not in the text

    def start(name: str, attributes: dict[str, str]) -> None:
        tag = _local(name)
        open_[0] += tag in ("p", "h")
        open_[1] += tag in ("tracked-changes", "annotation")
        if open_[1] or not open_[0]:
            return
        if tag == "s":
            counts = [value for key, value in attributes.items() if _local(key) == "c"]
            count = counts[0] if counts else "1"
            written.append(" " * min(SPACES, int(count[:9]) if count.isdigit() else 1))
        elif tag in ("tab", "line-break"):
            written.append("\t" if tag == "tab" else "\n")

    def end(name: str) -> None:
        tag = _local(name)
        open_[0] -= tag in ("p", "h")
        open_[1] -= tag in ("tracked-changes", "annotation")
        if tag in ("p", "h") and not open_[1]:
            written.append("\n\n")

    def text(data: str) -> None:
        if open_[0] and not open_[1]:
            written.append(data)

    _parse(archive.read("content.xml"), start, end=end, text=text)
    return "".join(written)


def epub(archive: Archive) -> list[bytes]:
    """The chapters' pages in the order of the book, not yet text."""
    if "META-INF/encryption.xml" in archive.names:
        _require_open(archive.read("META-INF/encryption.xml"))
    books: list[str] = []

    def found(name: str, attributes: dict[str, str]) -> None:
        if _local(name) == "rootfile":
            books.append(attributes.get("full-path", ""))

    _parse(archive.read("META-INF/container.xml"), found)
    if not books:
        raise Refused("names no book in META-INF/container.xml")
    pages: dict[str, str] = {}
    spine: list[str] = []

    def listed(name: str, attributes: dict[str, str]) -> None:
        tag = _local(name)
        if tag == "item" and "html" in attributes.get("media-type", ""):
            pages[attributes.get("id", "")] = attributes.get("href", "")
        elif tag == "itemref":
            spine.append(attributes.get("idref", ""))

    _parse(archive.read(books[0]), listed)
    folder = posixpath.dirname(books[0])
    names = [
        posixpath.normpath(posixpath.join(folder, urllib.parse.unquote(pages[page])))
        for page in spine
        if page in pages
    ]
    return [archive.read(name) for name in names]


def _require_open(data: bytes) -> None:
    """Raise Refused where more than fonts is encrypted."""

    def method(name: str, attributes: dict[str, str]) -> None:
        if _local(name) == "EncryptionMethod" and attributes.get("Algorithm") not in FONTS:
            raise Refused("is encrypted, expected a book that anybody can open")

    _parse(data, method)


def kind(archive: Archive) -> str:
    """docx, odt or epub. Raises Refused for any other archive."""
    if "word/document.xml" in archive.names:
        return "docx"
    if "META-INF/container.xml" in archive.names and "mimetype" in archive.names:
        if b"epub" in archive.read("mimetype")[:100]:
            return "epub"
    if "content.xml" in archive.names and "mimetype" in archive.names:
        made = archive.read("mimetype")[:100].decode("ascii", "replace")
        if made.startswith("application/vnd.oasis.opendocument.text"):
            return "odt"
        made = re.sub(r"[^a-z.-]", "", made.rpartition("opendocument.")[2])
        raise Refused(f"found an OpenDocument {made or 'file'}, expected text; save it as text")
    if "xl/workbook.xml" in archive.names or "ppt/presentation.xml" in archive.names:
        what = "a spreadsheet" if "xl/workbook.xml" in archive.names else "a presentation"
        raise Refused(f"found {what}, expected text; save it as text or PDF")
    raise Refused("found a ZIP archive, expected a document; unpack it and name its files")
