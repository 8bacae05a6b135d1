"""Real texts that the machine has, for measuring a model: never a network.

Prose is the language manual that comes with Python, licences, the long descriptions of installed
packages and this project's own pages. Code is the sources of the standard library and of installed
packages. Two kinds are made of these: "key-value" (a list of `name: value` lines whose names are
identifiers of the code, then entries of it once more) and "copy" (prose that repeats a passage of
itself at its end).

Two splits, "search" and "held-out", have no document and no near copy in common. The same machine
gives the same texts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from engine.base.errors import UsageError
from tools.common.program import no_program

SPLITS = ("search", "held-out")
REAL = ("prose", "code")
KINDS = (*REAL, "key-value", "copy")
ROOT = Path(__file__).resolve().parents[2]
SYSTEM_LICENCES = Path("/usr/share/common-licenses")
# (package, patterns below it)
PACKAGES = (
    ("torch", ("nn/**/*.py", "optim/*.py", "distributions/*.py", "utils/**/*.py")),
    ("transformers", ("*.py", "generation/*.py", "models/*/modeling_*.py")),
)
# pages that describe; those that report figures change with what is measured on them
PROJECT = (
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("ARCHITECTURE", "EVICTION", "METHODS", "OFFLOAD", "PREFILL")),
)
# of the standard library: tests, tables, what is not its own
ASIDE = {"test", "tests", "idle_test", "site-packages", "pydoc_data", "encodings"}
SMALLEST, LARGEST = 1_500, 40_000  # characters of a document
PER_SPLIT = 60  # documents of a kind in a split, at most
SHINGLE = 8  # words
SAMPLE = 4  # one shingle of so many stands for a document
NEAR = 0.1  # part of the smaller one's shingles that makes two documents near copies
NAMES = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b|\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b")
AGAIN = "\n\nThe same once more:\n\n"


class Encodes(Protocol):
    """The interface of a tokenizer to this module."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True)
class Document:
    """One real text. name: where it comes from, the same on every machine; sha256: of the text."""

    name: str
    kind: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text's UTF-8 bytes, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Text:
    """Token ids of a wanted length. name: its kind and number; documents: the names of those it is
    made of, several where one was too short.
    """

    name: str
    kind: str
    documents: tuple[str, ...]
    ids: tuple[int, ...]

    @property
    def sha256(self) -> str:
        """Of the token ids as text, hexadecimal."""
        return hashlib.sha256(" ".join(map(str, self.ids)).encode()).hexdigest()

    @property
    def title(self) -> str:
        """The name and what it is made of."""
        return f"{self.name} ({' + '.join(self.documents)})"


# -------------------------------------------------------------------- where documents come from


@dataclass(frozen=True)
class _Source:
    name: str
    kind: str
    read: Callable[[], str]

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def split(self) -> str:
        return SPLITS[int(self.hash[:2], 16) % 2]


def _file(name: str, kind: str, path: Path) -> _Source:
    return _Source(name, kind, lambda: path.read_text(encoding="utf-8"))


def _manual() -> Iterator[_Source]:
    """The language manual, topic by topic: what `help("assignment")` shows."""
    from pydoc_data.topics import topics

    for topic, text in topics.items():
        yield _Source(f"manual/{topic}", "prose", lambda text=text: text)


def _licences_and_descriptions() -> Iterator[_Source]:
    for path in sorted(SYSTEM_LICENCES.glob("*")) if SYSTEM_LICENCES.is_dir() else []:
        if path.is_file() and not path.is_symlink():
            yield _file(f"licence/{path.name}", "prose", path)
    packages = Path(sysconfig.get_paths()["purelib"])
    for path in packages.glob("*.dist-info/**/LICENSE*"):
        name = path.relative_to(packages).parts[0].split("-")[0]
        yield _file(f"licence/{name}/{path.name}", "prose", path)
    for path in packages.glob("*.dist-info/METADATA"):
        name = path.parent.name.split("-")[0]
        yield _Source(f"description/{name}", "prose", lambda path=path: _description(path))


def _description(metadata: Path) -> str:
    """A package's long description: what follows the fields."""
    return metadata.read_text(encoding="utf-8").partition("\n\n")[2]


def _project() -> Iterator[_Source]:
    for name in PROJECT:
        yield _file(f"project/{name}", "prose", ROOT / name)


def _code() -> Iterator[_Source]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in folder.rglob("*.py"):
        place = path.relative_to(folder)
        if not ASIDE & set(place.parts):
            yield _file(f"stdlib/{place}", "code", path)
    for package, patterns in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        home = Path(spec.origin).parent
        for path in {path for pattern in patterns for path in home.glob(pattern)}:
            yield _file(f"{package}/{path.relative_to(home)}", "code", path)


def _read(source: _Source) -> str | None:
    """The text of a source; None where it is no text of a fair size."""
    try:
        text = source.read().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text[:LARGEST] if len(text) >= SMALLEST else None


def shingles(text: str) -> set[int]:
    """A sample of a text's runs of SHINGLE words, as checksums; two texts sample alike."""
    words = re.findall(r"\w+", text.lower())
    runs = (" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))
    return {sum_ for run in runs if (sum_ := zlib.crc32(run.encode())) % SAMPLE == 0}


class Originals:
    """Texts seen so far, none a near copy of another."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: dict[int, list[int]] = {}

    def take(self, text: str) -> bool:
        """Whether a text is no near copy of one taken before; takes it then."""
        own = shingles(text)
        shared = Counter(holder for run in own for holder in self._holders.get(run, ()))
        if any(n > NEAR * min(len(own), self._sizes[holder]) for holder, n in shared.items()):
            return False
        for run in own:
            self._holders.setdefault(run, []).append(len(self._sizes))
        self._sizes.append(len(own))
        return True


@lru_cache(maxsize=1)
def _all() -> dict[tuple[str, str], tuple[Document, ...]]:
    """{(split, kind): documents}, in the order of their names' hashes."""
    sources = [*_manual(), *_licences_and_descriptions(), *_project(), *_code()]
    found: dict[tuple[str, str], list[Document]] = {(s, k): [] for s in SPLITS for k in REAL}
    originals, names = Originals(), set()
    for source in sorted(sources, key=lambda source: (source.hash, source.name)):
        place = found[source.split, source.kind]
        if len(place) >= PER_SPLIT or source.name in names:
            continue
        text = _read(source)
        if text is not None and originals.take(text):
            names.add(source.name)
            place.append(Document(source.name, source.kind, text))
    return {key: tuple(documents) for key, documents in found.items()}


def documents(split: str, kind: str) -> tuple[Document, ...]:
    """The real documents of a split and kind ("prose" or "code"), always in the same order."""
    if split not in SPLITS or kind not in REAL:
        raise UsageError(
            f"documents: found {split!r}, {kind!r}, expected one of {SPLITS} and one of {REAL}"
        )
    return _all()[split, kind]


# -------------------------------------------------------------------- texts of a wanted length


def texts(
    tokenizer: Encodes,
    split: str,
    length: int,
    count: int,
    kinds: Sequence[str] = KINDS,
    end: int = 128,
) -> list[Text]:
    """`count` texts of exactly `length` tokens, the kinds in turn, from documents of one split; no
    two texts of a kind share one.

    end: tokens at the end of a "key-value" or "copy" text that stand earlier in it. A text's name
    and documents are the same at every length that its first document fills. Raises UsageError
    for unknown words, for a length that leaves no room before the end, and where the machine has
    too few documents.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if split not in SPLITS or unknown or not kinds:
        raise UsageError(
            f"texts: found {split!r}, {list(kinds)}, expected one of {SPLITS} and some of {KINDS}"
        )
    if length < 2 * end:
        raise UsageError(f"texts: found {length} tokens, expected at least {2 * end}")
    makers = {
        "prose": _plain,
        "code": _plain,
        "key-value": _key_value,
        "copy": _copy,
    }
    supply = {kind: _Supply(tokenizer, split, kind) for kind in kinds}
    return [
        makers[kind](supply[kind], f"{kind} {number // len(kinds) + 1}", length, end)
        for number in range(count)
        for kind in [kinds[number % len(kinds)]]
    ]


class _Supply:
    """Documents of a kind, each handed out once. "copy" takes prose from the last document on, so
    that it shares none with "prose" before it must.
    """

    def __init__(self, tokenizer: Encodes, split: str, kind: str):
        self.tokenizer, self.split, self.kind = tokenizer, split, kind
        found = documents(split, "code" if kind == "code" else "prose")
        self._rest = list(found if kind == "copy" else found[::-1])

    def next(self) -> Document:
        """A document that no text of this kind has used."""
        if not self._rest:
            raise self.short()
        return self._rest.pop()

    def short(self) -> UsageError:
        """What to raise where there is nothing more."""
        return UsageError(
            f"texts: this machine has too few documents of kind {self.kind!r} in the split "
            f"{self.split!r}; ask for fewer or shorter texts"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids without special ones."""
        return self.tokenizer.encode(text, special=False)

    def filled(self, length: int) -> tuple[tuple[str, ...], list[int]]:
        """(names, ids) of documents, one after the other, of at least `length` tokens."""
        names: list[str] = []
        ids: list[int] = []
        while len(ids) < length:
            document = self.next()
            names.append(document.name)
            ids += self.encode(document.text if len(names) == 1 else f"\n\n{document.text}")
        return tuple(names), ids


def _plain(supply: _Supply, name: str, length: int, end: int) -> Text:
    names, ids = supply.filled(length)
    return Text(name, supply.kind, names, tuple(ids[:length]))


def _copy(supply: _Supply, name: str, length: int, end: int) -> Text:
    """Prose that goes back to a passage somewhere before and repeats it."""
    again = supply.encode(AGAIN)
    names, ids = supply.filled(length)
    head = length - end - len(again)
    start = random.Random(f"{supply.split} {name}").randrange(max(1, head - end))
    return Text(
        name, supply.kind, names, tuple(ids[:head] + again + ids[start : start + length])[:length]
    )


def _key_value(supply: _Supply, name: str, length: int, end: int) -> Text:
    """Lines `identifier: number`, then lines of it again in another order."""
    rng = random.Random(f"{supply.split} {name}")
    names = list(_identifiers(supply.split))
    rng.shuffle(names)
    lines: list[list[int]] = []
    size = 0
    while size < length - end:
        if not names:
            raise supply.short()
        lines.append(supply.encode(f"{names.pop()}: {rng.randrange(10_000, 100_000)}\n"))
        size += len(lines[-1])
    ids = [token for line in lines for token in line] + supply.encode(AGAIN)
    while len(ids) < length:
        ids += rng.choice(lines)
    origin = f"identifiers of all code in {supply.split}"
    return Text(name, supply.kind, (origin,), tuple(ids[:length]))


@lru_cache(maxsize=len(SPLITS))
def _identifiers(split: str) -> tuple[str, ...]:
    """Names of several words in a split's code, sorted."""
    found = {name for document in documents(split, "code") for name in NAMES.findall(document.text)}
    return tuple(sorted(found))


if __name__ == "__main__":
    raise SystemExit(no_program("tools.common.documents"))
