"""Find which layers and heads of a model read one list under HShare, and write hshare.json.

python -m tools.calibrate.sharing --model FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine import LLM, Full, HShare
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.methods.select.across.sharing import NAME, sharing_text
from tools.calibrate.sharing.greedy import ListMeter, shared
from tools.calibrate.similarity import measure_with
from tools.calibrate.texts import add_flags, texts_for
from tools.common.program import guarded, replace_text, require_writable, say
from weights.fingerprint import fingerprint


def measured(
    llm: LLM, texts: Sequence[tuple[str, list[int]]], positions: int, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The means over texts of a ListMeter's shares at their last `positions`: layers [L, L] and
    heads [L, Hkv, Hkv].
    """
    layers = heads = torch.zeros(())
    for number, (name, ids) in enumerate(texts, 1):
        with llm.session(Full()) as session:
            k = max(1, int(share * len(ids)))
            meter = ListMeter(session.dense_runtime, k, HShare.sinks, HShare.recent)
            measure_with(session, ids, min(positions, len(ids) // 2), meter)
        layers = layers + meter.layers / meter.steps
        heads = heads + meter.heads / meter.steps
        say(f"text {number}/{len(texts)} {name}: {len(ids)} tokens, {meter.steps} positions")
    return layers / len(texts), heads / len(texts)


def run(args: argparse.Namespace) -> None:
    """Measure, print what is shared, and write hshare.json."""
    llm = LLM(args.model, device=args.device, dtype=args.dtype, method=Full())
    config, length = llm.config, min(args.length, llm.max_context)
    if config.other_layers:
        raise UsageError(
            f"sharing: does not know sliding-window or recurrent layers ({config.family})"
        )
    counts = []
    for flag, asked, most in (
        ("--layers", args.layers, config.num_layers),
        ("--heads", args.heads, config.num_kv_heads),
    ):
        counts.append(most // 2 if asked is None else asked)
        if not 0 <= counts[-1] < most:
            raise UsageError(
                f"{flag}: found {counts[-1]}, expected 0 to {most - 1} (the model has {most})"
            )
    if length < 128 or args.positions < 1 or args.texts < 1 or not 0 < args.share < 1:
        raise UsageError(
            f"found length {length}, positions {args.positions}, texts {args.texts}, share "
            f"{args.share}; expected a length of at least 128, counts of at least 1 and a share "
            "in (0, 1)"
        )
    path = Path(args.out or Path(llm.folder) / NAME)
    if not args.dry_run:
        require_writable("--out", path)
    texts = texts_for(llm, args.text, args.texts, length, args.seed)
    by_layer, by_head = measured(llm, texts, args.positions, args.share)
    layers = shared(by_layer, counts[0])
    heads = tuple(shared(one, counts[1]) for one in by_head)
    print("| layer | reads the lists of | alike | its heads read |\n|---|---|---|---|")
    for layer, source in enumerate(layers):
        own = source == layer
        alike = "-" if own else f"{float(by_layer[layer, source]):.3f}"
        rows = ", ".join(map(str, heads[layer])) if own else "-"
        print(f"| {layer} | {source} | {alike} | {rows} |")
    print(f"\nHShare(layers={layers})")
    if args.dry_run:
        return
    more = {
        "fingerprint": fingerprint(llm.folder),
        "share": args.share,
        "positions": args.positions,
        "made_by": f"tools.calibrate.sharing {VERSION}",
    }
    replace_text(path, sharing_text(layers, heads, config, more))
    print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m tools.calibrate.sharing",
        description="Find which layers and heads of a model read one list under HShare.",
    )
    add_flags(p)
    add = p.add_argument
    add("--length", type=int, default=4096, help="tokens per text (default 4096)")
    add("--positions", type=int, default=24, help="decode positions at a text's end (default 24)")
    add("--share", type=float, default=0.1, help="chosen tokens, of a text (default 0.1)")
    add("--layers", type=int, metavar="N", help="layers that read another's (default: half)")
    add("--heads", type=int, metavar="N", help="K/V heads that do, of a layer (default: half)")
    add("--out", metavar="FILE", help=f"where to write {NAME} (default: beside the model)")
    add("--dry-run", action="store_true", help="measure and print, write nothing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = parser().parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
