"""Acceptance on a real model, speed on random weights.

    python -m tools.studies.exact acceptance --model FOLDER --length 4096 --filter-layers 2,8,17
    python -m tools.studies.exact speed --shape deep --contexts 8K,128K --settings auto:auto
    python -m tools.studies.exact kernels --shape deep --dtypes bfloat16

Prints one JSON object per row on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from engine import Exact
from tools.bench.shapes import SHAPES, parse_size, shape_config
from tools.common.arguments import command, loaded
from tools.common.documents import texts
from tools.common.program import say
from tools.studies.exact.acceptance import measure
from tools.studies.exact.kernels import KINDS, attention, weights
from tools.studies.exact.report import acceptance_table, counted_table, survival
from tools.studies.exact.speed import Setting, compare
from tools.studies.exact.tables import CHOICES, Records, method_of, run_coupling, run_starts
from tools.studies.exact.tables import KINDS as TEXTS


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.studies.exact", __doc__)
    what = p.add_subparsers(dest="what", required=True)
    a = what.add_parser("acceptance", help="what full attention accepts of drafts, on real text")
    a.add_argument("--model", required=True)
    a.add_argument("--length", type=parse_size, default=4096)
    a.add_argument("--texts", type=int, default=3)
    a.add_argument("--filter-layers", action="append", required=True, help="2,8,17; repeatable")
    a.add_argument("--share", type=float, default=0.0667)
    a.add_argument("--draft", type=int, default=6)
    a.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    a.add_argument("--choosers", default="drafter", help="drafter,verifier")
    a.add_argument("--draft-weights", default="model", help="model,int8")
    a.add_argument("--temperature", type=float, action="append")
    a.add_argument("--dtype", default="float32")
    s = what.add_parser("speed", help="tokens a second, acceptance planted")
    s.add_argument("--shape", choices=SHAPES, default="deep")
    s.add_argument("--contexts", default="8K,32K")
    s.add_argument("--dtype", default="bfloat16")
    s.add_argument(
        "--settings", default="auto:auto", help="chooser:draft or chooser:draft:int8, with commas"
    )
    s.add_argument(
        "--survival",
        help="share of cycles that accept 1, 2, ... drafts, with commas; default: SmolLM2's, by "
        "who chose",
    )
    s.add_argument("--turns", type=int, default=3)
    k = what.add_parser("kernels", help="what a further token of a step costs in each kernel")
    k.add_argument("--shape", choices=SHAPES, default="deep")
    k.add_argument("--dtypes", default="bfloat16,float32")
    k.add_argument("--rows", type=parse_size, default=32768)
    k.add_argument("--turns", type=int, default=7)
    d = what.add_parser("starts", help="acceptance of drafts from every token of greedy answers")
    c = what.add_parser("coupling", help="acceptance of sampled drafts, by the rule that accepts")
    for q in (d, c):
        q.add_argument("--model", required=True)
        q.add_argument("--out", required=True, type=Path, help="JSON lines, one a cell")
        q.add_argument("--filter-layers", action="append", required=True)
        q.add_argument("--kinds", default=",".join(TEXTS))
        q.add_argument("--texts", type=int, default=1, help="of each kind")
        q.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
        q.add_argument("--dtype", default="float32")
        q.add_argument("--lengths", default="4096")
        q.add_argument("--shares", default="0.0667")
    r = what.add_parser("report", help="tables of what `starts` wrote, and what a GPU would read")
    r.add_argument("records", type=Path, help="the file of `starts`")
    r.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    r.add_argument("--contexts", default="32K,64K,128K,256K,450K")
    r.add_argument(
        "--share", type=float, default=0.0667, help="budget of the drafter and the cells"
    )
    d.add_argument("--choices", default="first draft", help=" | ".join(CHOICES))
    c.add_argument("--draft", type=int, default=6)
    c.add_argument("--temperatures", default="0.7,0.8,1.0")
    c.add_argument("--top-p", type=float, default=1.0)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code."""
    args = parser().parse_args(arguments)
    {
        "speed": _speed,
        "kernels": _kernels,
        "acceptance": _acceptance,
        "starts": _tables,
        "coupling": _tables,
        "report": _report,
    }[args.what](args)
    return 0


def _speed(args: argparse.Namespace) -> None:
    shares = tuple(float(part) for part in args.survival.split(",")) if args.survival else ()
    settings = [Setting.of(part) for part in args.settings.split(",")]
    for length in args.contexts.split(","):
        given = args.shape, args.dtype, parse_size(length), settings, shares
        for row in compare(*given, turns=args.turns):
            print(json.dumps(row.to_dict()), flush=True)


def _kernels(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    config = shape_config(args.shape)
    for name in args.dtypes.split(","):
        dtype = getattr(torch, name)
        rows = [attention(args.shape, config, dtype, args.rows, args.turns)]
        rows += [weights(args.shape, config, dtype, kind, args.turns) for kind in KINDS]
        for row in rows:
            print(json.dumps(row.to_dict()), flush=True)


def _tables(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    lengths = [parse_size(part) for part in args.lengths.split(",")]
    shares, kinds = [float(part) for part in args.shares.split(",")], args.kinds.split(",")
    most = max(lengths) + args.tokens + 16
    llm = loaded(args, device="cpu", max_context=most)
    records = Records(args.out)
    if args.what == "starts":
        choices = args.choices.split("; ")
        cells = [(f, s, choice) for choice in choices for s in shares for f in args.filter_layers]
        run_starts(llm, records, lengths, cells, args.tokens, kinds, say, args.texts)
        return
    settings = [(float(part), args.top_p) for part in args.temperatures.split(",")]
    method = method_of(args.filter_layers[0], shares[0])
    run_coupling(
        llm,
        records,
        lengths[0],
        method,
        settings,
        args.tokens,
        args.draft,
        kinds,
        say,
        args.texts,
    )


def _report(args: argparse.Namespace) -> None:
    rows = list(Records(args.records).rows.values())
    own = [row for row in rows if row["share"] == args.share and row["choice"] == "first draft"]
    if not own:
        raise SystemExit(f"{args.records}: no cell of `starts` with a budget of {args.share}")
    contexts = [parse_size(part) for part in args.contexts.split(",")]
    reached = survival([n for row in own for n in row["accepted"]])
    print("\n".join(acceptance_table(rows)), end="\n\n")
    print("\n".join(counted_table(args.shape, contexts, args.share, reached)))


def _acceptance(args: argparse.Namespace) -> None:
    most = args.length + args.tokens + 16
    llm = loaded(args, device="cpu", max_context=most)
    assert llm.tokenizer is not None
    found = texts(
        llm.tokenizer, "held-out", args.length, args.texts, ("prose", "code", "key-value")
    )
    methods = [
        (
            f"{name} {chooser} {weights}",
            Exact(
                method_of(name, args.share),
                args.draft,
                lookup=False,
                chooser=chooser,
                draft_weights=weights,
            ),
        )
        for name in args.filter_layers
        for chooser in args.choosers.split(",")
        for weights in args.draft_weights.split(",")
    ]
    temperatures = args.temperature or [0.0]
    for row in measure(llm, found, methods, args.draft, args.tokens, temperatures, say):
        print(json.dumps(asdict(row)), flush=True)
