"""Find which layers of a model may share their attention to distant
tokens, head by head, and write pod.json.

Source: the PoD paper, Eq. 1-2 and Algorithm 1. The similarity of two layers is 1 - the mean
Jensen-Shannon divergence (base 2) of their attention rows at the last positions of every text. Rows
of the query heads that share a K/V head are averaged first, since they share its keys. Progress
goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full
from engine.bank.base import Step
from engine.base.errors import BadCheckpoint, UsageError
from engine.base.version import VERSION
from engine.methods.base import Runtime
from tools.calibrate.lists.command import add_list_flags
from tools.calibrate.similarity import measure_with, softmax_rows
from tools.calibrate.texts import texts_for
from tools.common.arguments import command, loaded
from tools.common.program import entry, replace_json, say
from weights.fingerprint import fingerprint
from weights.jsonfile import inside, read_object, shown

Blocks = tuple[tuple[int, ...], ...]  # per K/V head: the first layer of every block

NAME, FORMAT = "pod.json", 1


class DivergenceMeter:
    """Full attention that records how much the layers' attention rows differ: divergence float64
    [L, L, Hkv], summed over steps.
    """

    def __init__(self, inner: Runtime):
        config = inner.setup.config
        self.inner, self.steps, self.layers = inner, 0, config.num_layers
        self.divergence = torch.zeros(
            self.layers, self.layers, config.num_kv_heads, dtype=torch.float64
        )
        self._rows: list[torch.Tensor] = []

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first compares its rows with those of the layers below."""
        rows = softmax_rows(q[0, -1], step.bank, layer, int(step.visible[0]), self.inner.scale)
        rows = rows.view(self.divergence.shape[2], -1, rows.shape[1]).mean(1)
        self._rows = self._rows[:layer] + [rows]
        for below in range(layer):
            apart = divergence(self._rows[below], rows).double().cpu()
            self.divergence[below, layer] += apart
            self.divergence[layer, below] += apart
        self.steps += layer == self.layers - 1
        return self.inner.attend(layer, q, step)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence, base 2, of distributions along the last axis: [.., n] -> [..],
    from 0 (equal) to 1 (apart).
    """
    middle = (p + q) / 2
    return (entropy(middle) - (entropy(p) + entropy(q)) / 2).clamp(0, 1)


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Shannon entropy along the last axis, in bits."""
    return -torch.xlogy(p, p).sum(-1) / math.log(2)


def greedy_blocks(similarity: Sequence[Sequence[float]], delta: float) -> tuple[int, ...]:
    """Algorithm 1 for one head: similarity [L][L] -> first layers of its blocks. A layer joins the
    last block if its similarity to every layer there is at least `delta`, else it begins a new
    one.
    """
    firsts = [0]
    for layer in range(1, len(similarity)):
        if any(similarity[below][layer] < delta for below in range(firsts[-1], layer)):
            firsts.append(layer)
    return tuple(firsts)


def saving(blocks: Sequence[Sequence[int]], layers: int) -> float:
    """Share of a long context's keys and values that is not stored: half (keys only) of the (layer,
    head) pairs above a block's lowest.
    """
    return sum(layers - len(firsts) for firsts in blocks) / (2 * layers * len(blocks))


def group(
    similarity: torch.Tensor, delta: float = 0.5, wanted: float | None = None
) -> tuple[Blocks, float]:
    """Algorithm 1: (blocks per K/V head, delta). similarity float64 [L, L, Hkv]; wanted: take the
    largest delta that saves this much (the published 35% is delta 0.5 on LLaMA3-8B).
    """
    layers = len(similarity)
    tables = similarity.permute(2, 0, 1).tolist()
    deltas = (
        [delta]
        if wanted is None
        else sorted(
            {table[i][j] for table in tables for i in range(layers) for j in range(i)}, reverse=True
        )
    )
    for candidate in deltas:
        blocks = tuple(greedy_blocks(table, candidate) for table in tables)
        if wanted is None or saving(blocks, layers) >= wanted:
            return blocks, candidate
    raise UsageError(
        f"--saving: found {wanted}, expected at most {saving(((0,),), layers):.3f}, "
        f"one block for all {layers} layers"
    )


def similarity_of(
    llm: LLM,
    texts: Sequence[tuple[str, list[int]]],
    positions: int,
    say: Callable[[str], None],
) -> torch.Tensor:
    """Mean similarity float64 [L, L, Hkv] over (name, ids) texts at their last `positions`; 1 on
    the diagonal.
    """
    total, steps = torch.zeros(()), 0
    for number, (name, ids) in enumerate(texts, 1):
        with llm.session(Full()) as session:
            meter = measure_with(
                session, ids, min(positions, len(ids) - 1), DivergenceMeter(session.dense_runtime)
            )
        total, steps = total + meter.divergence, steps + meter.steps
        say(f"text {number}/{len(texts)} {name}: {len(ids)} tokens, {meter.steps} positions")
    return 1 - total / steps


def read_blocks(folder: str | Path) -> Blocks:
    """The blocks in a model folder's pod.json. Raises BadCheckpoint where the file is missing
    or was made for another model.
    """
    path = Path(folder) / NAME
    try:
        data = read_object(inside(Path(folder), NAME))
        blocks, made_for = tuple(map(tuple, data["blocks"])), data["fingerprint"]
    except (BadCheckpoint, KeyError, TypeError) as error:
        raise BadCheckpoint(
            f"{path}: found no blocks ({shown(str(error), 120)}); "
            f"make them: python -m tools.calibrate.pod_groups --model {folder}"
        ) from error
    if data.get("format") != FORMAT or made_for != fingerprint(folder):
        raise BadCheckpoint(
            f"{path}: made for other weights, or by another version; "
            "make it anew: python -m tools.calibrate.pod_groups"
        )
    return blocks


def run(args: argparse.Namespace) -> None:
    """Group the layers, print the blocks and write pod.json."""
    llm = loaded(args)
    length = min(args.length, llm.max_context)
    if length < 256 or args.positions < 1 or args.texts < 1 or not 0 <= args.delta <= 1:
        raise UsageError(
            f"found length {length}, positions {args.positions}, texts {args.texts}, "
            f"delta {args.delta}; expected a length of at least 256, counts of at least 1 "
            "and a delta from 0 to 1"
        )
    texts = texts_for(llm, args.text, args.texts, length, args.seed)
    similarity = similarity_of(llm, texts, args.positions, say)
    blocks, delta = group(similarity, args.delta, args.saving)
    layers = llm.config.num_layers
    print("| K/V head | blocks | first layers |\n|---|---|---|")
    for head, firsts in enumerate(blocks):
        print(f"| {head} | {len(firsts)} of {layers} | {', '.join(map(str, firsts))} |")
    print(
        f"\ndelta {delta:.4f}: {saving(blocks, layers):.1%} of the keys and values "
        "of a long context need not be stored"
    )
    print(f"\nPodUntrained(blocks={blocks})")
    data: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": fingerprint(llm.folder),
        "blocks": blocks,
        "delta": delta,
        "positions": args.positions,
        "made_by": f"tools.calibrate.pod_groups {VERSION}",
    }
    if not args.dry_run:
        path = Path(args.out or llm.folder / NAME)
        try:
            replace_json(path, data)
        except OSError as error:
            raise UsageError(
                f"--out: found {error}, expected a place that can be written"
            ) from error
        print(f"written: {path}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.calibrate.pod_groups", "Group a model's layers for PodUntrained.")
    add_list_flags(p, NAME, positions=16)
    p.add_argument(
        "--delta",
        type=float,
        default=0.5,
        help="least similarity inside a block (default 0.5, the paper's)",
    )
    p.add_argument(
        "--saving",
        type=float,
        help="take the largest delta that saves this share of keys and values, not --delta",
    )
    return p


main = entry(lambda argv: parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
