"""The child process that takes the text out of a PDF, an HTML page or an archive (see
engine/text/papers/papers.py).

It imports nothing of the engine but its two neighbours. Run it as a script with the kind, the most
characters of text and the seconds of a CPU that it may use; standard input is the document.
Standard output is JSON: {"text", "said"}, or {"error"} with the rest of a sentence.
"""

from __future__ import annotations

import sys

# Python puts a script's folder first on the path: its files must not shadow packages
sys.path.append(sys.path.pop(0))

import codecs  # noqa: E402
import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import zipfile  # noqa: E402
import zlib  # noqa: E402
from xml.parsers import expat  # noqa: E402

import archives  # noqa: E402
from archives import Archive, Refused  # noqa: E402
from markup import TooLong, seen, tidied  # noqa: E402

MEMORY_BYTES = 2 << 30  # of address space: a document of 16 MB takes less than 1
DECLARED = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w-]{2,20})""", re.I)
DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    expat.ExpatError,
    EOFError,
    KeyError,
    OSError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)


def confine(seconds: int) -> None:
    """Bound this process's memory and time, as far as the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def pdf(data: bytes, most: int) -> tuple[str, str]:
    """The text of every page, and how many pages there are."""
    import pypdf

    book = pypdf.PdfReader(io.BytesIO(data))
    if book.is_encrypted and not book.decrypt(""):
        raise Refused("is encrypted, expected a PDF that anybody can open (qpdf --decrypt)")
    pages, without = [], 0
    for page in book.pages:
        text = tidied(page.extract_text())
        most -= len(text)
        if most < 0:
            raise TooLong
        without += not text.strip()
        pages.append(text)
    said = f"{len(pages)} page{'s' * (len(pages) != 1)}"
    if without == len(pages):
        raise Refused(
            f"found a PDF of {said} without text (scanned?), expected text; ocrmypdf adds it"
        )
    return "\n\n".join(pages), said + (f" ({without} without text)" if without else "")


def html(data: bytes, most: int) -> str:
    """The text of a page in UTF-8, or in the encoding that it declares."""
    found = DECLARED.search(data[:2048])
    name = found[1].decode().lower() if found else "utf-8"
    # what the web means by it
    name = {"iso-8859-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252"}.get(name, name)
    try:
        return seen(data.decode("utf-8-sig"), most)
    except UnicodeDecodeError as error:
        try:
            if name != "utf-8" and codecs.lookup(name).name in ENCODINGS:
                return seen(data.decode(name), most)
        except (LookupError, UnicodeDecodeError):
            pass
        raise Refused(
            f"found byte 0x{data[error.start]:02x} at {error.start} of an HTML page, expected "
            "UTF-8 or the encoding that it declares"
        ) from None


ENCODINGS = frozenset(
    codecs.lookup(name).name
    for name in (
        "cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 iso8859-2 iso8859-5 "
        "iso8859-7 iso8859-9 iso8859-15 koi8-r koi8-u shift_jis euc-jp iso2022_jp gb2312 gbk "
        "gb18030 big5 euc-kr"
    ).split()
)


def archived(data: bytes, most: int) -> tuple[str, str, str]:
    """The text of a DOCX, ODT or EPUB; its kind and what is said of it."""
    archive = Archive(data, most)
    kind = archives.kind(archive)
    if kind == "epub":
        pages = [html(page, most) for page in archives.epub(archive)]
        return "\n\n".join(pages), "EPUB", f"{len(pages)} chapter{'s' * (len(pages) != 1)}"
    return (
        (archives.docx if kind == "docx" else archives.odt)(archive),
        kind.upper(),
        "",
    )


def taken(kind: str, data: bytes, most: int) -> dict[str, str]:
    """{"text", "said"} or {"error"}."""
    said = ""
    try:
        if kind == "pdf":
            text, said = pdf(data, most)
            kind = "PDF"
        elif kind == "html":
            text, kind = html(data, most), "HTML"
        else:
            text, kind, said = archived(data, most)
        text = tidied(text)
        if len(text) > most:
            raise TooLong
    except TooLong:
        return {"error": f"has more than {most:,} characters, more than the context can hold"}
    except Refused as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "asked for too much memory and was stopped"}
    except ImportError as error:  # pypdf has need of another library for some encryptions
        return {"error": f"cannot be read: {_line(error)}"}
    except DAMAGED as error:
        return {"error": f"is damaged: {type(error).__name__}: {_line(error)}"}
    except Exception as error:  # a library may raise anything over a hostile file
        return {"error": f"cannot be read: {type(error).__name__}: {_line(error)}"}
    if not text.strip():
        return {"error": f"found no text in this {kind}"}
    # halves of surrogate pairs and NULs that a PDF's tables may spell are no text
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "")
    return {"text": whole, "said": ", ".join(part for part in (kind, said) if part)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def main() -> None:
    """Read standard input whole and answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    kind, most, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    data = sys.stdin.buffer.read()
    confine(seconds)
    try:
        answer = json.dumps(taken(kind, data, most))
    except (MemoryError, RecursionError):
        answer = json.dumps({"error": "asked for too much memory and was stopped"})
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
