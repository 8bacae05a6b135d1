"""Find which layers and heads of a model read one list under HShare, and write hshare.json.

python -m tools.calibrate.sharing --model FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from engine import LLM, Full, HShare
from engine.base.errors import UsageError
from engine.methods.select.across.sharing import NAME, sharing_text
from tools.calibrate.lists.command import add_list_flags, list_texts, made_by, require_every_token
from tools.calibrate.sharing.greedy import ListMeter, shared
from tools.calibrate.similarity import measure_with
from tools.common.arguments import command, loaded
from tools.common.program import entry, replace_text, say


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
    llm = loaded(args)
    config = llm.config
    require_every_token(llm, "sharing")
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
    texts, path = list_texts(llm, args, NAME)
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
    more = made_by(llm, args, "tools.calibrate.sharing")
    replace_text(path, sharing_text(layers, heads, config, more))
    print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command(
        "python -m tools.calibrate.sharing",
        "Find which layers and heads of a model read one list under HShare.",
    )
    add_list_flags(p, NAME, "chosen tokens, of a text")
    add = p.add_argument
    add("--layers", type=int, metavar="N", help="layers that read another's (default: half)")
    add("--heads", type=int, metavar="N", help="K/V heads that do, of a layer (default: half)")
    return p


main = entry(lambda argv: parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
