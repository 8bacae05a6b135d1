"""What weights in few bits cost, token by token.

Real texts are read by the model in float32 and by the same model with `weights=` int8 and int4, all
step by step over the same tokens, so that what is measured is what a decode step runs; with
--prompts, or activations in int8, which no step has, as prompts. The table
has, for every form: the mean and the 99th percentile of the KL divergence from the float32
distribution (nats per token), the share of tokens whose likeliest next token is the same, and the
difference of perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full
from engine.load.options import ACTIVATIONS
from tools.common import page
from tools.common.arguments import command, require_least
from tools.common.documents import KINDS, REAL, texts
from tools.common.program import (
    POCKET,
    guarded,
    model_label,
    progress,
    replace_json,
    require_writable,
    say,
)

PLAIN = "auto", "int8"  # weights in floats meet no rounded rows
WORDS = ("auto", "int8", "int4", "int4:64", "int4:128")


@dataclass
class Tally:
    """What one form of the weights did over the tokens."""

    weights: str
    activations: str
    dtype: str
    bytes: int
    note: str
    divergences: list[float] = field(default_factory=list)
    agreed: int = 0
    surprise: float = 0.0  # of the texts' own tokens, nats in all
    reference_surprise: float = 0.0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, token: int) -> None:
        """Count one position. reference, logits: [vocab]; token: what the text says next."""
        p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        self.divergences.append(float((p.exp() * (p - q)).sum().clamp_min(0.0)))
        self.agreed += int(p.argmax() == q.argmax())
        self.surprise -= float(q[token])
        self.reference_surprise -= float(p[token])

    def to_dict(self) -> dict[str, Any]:
        """The row of the table."""
        count, ordered = len(self.divergences), sorted(self.divergences)
        return {
            "weights": self.weights,
            "activations": self.activations,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "note": self.note,
            "tokens": count,
            "kl": sum(ordered) / count,
            "kl_99": ordered[min(count - 1, int(0.99 * count))],
            "agreement": self.agreed / count,
            "perplexity": math.exp(self.surprise / count),
            "reference_perplexity": math.exp(self.reference_surprise / count),
        }


def measure(
    model: str,
    forms: Sequence[tuple[str, str]],
    dtype: str,
    tokens: int,
    kinds: Sequence[str],
    length: int,
    prompts: bool = False,
) -> list[dict[str, Any]]:
    """Rows of Tally.to_dict, one for each of `forms`, (weights, activations), over `tokens` tokens
    of texts of `length`, which are read step by step, or as prompts.

    Raises EngineError where the model or a form of its weights does.
    """
    settings: dict[str, Any] = dict(device="cpu", max_context=length, method=Full())
    reference = LLM(model, dtype="float32", **settings)
    others = [
        LLM(model, dtype=dtype, weights=word, activations=said, **settings) for word, said in forms
    ]
    rows = []
    for (word, said), llm in zip(forms, others):
        note = next(note for name, _, note in llm.plan().items if name == "weights")
        assert llm.model is not None
        rows.append(Tally(word, said, dtype, llm.model.nbytes, note))
    assert reference.tokenizer is not None
    follow = _follow_prompts if prompts else _follow
    count, left = -(-tokens // (length - 1)), tokens
    for text in texts(reference.tokenizer, "held-out", length, count, kinds):
        left -= follow(reference, others, rows, list(text.ids[: left + 1]))
        progress(f"{tokens - left} of {tokens} tokens")
    say("")
    return [row.to_dict() for row in rows]


def _follow(reference: LLM, others: Sequence[LLM], rows: Sequence[Tally], tokens: list[int]) -> int:
    """Read one text with all models in step; return the positions counted."""
    sessions = [llm.session() for llm in (reference, *others)]
    for number, token in enumerate(tokens[:-1]):
        if number == 0:
            logits = [session.prefill([token]) for session in sessions]
        else:
            logits = [session.decode(token) for session in sessions]
        for row, found in zip(rows, logits[1:]):
            row.add(logits[0].flatten(), found.flatten(), tokens[number + 1])
    for session in sessions:
        session.close()
    return len(tokens) - 1


def _follow_prompts(
    reference: LLM, others: Sequence[LLM], rows: Sequence[Tally], tokens: list[int]
) -> int:
    """Read one text with all models as a prompt; return the positions counted."""
    read = []
    for llm in (reference, *others):
        parts: list[torch.Tensor] = []
        with llm.session() as session:
            session.prefill(tokens[:-1], every=lambda x, _, parts=parts: parts.append(x[0].clone()))
        read.append(torch.cat(parts))
    for at, token in enumerate(tokens[1:]):
        expected, *logits = (
            llm.load().model.logits(x[None, at])[0] for llm, x in zip((reference, *others), read)
        )
        for row, found in zip(rows, logits):
            row.add(expected, found, token)
    return len(tokens) - 1


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    head = "weights | dtype | MB | KL, nats a token | 99% below | same likeliest | perplexity"
    cells = []
    for row in rows:
        surprise = f"{row['perplexity']:.3f} ({row['reference_perplexity']:.3f})"
        apart = f"{row['kl']:.5f}", f"{row['kl_99']:.4f}", f"{row['agreement']:.2%}", surprise
        word = row["weights"]
        word = word if row["activations"] == "auto" else f"{word}, activations {row['activations']}"
        cells.append((word, row["dtype"], f"{row['bytes'] / 1e6:.0f}", *apart))
    return "\n".join(page.table(head, cells))


def add_text_arguments(parser: argparse.ArgumentParser, length: int) -> None:
    """Add what a program that reads texts token by token takes. length: its default, in tokens."""
    parser.add_argument("model", nargs="?", default=str(POCKET), metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=2000, help="positions in all")
    parser.add_argument("--length", type=int, default=length, help="tokens of a text")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(REAL))
    parser.add_argument("--json", type=Path, metavar="FILE")


def report(
    args: argparse.Namespace,
    least: int,
    measure: Callable[[], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
    about: str,
) -> int:
    """Measure, print and keep the rows of a program with `add_text_arguments`. least: tokens of a
    text; about: what stands above the table, with fields of the first row. Returns an exit code.
    """

    def work() -> None:
        if args.json:
            require_writable("--json", args.json)
        require_least(args, tokens=1, length=least)
        rows = measure()
        print(f"{model_label(args.model)}, {about.format(**rows[0])} tokens\n\n{table(rows)}")
        if args.json:
            replace_json(args.json, rows)

    return guarded(work)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the model does not load) or 2 (usage)."""
    parser = command("python -m tools.convert.weight_quality", __doc__)
    add_text_arguments(parser, length=512)
    parser.add_argument("--weights", nargs="+", choices=WORDS, default=["int8", "int4"])
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=["auto"])
    parser.add_argument(
        "--prompts", action="store_true", help="read texts as prompts, not by steps"
    )
    parser.add_argument("--dtype", default="auto", help="of the activations beside few bits")
    args = parser.parse_args(argv)
    forms = [
        (word, said) for word in args.weights for said in args.activations if (word, said) != PLAIN
    ]
    given = args.model, forms, args.dtype, args.tokens, args.kinds, args.length
    prompts = args.prompts or "int8" in args.activations
    about = "against float32, {tokens}" + (" prompt" if prompts else "")
    return report(args, 2, lambda: measure(*given, prompts), table, about)


if __name__ == "__main__":
    sys.exit(main())
