"""What quantisers of the literature and the engine's own banks cost, token by token.

Half of a real text is read as a prompt over a bank of floats, then each bank goes on over the
text's own tokens, beside floats under the same method. The engine's banks (int8, int4, fp8) are
real and read the prompt themselves; the others are simulated. Controls: `sign`, one bit, and
`int8_coarse` and `int4_coarse`, real banks of fewer levels, which must come out far worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine import LLM, Full, OmniKV
from engine.methods.base import Method
from engine.session.session import Session
from tools.banks import coarse
from tools.banks.base import WINDOW
from tools.banks.registry import FAMILIES, REAL, checked, quantiser, shown
from tools.banks.simulated import SimulatedBank, simulated
from tools.common import page
from tools.common.arguments import command
from tools.common.documents import texts
from tools.common.intervals import wilson
from tools.common.program import progress, replace_json, say
from tools.convert.weight_quality import Tally, add_text_arguments, report

BATCH = 50  # neighbouring positions whose mean is one observation of the interval


@dataclass
class Row:
    """One bank over all texts. taken, whole: bytes of the banks at their texts' ends, and of
    bfloat16.
    """

    bank: str
    tally: Tally
    taken: int = 0
    whole: int = 0
    shared: list[float] = field(default_factory=list)  # of the selected tokens, per choice

    def to_dict(self, method: str) -> dict[str, Any]:
        """The row of the table."""
        found = self.tally.to_dict()
        for name in ("weights", "bytes", "note"):
            del found[name]
        low, high = interval(self.tally.divergences)
        agreed = wilson(self.tally.agreed, found["tokens"])
        return found | {
            "bank": self.bank,
            "simulated": self.bank not in (*REAL, *coarse.NAMES),
            "method": method,
            "share": self.taken / self.whole,
            "kl_interval": [low, high],
            "agreement_interval": list(agreed),
            "selections": sum(self.shared) / len(self.shared) if self.shared else None,
        }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of neighbouring positions, by the means of batches of BATCH."""
    batches = [values[at : at + BATCH] for at in range(0, len(values), BATCH)]
    means = [sum(batch) / len(batch) for batch in batches if len(batch) == BATCH]
    if len(means) < 2:
        return 0.0, math.inf
    mean, middle = sum(values) / len(values), sum(means) / len(means)
    spread = math.sqrt(sum((m - middle) ** 2 for m in means) / (len(means) - 1) / len(means))
    return max(0.0, mean - 1.96 * spread), mean + 1.96 * spread


def measure(
    model: str,
    names: Sequence[str],
    method: Method,
    tokens: int,
    kinds: Sequence[str],
    length: int,
    save: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Rows of Row.to_dict, one for each bank, over `tokens` positions of texts of `length`. save:
    called with the rows after every text. Raises EngineError where the model does.
    """
    plain = LLM(model, device="cpu", dtype="float32", max_context=length, method=Full())
    packed = {
        name: LLM.sharing(plain, bank=name.removesuffix(coarse.SUFFIX))
        for name in names
        if name in (*REAL, *coarse.NAMES)
    }
    rows = [Row(name, Tally(name, "auto", "float32", 0, "")) for name in names]
    assert plain.tokenizer is not None
    half, left = length // 2, tokens
    for text in texts(plain.tokenizer, "held-out", length, -(-tokens // (half - 1)), kinds):
        ids = list(text.ids[: half + left + 1])
        with plain.session(Full()) as base:
            base.prefill(ids[:half])
            wanted = _reference(base, method, ids)
            for number, row in enumerate(rows):
                with coarse.coarser(row.bank):
                    _follow(packed.get(row.bank), base, row, method, ids, wanted)
                done = tokens - left, number + 1, len(rows)
                progress("{} tokens, then bank {} of {}".format(*done))
        left -= len(ids) - 1 - half
        found = [row.to_dict(method.name) for row in rows]
        save(found)
        if left <= 0:
            break
    say("")
    return found


Decision = tuple[torch.Tensor, dict[int, torch.Tensor]]  # (logits, selections)


def _reference(base: Session, method: Method, ids: list[int]) -> list[Decision]:
    """What the bank of floats says at every position behind the prompt."""
    with base.fork() as session:
        session.set_method(method)
        return list(_decisions(session, ids))


def _decisions(session: Session, ids: list[int]) -> Iterator[Decision]:
    """Go over the rest of a text. Raises AssertionError where a sparse method's step was not.

    Full attention reads WINDOW tokens at once, up to where rows are rounded next: steps would see
    the same rows.
    """
    stop = len(ids) - 1
    while not session.plan.partial_layers and len(session) < stop:
        start = len(session)
        last = min(stop, (start // WINDOW + 1) * WINDOW)
        yield from ((logits, {}) for logits in every_logits(session, ids[start:last]))
    for at in range(len(session), stop):
        logits = session.decode(ids[at]).flatten().clone()
        yield logits, {layer: chosen.clone() for layer, chosen in session.selections.items()}
    stats = session.stats
    if stats.decode_steps and stats.sparse_steps != stats.decode_steps:
        raise AssertionError(f"{stats.decode_steps - stats.sparse_steps} steps were not sparse")


def every_logits(session: Session, ids: list[int]) -> torch.Tensor:
    """Read `ids` as a prompt, at most a chunk, under full attention: logits float32 [T, vocab] of
    every one of them.
    """
    kept: list[torch.Tensor] = []
    model = session.loaded.model
    session.prefill(ids, every=lambda x, start: kept.append(model.logits(x[0])))
    (logits,) = kept
    return logits


def _follow(
    real: LLM | None,
    base: Session,
    row: Row,
    method: Method,
    ids: list[int],
    wanted: Sequence[Decision],
) -> None:
    """Read one text over one bank. real: the LLM of a bank that is no simulation."""
    half, config = len(base), base.loaded.config
    with real.session(Full()) if real else simulated(base, quantiser(row.bank)) as session:
        if real:
            session.prefill(ids[:half])
        session.set_method(method)
        for number, (logits, chosen) in enumerate(_decisions(session, ids)):
            reference, selected = wanted[number]
            row.tally.add(reference, logits, ids[half + number + 1])
            row.shared += [
                float(torch.isin(selected[layer], found).float().mean())
                for layer, found in chosen.items()
                if len(selected[layer])
            ]
        count = len(session)
        row.whole += count * config.num_layers * config.kv_bytes(2)
        if real:
            row.taken += count * config.num_layers * real.config.kv_bytes(2)
        else:
            assert isinstance(session.bank, SimulatedBank)
            session.bank.settle(count)
            row.taken += session.bank.held_bytes(count)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows, by bytes."""
    sparse = any(row["selections"] is not None for row in rows)
    head = ["bank", "bytes of bfloat16", "KL, nats a token (95%)", "same likeliest (95%)"]
    head += [*["same selection"] * sparse, "perplexity"]
    cells = []
    for row in sorted(rows, key=lambda row: -row["share"]):
        low, high = row["kl_interval"]
        least, most = row["agreement_interval"]
        apart = f"{row['kl']:.5f} ({low:.5f} to {high:.5f})"
        agreed = f"{row['agreement']:.1%} ({least:.1%} to {most:.1%})"
        chosen = [f"{row['selections']:.1%}"] if sparse else []
        surprise = f"{row['perplexity']:.3f}"
        cells.append((shown(row["bank"]), f"{row['share']:.3f}", apart, agreed, *chosen, surprise))
    return "\n".join(page.table(head, cells))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the model does not load) or 2 (usage)."""
    families = "\n".join(f"  {name:<10} {family.note}" for name, family in FAMILIES.items())
    parser = command(
        "python -m tools.banks",
        __doc__,
        f"banks (and bits, such as kivi2; {', '.join(REAL)} are the engine's own):\n{families}",
    )
    add_text_arguments(parser, length=2048)
    parser.add_argument("--bank", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--method", choices=("full", "omnikv"), default="full")
    parser.add_argument("--share", type=float, default=0.0667, help="of the tokens that are chosen")
    args = parser.parse_args(argv)

    def rows() -> list[dict[str, Any]]:
        method = Full() if args.method == "full" else OmniKV(share=args.share, dense_below=0)
        save = partial(replace_json, args.json) if args.json else lambda rows: None
        names = checked(args.bank, coarse.NAMES)
        given = args.model, names, method, args.tokens, args.kinds, args.length, save
        return measure(*given)

    about = "against a bank of floats (perplexity {reference_perplexity:.3f}), {tokens}"
    return report(args, 4, rows, table, f"{args.method}, {about}")
