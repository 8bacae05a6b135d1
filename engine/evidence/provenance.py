"""Record what every token of an answer read, and show it as one self-contained HTML page.

Documents are untrusted. Their text reaches the page as JSON inside a script element that no text
can leave, and is shown as text nodes only. The page loads nothing from anywhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.base.errors import BadCheckpoint, UsageError
from engine.evidence.sources import Chosen, Owners, counted, split_passages

FORMAT = 1
# passages kept per answer token: more than a person looks at, few enough for a small page
KEPT = 12
MEANT = "expected a run written by /sources FILE.json"


class Trace:
    """The steps of one answer: the text that each added, the positions it chose, their scores."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, list[Chosen]]] = []

    def add(
        self,
        text: str,
        selections: Mapping[int, torch.Tensor],
        scores: Mapping[int, torch.Tensor] | None,
    ) -> None:
        """Add a step; selections and scores as in sources.counted."""
        self.steps.append((text, counted(selections, scores)))


@dataclass(frozen=True)
class Run:
    """A recorded answer.

    text: the documents. passages: (start, stop, line) in `text`. answer: its pieces of text.
    reads: per piece {passage index: score}. documents: where each begins in `text`, and its name;
    empty where there is one.
    """

    model: str
    method: str
    text: str
    passages: tuple[tuple[int, int, int], ...]
    answer: tuple[str, ...]
    reads: tuple[dict[int, float], ...]
    documents: tuple[tuple[int, str], ...] = ()

    def totals(self) -> list[float]:
        """Return the score of every passage over the whole answer."""
        sums = [0.0] * len(self.passages)
        for read in self.reads:
            for index, score in read.items():
                sums[index] += score
        return sums

    def to_json(self) -> str:
        """Return the run as JSON text, which load() reads back."""
        answer = [[text, sorted(read.items())] for text, read in zip(self.answer, self.reads)]
        return json.dumps(
            {
                "format": FORMAT,
                "model": self.model,
                "method": self.method,
                "text": self.text,
                "passages": [list(p) for p in self.passages],
                "answer": answer,
                "documents": self.documents,
            },
            ensure_ascii=False,
        )

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a run from a file.

        Raises UsageError where it cannot be read and BadCheckpoint where it is not a run.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; {MEANT}") from error
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(f"{path}: not JSON ({error}), {MEANT}") from error
        try:
            size, count = len(data["text"]), len(data["passages"])
            passages = tuple((int(a), int(b), int(line)) for a, b, line in data["passages"])
            answer = tuple(str(text) for text, _ in data["answer"])
            reads = tuple({int(i): float(score) for i, score in read} for _, read in data["answer"])
            documents = tuple((int(at), str(name)) for at, name in data.get("documents", ()))
            sound = (
                data["format"] == FORMAT
                and all(0 <= a <= b <= size for a, b, _ in passages)
                and all(0 <= i < count for read in reads for i in read)
                # a page's JSON has no word for the others
                and all(math.isfinite(score) for read in reads for score in read.values())
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BadCheckpoint(f"{path}: found {error!r}, {MEANT}") from error
        if not sound:
            raise BadCheckpoint(
                f"{path}: found passages outside the text, scores that are no numbers, or another "
                f"format, "
                f"expected format {FORMAT}"
            )
        model, method, text = (str(data[key]) for key in ("model", "method", "text"))
        return cls(model, method, text, passages, answer, reads, documents)


def record(
    trace: Trace,
    text: str,
    ends: Sequence[int],
    spans: Sequence[tuple[int, int]],
    model: str,
    method: str,
    progress: Callable[[int, int], None] | None = None,
    names: Sequence[str] = (),
) -> Run:
    """Make a Run of a Trace.

    text: what the tokens in the bank spell. ends: where each token ends in it, ascending. spans:
    (start, stop) of the documents in it. A passage's score at a step is the mean of its tokens'
    scores, as engine/evidence/sources.py ranks them. progress(done, total) is called after every
    step. names: of the documents, where they are to be shown.
    """
    shown: list[str] = []
    passages: list[tuple[int, int, int]] = []
    borders: list[tuple[int, int]] = []
    at, begins = 0, []
    for start, stop in spans:
        begins.append(at)
        shown.append(text[start:stop])
        for begin, end in split_passages(text, start, stop):
            borders.append((begin, end))
            passages.append(
                (at + begin - start, at + end - start, text.count("\n", start, begin) + 1)
            )
        at += stop - start + 2
    owners = Owners(ends, borders)
    reads = []
    for _, chosen in trace.steps:
        reads.append(dict(owners.best(chosen, KEPT)))
        if progress is not None:
            progress(len(reads), len(trace.steps))
    return Run(
        model,
        method,
        "\n\n".join(shown),
        tuple(passages),
        tuple(t for t, _ in trace.steps),
        tuple(reads),
        tuple(zip(begins, names)) if len(names) > 1 else (),
    )


def page(run: Run) -> str:
    """Return the self-contained HTML page of a Run."""
    data = json.dumps(
        {
            "text": run.text,
            "passages": run.passages,
            "totals": run.totals(),
            "model": run.model,
            "method": run.method,
            "documents": run.documents,
            "answer": [[text, sorted(read.items())] for text, read in zip(run.answer, run.reads)],
        }
    )
    safe = (
        data.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
    )
    return (Path(__file__).with_name("provenance.html").read_text(encoding="utf-8")).replace(
        "{{DATA}}", safe
    )


def write_page(run: Run, path: str | Path) -> None:
    """Write the HTML page of a Run. Raises UsageError where the file cannot be written."""
    _write(path, page(run))


def write_run(run: Run, path: str | Path) -> None:
    """Write a Run as JSON. Raises UsageError where the file cannot be written."""
    _write(path, run.to_json())


def _write(path: str | Path, text: str) -> None:
    """Write beside and rename, so that a full disk leaves no half file. A link keeps its place; a
    device, a pipe and a folder keep theirs too.
    """
    beside = None
    try:
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise UsageError(
                f"{path}: found no regular file there, expected a name such as run.html"
            )
        beside = target.with_name(f"{target.name[:200]}.{os.getpid()}.tmp")
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(target)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; a loop of links
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: {reason}; expected a file that can be written") from error
    finally:
        if beside is not None:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
