"""Find Kascade's anchor layers and head map of a model on texts, and write kascade.json.

python -m tools.calibrate.anchors --model FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from engine import LLM, Full
from engine.base.errors import UsageError
from engine.methods.select.across.head_map import NAME, map_text
from tools.calibrate.anchors.meter import HeadMeter, anchors_of, map_of
from tools.calibrate.lists.command import add_list_flags, list_texts, made_by, require_every_token
from tools.calibrate.similarity import measure_with
from tools.common.arguments import command, loaded
from tools.common.program import entry, replace_text, say


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
    llm = loaded(args)
    config = llm.config
    count = max(1, round(config.num_layers * 5 / 32)) if args.anchors is None else args.anchors
    require_every_token(llm, "anchors")
    if not 1 <= count < config.num_layers:
        raise UsageError(
            f"--anchors: found {count}, expected 1 to {config.num_layers - 1} (the model has "
            f"{config.num_layers} layers)"
        )
    texts, path = list_texts(llm, args, NAME)
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
    more = made_by(llm, args, "tools.calibrate.anchors")
    replace_text(path, map_text(anchors, table, config, more))
    print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command(
        "python -m tools.calibrate.anchors", "Find Kascade's anchor layers and head map of a model."
    )
    add_list_flags(p, NAME, "budget as a share of a text")
    p.add_argument("--anchors", type=int, metavar="N", help="how many (default: 5 of 32 layers)")
    return p


main = entry(lambda argv: parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
