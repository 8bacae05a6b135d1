"""Find Kascade's anchor layers and head map of a model on texts, and write kascade.json.

python -m tools.calibrate.anchors --model FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine import LLM, Full
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.methods.select.across.head_map import NAME, map_text
from tools.calibrate.anchors.meter import HeadMeter, anchors_of, map_of
from tools.calibrate.similarity import measure_with
from tools.calibrate.texts import add_flags, texts_for
from tools.common.program import guarded, replace_text, require_writable, say
from weights.fingerprint import fingerprint


def shares_of(
    llm: LLM,
    texts: Sequence[tuple[str, list[int]]],
    positions: int,
    share: float,
    say: Callable[[str], None],
) -> torch.Tensor:
    """The mean over texts of a HeadMeter's shares at their last `positions`: [L, L, Hkv, Hkv]."""
    total = torch.zeros(())
    for number, (name, ids) in enumerate(texts, 1):
        k = max(1, int(share * len(ids)))
        with llm.session(Full()) as session:
            meter = HeadMeter(session.dense_runtime, k)
            measure_with(session, ids, min(positions, len(ids) // 2), meter)
        total = total + meter.shares()
        say(f"text {number}/{len(texts)} {name}: {len(ids)} tokens, {meter.steps} positions")
    return total / len(texts)


def run(args: argparse.Namespace) -> None:
    """Measure, print the anchors and the head map, and write kascade.json."""
    llm = LLM(args.model, device=args.device, dtype=args.dtype, method=Full())
    config, length = llm.config, min(args.length, llm.max_context)
    count = max(1, round(config.num_layers * 5 / 32)) if args.anchors is None else args.anchors
    if config.other_layers:
        raise UsageError(
            f"anchors: does not know sliding-window or recurrent layers ({config.family})"
        )
    if not 1 <= count < config.num_layers:
        raise UsageError(
            f"--anchors: found {count}, expected 1 to {config.num_layers - 1} (the model has "
            f"{config.num_layers} layers)"
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
    shares = shares_of(llm, texts, args.positions, args.share, say)
    anchors = anchors_of(shares, count)
    table = map_of(shares, anchors)
    best = shares.amax(-1).mean(-1)
    print("| layer | anchor | found | its heads read |\n|---|---|---|---|")
    for layer, heads in enumerate(table):
        anchor = max(a for a in anchors if a <= layer)
        print(f"| {layer} | {anchor} | {best[anchor, layer]:.3f} | {', '.join(map(str, heads))} |")
    print(f"\nKascade(anchors={anchors})")
    if args.dry_run:
        return
    more = {
        "fingerprint": fingerprint(llm.folder),
        "share": args.share,
        "positions": args.positions,
        "made_by": f"tools.calibrate.anchors {VERSION}",
    }
    replace_text(path, map_text(anchors, table, config, more))
    print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m tools.calibrate.anchors",
        description="Find Kascade's anchor layers and head map of a model.",
    )
    add_flags(p)
    add = p.add_argument
    add("--length", type=int, default=4096, help="tokens per text (default 4096)")
    add("--positions", type=int, default=24, help="decode positions at a text's end (default 24)")
    add("--share", type=float, default=0.1, help="budget as a share of a text (default 0.1)")
    add("--anchors", type=int, metavar="N", help="how many (default: 5 of 32 layers)")
    add("--out", metavar="FILE", help=f"where to write {NAME} (default: beside the model)")
    add("--dry-run", action="store_true", help="measure and print, write nothing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = parser().parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
