"""What a bank in fewer bits costs, by token.

Real texts go through the model in float32 twice, over a bank of floats and over a packed bank: half
of a text as a prompt, the rest step by step over the text's own tokens. Under full attention and
under OmniKV, whose selections are compared too: a packed bank that chose other tokens would answer
from other rows. The control is a bank whose rows are rounded further, for this tool only: int8 to
15 levels, int4 to 8 of K and 4 of V. It must come out worse.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from engine import LLM, Full, OmniKV
from engine.session.session import Session
from kernels.rows.forms import DTYPES, FORMS, Side
from tools.common import page
from tools.common.arguments import command
from tools.common.documents import texts
from tools.common.program import progress, say
from tools.convert.weight_quality import Tally, add_text_arguments, report

STEP = 18  # int8 values of the control are multiples of it: 15 of them, as 4 bits have


@dataclass
class Row:
    """One bank under one method."""

    bank: str
    method: str
    tally: Tally
    shared: list[float] = field(default_factory=list)  # of the selected tokens, per choice

    def to_dict(self) -> dict[str, Any]:
        """The row of the table."""
        found = self.tally.to_dict() | {"bank": self.bank, "method": self.method}
        found["selections"] = sum(self.shared) / len(self.shared) if self.shared else None
        return found


@contextlib.contextmanager
def coarser(bank: str) -> Iterator[None]:
    """Rows of such a bank that are written meanwhile hold fewer levels."""
    dtype = DTYPES[bank]
    form = FORMS[dtype]

    def control(side: Side, kept: int, put: int) -> Side:
        def pack(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
            rows = side.pack(x, backend)
            if dtype == torch.int8:
                held = side.values(rows)
                held.copy_((held.float() / STEP).round() * STEP)
            else:
                # the lower bits of every number become those of one near the middle
                rows[..., :-4].bitwise_and_(kept).bitwise_or_(put)
            return rows

        return side._replace(pack=pack)

    keys, values = control(form.keys, 0xF8, 0x04), control(form.values, 0xCC, 0x22)
    changed = form._replace(keys=keys, values=values)
    with mock.patch.dict(FORMS, {dtype: changed}):
        yield


def measure(
    model: str, bank: str, tokens: int, kinds: Sequence[str], length: int, share: float
) -> list[dict[str, Any]]:
    """Rows of Row.to_dict over `tokens` positions of texts of `length`. Raises EngineError where
    the model does.
    """
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", max_context=length)
    plain = LLM(model, method=Full(), **settings)
    packed = LLM.sharing(plain, bank=bank)
    methods = {"full": Full(), "omnikv": OmniKV(share=share, dense_below=0)}
    size = packed.config.kv_bytes(4)
    banks = (bank, "control")
    rows = [Row(held, name, Tally(held, "float32", size, "")) for name in methods for held in banks]
    assert plain.tokenizer is not None
    half, left = length // 2, tokens
    for text in texts(plain.tokenizer, "held-out", length, -(-tokens // half), kinds):
        ids = list(text.ids[: half + left + 1])
        for name, method in methods.items():
            mine = [row for row in rows if row.method == name]
            with contextlib.ExitStack() as stack:
                sessions = [
                    stack.enter_context(llm.session(method)) for llm in (plain, packed, packed)
                ]
                _follow(sessions, mine, ids, half, bank)
        left -= len(ids) - 1 - half
        progress(f"{tokens - left} of {tokens} tokens")
        if left <= 0:
            break
    say("")
    return [row.to_dict() for row in rows]


def _follow(
    sessions: Sequence[Session], rows: Sequence[Row], ids: list[int], half: int, bank: str
) -> None:
    """Read one text with the plain bank, the packed one and the control in step."""
    guards = [contextlib.nullcontext, contextlib.nullcontext, lambda: coarser(bank)]
    for at in range(half, len(ids) - 1):
        logits = []
        for session, guard in zip(sessions, guards):
            with guard():
                new = session.prefill(ids[: at + 1]) if at == half else session.decode(ids[at])
            logits.append(new.flatten())
        for row, session, found in zip(rows, sessions[1:], logits[1:]):
            row.tally.add(logits[0], found, ids[at + 1])
            for layer, chosen in sessions[0].selections.items():
                other = session.selections[layer]
                if len(chosen):
                    row.shared.append(float(torch.isin(chosen, other).float().mean()))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    head = "bank | method | KL, nats a token | 99% below | same likeliest | "
    head += "same selection | perplexity"
    cells = []
    for row in rows:
        chosen = "-" if row["selections"] is None else f"{row['selections']:.2%}"
        apart = f"{row['kl']:.6f}", f"{row['kl_99']:.5f}", f"{row['agreement']:.2%}", chosen
        surprise = f"{row['perplexity']:.3f} ({row['reference_perplexity']:.3f})"
        cells.append((row["bank"], row["method"], *apart, surprise))
    return "\n".join(page.table(head, cells))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the model does not load) or 2 (usage)."""
    parser = command("tools.studies.bank_quality", __doc__)
    add_text_arguments(parser, length=2048)
    parser.add_argument("--bank", choices=tuple(DTYPES), default="int8")
    parser.add_argument("--share", type=float, default=0.0667, help="of the tokens that are chosen")
    args = parser.parse_args(argv)

    given = args.model, args.bank, args.tokens, args.kinds, args.length, args.share
    return report(args, 4, lambda: measure(*given), table, "against a bank of floats, {tokens}")


if __name__ == "__main__":
    sys.exit(main())
