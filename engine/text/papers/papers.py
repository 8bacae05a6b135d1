"""The text of a document in another format: told by its first bytes, taken out in a process that
can be stopped, and said.

A document is untrusted, and so is what a library does over it: the child process
(engine/text/papers/worker.py) has bounds in memory, time and length, and is killed beyond them.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import UsageError
from engine.text.boundary import decoded, one_line, valid
from engine.text.sandbox.template import child_environment

SECONDS = 300  # of a conversion; pypdf reads some 20 pages a second
# what may stand before a page's first element; a comment ends at its first -->
BEFORE = rb"\s|<!--(?:(?!-->).){0,2000}-->|<\?xml[^>]{0,200}\?>"
HTML = re.compile(rb"(?:" + BEFORE + rb")*<(?:!doctype html|html)\b", re.S | re.I)
# first bytes of what is no text: what it is, and what to do
OTHERS = (
    (b"BZh", "a bzip2 file", "bzcat FILE | ... -f -"),
    (b"\xfd7zXZ\0", "an xz file", "xzcat FILE | ... -f -"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "zstdcat FILE | ... -f -"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"\xd0\xcf\x11\xe0", "a Word document of before 2007", "save it as DOCX or PDF"),
    (b"{\\rtf", "an RTF document", "save it as DOCX or PDF"),
    (b"\x89PNG", "an image", "text recognition (OCR) makes text of it"),
    (b"\xff\xd8\xff", "an image", "text recognition (OCR) makes text of it"),
    (b"GIF8", "an image", "text recognition (OCR) makes text of it"),
    (b"GGUF", "a model", "--model runs it"),
    (b"\x7fELF", "a program", "name a document"),
)
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins as UTF-16's does
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class Paper:
    """A document's text, and what it was: "PDF, 12 pages"; "" where it was text."""

    text: str
    was: str = ""

    @property
    def note(self) -> str:
        """What a person must be told of it; "" where it was text."""
        return f"{self.was}, read as text" if self.was else ""


def paper(data: bytes, name: str, longest: int, seconds: float = SECONDS) -> Paper:
    """Take the text out of a document: plain text in UTF-8, UTF-16 or UTF-32, also in gzip; HTML,
    PDF, DOCX, ODT, EPUB.

    name: for messages. longest: characters of text, and bytes that gzip unpacks to. Raises
    UsageError, one line, for anything else, and where it takes too long or too much.
    """
    if data.startswith(b"\x1f\x8b"):
        inner = _unpacked(data, name, longest)
        if inner.startswith(b"\x1f\x8b"):
            raise UsageError(f"{name}: found gzip within gzip, expected text; unpack it")
        found = paper(inner, name, longest, seconds)
        return Paper(found.text, ", ".join(part for part in ("gzip", found.was) if part))
    if kind := _kind(data):
        return _converted(kind, data, name, longest, seconds)
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            try:
                text = data.decode(encoding)
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{name}: found bytes at {error.start} that are no {encoding.upper()}, "
                    "expected what its first bytes say"
                ) from None
            return Paper(valid(text, name), encoding.upper())
    for mark, what, remedy in OTHERS:
        if data.startswith(mark):
            raise UsageError(f"{name}: found {what}, expected text; {remedy}")
    if (at := data.find(b"\0")) >= 0:
        raise UsageError(f"{name}: found binary data (byte 0x00 at {at}), expected text")
    return Paper(decoded(bounded(data, longest, name), name))


def bounded(data: bytes | bytearray, longest: int, name: str) -> bytes:
    """Return data as bytes. Raises UsageError where it has more than `longest` bytes."""
    if len(data) > longest:
        raise UsageError(
            f"{name}: found more than {longest:,} bytes, expected at most that many, which is more "
            "than the context can hold"
        )
    return bytes(data)


def _kind(data: bytes) -> str:
    """pdf, zip or html; "" for what the child process does not read."""
    start = data[:1024].lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if start.startswith(b"%PDF-") or b"%PDF-" in start and b"\0" in data:
        return "pdf"
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "html" if HTML.match(data.removeprefix(codecs.BOM_UTF8)[:4096]) else ""


def _unpacked(data: bytes, name: str, longest: int) -> bytes:
    """What gzip holds: one member after another, no more than `longest` bytes."""
    written = bytearray()
    try:
        while data.startswith(b"\x1f\x8b"):
            member = zlib.decompressobj(wbits=31)
            written += member.decompress(data, longest + 1 - len(written))
            if len(written) > longest:
                bounded(written, longest, f"{name}, unpacked")
            if not member.eof:
                raise zlib.error("it ends too early")
            data = member.unused_data
    except zlib.error as error:
        raise UsageError(f"{name}: a damaged gzip file: {error}") from None
    return bytes(written)


def _converted(kind: str, data: bytes, name: str, longest: int, seconds: float) -> Paper:
    """What the child process makes of a document."""
    if kind == "pdf" and importlib.util.find_spec("pypdf") is None:
        raise UsageError(
            f"{name}: found a PDF, expected text; pip install pypdf, or pdftotext FILE - | ... -f -"
        )
    script = Path(__file__).with_name("worker.py")
    command = [sys.executable, str(script), kind, str(longest), str(max(1, round(seconds)))]
    try:
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            timeout=seconds,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        answer = {"error": f"took more than {seconds:.0f} s to be made text of and was stopped"}
    except OSError as error:
        answer = {"error": f"is made text of in a process of its own, which did not start: {error}"}
    except ValueError:  # no answer: it was killed for time or memory
        answer = {"error": "took too much time or memory to be made text of and was stopped"}
    if "error" in answer:
        raise UsageError(one_line(f"{name}: {answer['error']}"))
    return Paper(valid(answer["text"], name), answer["said"])
