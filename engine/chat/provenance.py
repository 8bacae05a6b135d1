"""What every token of an answer read, kept while it is written and shown as one self-contained HTML
page.

Documents are untrusted: their text reaches the page as JSON inside a script element that no text
can leave, and becomes visible as text nodes only. The page loads nothing from anywhere.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.chat.sources import split_passages
from engine.errors import BadCheckpoint, UsageError

FORMAT = 1
# passages kept per answer token: more than a person looks at, and a page of a long answer stays
# small
KEPT = 12


class Trace:
    """Per step of one answer: the text it added, the positions that were chosen and by which
    scores.
    """

    def __init__(self):
        self.steps = []

    def add(self, text, selections, scores):
        """selections {filter layer: int64 [k]}, scores {filter layer: float32 [k]} for some of them
        (the others count 1 a token).
        """
        layers = [layer for layer in selections if not scores or layer in scores]
        chosen = [
            (
                selections[layer].cpu(),
                scores[layer].cpu() if scores else torch.ones(len(selections[layer])),
            )
            for layer in layers
        ]
        self.steps.append((text, chosen))


@dataclass(frozen=True)
class Run:
    """A recorded answer. passages: (start, stop, line) in `text`; reads: per answer piece {passage
    index: score}.
    """

    model: str
    method: str
    text: str
    passages: tuple
    answer: tuple
    reads: tuple

    def totals(self):
        """Score of every passage over the whole answer."""
        sums = [0.0] * len(self.passages)
        for read in self.reads:
            for index, score in read.items():
                sums[index] += score
        return sums

    def to_json(self):
        """The run as text; load() reads it back."""
        answer = [[text, sorted(read.items())] for text, read in zip(self.answer, self.reads)]
        return json.dumps(
            {
                "format": FORMAT,
                "model": self.model,
                "method": self.method,
                "text": self.text,
                "passages": [list(p) for p in self.passages],
                "answer": answer,
            },
            ensure_ascii=False,
        )

    @classmethod
    def load(cls, path):
        """Read a RUN.json. Raises UsageError (cannot be read) or BadCheckpoint (not a run) naming
        the file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; expected a run written by /sources FILE.json"
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(
                f"{path}: found no readable JSON ({error}), expected a run written by /sources FILE.json"
            ) from error
        try:
            size, count = len(data["text"]), len(data["passages"])
            passages = tuple((int(a), int(b), int(line)) for a, b, line in data["passages"])
            answer = tuple(str(text) for text, _ in data["answer"])
            reads = tuple({int(i): float(score) for i, score in read} for _, read in data["answer"])
            sound = (
                data["format"] == FORMAT
                and all(0 <= a <= b <= size for a, b, _ in passages)
                and all(0 <= i < count for read in reads for i in read)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(
                f"{path}: found {error!r}, expected a run written by /sources FILE.json"
            ) from error
        if not sound:
            raise BadCheckpoint(
                f"{path}: found passages outside the text or another format, expected format {FORMAT}"
            )
        return cls(
            str(data["model"]), str(data["method"]), str(data["text"]), passages, answer, reads
        )


def record(trace, text, ends, spans, model, method):
    """A Run from a Trace. text: what the bank's tokens spell; ends: where each token ends in it,
    ascending; spans: (start, stop) of the documents in text. A passage's score at a step is the
    mean of its tokens' scores, as engine/chat/sources.py ranks them.
    """
    shown, passages, owner = [], [], torch.full((len(ends) + 1,), -1, dtype=torch.int64)
    at, token = 0, 0
    for start, stop in spans:
        shown.append(text[start:stop])
        for begin, end in split_passages(text, start, stop):
            while token < len(ends) and ends[token] <= begin:
                token += 1
            while token < len(ends) and (ends[token - 1] if token else 0) < end:
                owner[token] = len(passages)
                token += 1
            passages.append(
                (at + begin - start, at + end - start, text.count("\n", start, begin) + 1)
            )
        at += stop - start + 2
    sizes = torch.bincount(owner[owner >= 0], minlength=len(passages)).clamp(min=1).double()
    reads = []
    for _, chosen in trace.steps:
        sums = torch.zeros(len(passages) + 1, dtype=torch.float64)
        for positions, scores in chosen:
            whose = owner[positions.clamp(max=len(ends))]
            # the last slot, nobody's, is dropped
            sums.index_add_(0, whose.where(whose >= 0, len(passages)), scores.double())
        best = torch.topk(sums[:-1] / sizes, min(KEPT, len(passages))) if passages else None
        reads.append(
            {int(i): float(s) for s, i in zip(best.values, best.indices) if s > 0}
            if passages
            else {}
        )
    return Run(
        model,
        method,
        "\n\n".join(shown),
        tuple(passages),
        tuple(t for t, _ in trace.steps),
        tuple(reads),
    )


def page(run):
    """The self-contained HTML page of a Run, as text."""
    data = json.dumps(
        {
            "text": run.text,
            "passages": run.passages,
            "totals": run.totals(),
            "model": run.model,
            "method": run.method,
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


def write_page(run, path):
    """Write the page, beside first and then renamed, so that a full disk leaves no half page.
    UsageError where it cannot be.
    """
    _write(path, page(run))


def write_run(run, path):
    """Write RUN.json the same way."""
    _write(path, run.to_json())


def _write(path, text):
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(
            f"{path}: {error.strerror}; expected a file that can be written"
        ) from error
