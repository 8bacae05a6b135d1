"""Find a model's filter layers and write omnikv.json.

--by loss (default) searches for the layers under which the model's next tokens are closest to full
attention's, on real texts (tools/calibrate/by_loss.py). --by reads and --by mass measure at decode
positions how much of every layer's attention falls on the tokens that each layer below would
choose, and pick filter layers by dynamic programming. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.plan.filter_layers import FORMAT, NAME, cache_file
from tools.calibrate.by_loss import run_by_loss
from tools.calibrate.choose_layers import Choice, best_sets, choose
from tools.calibrate.report import plot, report
from tools.calibrate.similarity import head_groups, kept, measure
from tools.calibrate.texts import add_text_flags, texts_for
from tools.common.arguments import add_flags, command, loaded
from tools.common.program import guarded, replace_json, replace_text, require_writable, say
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.calibrate", "Find the filter layers of a model.")
    add_text_flags(p, None, "8, and 8 held out; reads: 10")
    add = p.add_argument
    add(
        "--by",
        choices=("loss", "reads", "mass"),
        default="loss",
        help="loss: KL of next tokens against full attention (default); reads: heads that read one "
        "token must find it, diffuse ones count a tenth; mass: the paper's mean mass",
    )
    add(
        "--length",
        type=int,
        help="tokens per text (1500 on a CPU, 8192 on a GPU; reads, mass: 8192, 131072)",
    )
    add("--positions", type=int, help="decode positions at the end of each text (32; reads: 24)")
    add("--share", type=float, help="budget as a share of the text (default 0.0667; reads: 0.067)")
    add("--out", metavar="FILE", help="where to write omnikv.json (default: beside the model)")
    add("--dry-run", action="store_true", help="measure and print, write no omnikv.json")
    _loss(p.add_argument_group("--by loss"))
    _masses(p.add_argument_group("--by reads and --by mass"))
    return p


def _loss(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--full-layers", type=int, metavar="N", help="take the set of N full layers, not the knee")
    add("--most-full", type=int, metavar="N", help="most full layers (default: a third, or 4)")
    add_flags(group, "tail fresh")
    add(
        "--start",
        choices=("even", "nothing"),
        default="even",
        help="begin with evenly spaced layers and take away (default), or with none and add",
    )


def _masses(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--wait-layers", type=int, default=0, help="wait layers after a filter layer (default 0)")
    add("--filters", type=int, default=3, help="most filter layers (default 3)")
    add(
        "--most-dense",
        type=float,
        default=0.375,
        help="most full layers, as a share of all (default 0.375)",
    )
    add(
        "--slack",
        type=float,
        default=0.01,
        help="reads kept (or mass) that fewer full layers may cost (default 0.01)",
    )
    add("--plot", metavar="DIR", type=Path, help="write similarity.png and filter_ability.png")
    add("--json", metavar="FILE", help="write everything measured")


def collect(
    llm: LLM,
    texts: Sequence[tuple[str, list[int]]],
    positions: int,
    share: float,
    tail: int,
    say: Callable[[str], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Means over all texts (tools/calibrate/similarity.py): mass [L, L], reads kept [L, L], mass
    per head [L, L, H], all float64; and k of the longest text.
    """
    meters, k, began = [], 0, time.perf_counter()
    for done, (name, ids) in enumerate(texts, 1):
        budget = max(16, int(share * len(ids)))
        k = max(k, budget)
        with llm.session() as session:
            meters.append(measure(session, ids, min(positions, len(ids) // 2), budget, tail))
        left = (time.perf_counter() - began) / done * (len(texts) - done)
        say(
            f"text {done}/{len(texts)} {name}: {len(ids)} tokens, {meters[-1].steps} positions, "
            f"about {left:.0f} s left"
        )
    steps = sum(meter.steps for meter in meters)
    mass, lost, pointed, heads = (
        sum(getattr(meter, name) for meter in meters) / steps
        for name in ("mass", "lost", "pointed", "heads")
    )
    return mass, kept(mass, lost, pointed, llm.config.num_heads), heads, k


def save(folder: Path, data: dict[str, Any], out: str | None) -> Path:
    """Write omnikv.json to `out`, else beside the model, else (where the folder cannot be written)
    to the user's cache; returns the path.
    """
    places = [Path(out)] if out else [Path(folder) / NAME, cache_file(data["fingerprint"])]
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return replace_json(path, data)
        except OSError as error:
            last = error
    raise UsageError(f"--out: found {last}, expected a place that can be written")


LENGTHS = {"loss": (1500, 8192), "reads": (8192, 131072), "mass": (8192, 131072)}  # CPU, GPU
DEFAULTS = {"loss": (32, 0.0667, 8), "reads": (24, 0.067, 10), "mass": (24, 0.067, 10)}


def checked_length(args: argparse.Namespace, llm: LLM) -> int:
    """Return the tokens per text, and set the measure's defaults in `args`. Raises UsageError for
    numbers out of range.
    """
    on_cpu, on_gpu = LENGTHS[args.by]
    length = args.length or (on_cpu if llm.device.type == "cpu" else on_gpu)
    length = min(length, llm.max_context)
    for name, value in zip(("positions", "share", "texts"), DEFAULTS[args.by]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if length < 256 or not 0 < args.share < 1 or args.positions < 1 or args.texts < 1:
        raise UsageError(
            f"found length {length}, share {args.share}, positions {args.positions}, "
            f"texts {args.texts}; expected a length of at least 256, a share in (0, 1) "
            "and counts of at least 1"
        )
    if args.positions > length // 2 or args.tail < 64:
        raise UsageError(
            f"found positions {args.positions}, tail {args.tail}; expected at most half of the "
            f"length ({length}) and a tail of at least 64"
        )
    return length


def chosen_set(
    args: argparse.Namespace, sets: dict[tuple[int, int], Choice], layers: int
) -> Choice:
    """The set to use, or UsageError where --most-dense leaves none."""
    # shallow models need as many
    most_dense = max(int(args.most_dense * layers), min(4, layers - 1))
    chosen = choose(sets, most_dense, args.slack)
    if chosen is None:
        raise UsageError(
            f"--most-dense: found {args.most_dense}, "
            f"expected a share that leaves a sparse layer of {layers}"
        )
    return chosen


def require_places(args: argparse.Namespace) -> None:
    """Raise UsageError where a result could not be written or drawn, before the measurement."""
    for flag, path in (("--out", args.out), ("--json", args.json)):
        if path is not None:
            require_writable(flag, path)
    if args.plot is not None:
        require_writable("--plot", args.plot / "similarity.png")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot: needs matplotlib, which is not installed: pip install it")


def require_numbers(args: argparse.Namespace, layers: int) -> None:
    """Raise UsageError where a number of --by reads and --by mass cannot be meant."""
    for flag, value, least, most in (
        ("--wait-layers", args.wait_layers, 0, layers - 1),
        ("--filters", args.filters, 1, layers - 1),
        ("--most-dense", args.most_dense, 0, 1),
        ("--slack", args.slack, 0, 1),
    ):
        if not least <= value <= most:  # so nan is refused too
            raise UsageError(f"{flag}: found {value}, expected {least} to {most}")


def run(args: argparse.Namespace) -> None:
    """Calibrate, print the table and write what was asked for."""
    began = time.perf_counter()
    require_places(args)
    llm = loaded(args)
    require_numbers(args, llm.config.num_layers)
    whole = len(llm.config.seeing_layers)
    if whole < 3:
        raise UsageError(
            f"calibrate: found {whole} layers that see everything, expected at least 3: fewer "
            "leave nothing to choose"
        )
    kinds = ("sliding-window", llm.config.local_layers), ("recurrent", llm.config.recurrent_layers)
    for kind, layers in kinds:
        if layers and args.by != "loss":
            raise UsageError(
                f"--by {args.by}: does not know {kind} layers ({llm.config.family}); use --by loss"
            )
    length = checked_length(args, llm)
    if args.by == "loss":
        by_loss(llm, args, length)
    else:
        by_mass(llm, args, length)
    say(f"{time.perf_counter() - began:.0f} s, texts of up to {length} tokens")


def calibration(llm: LLM, filters: Sequence[int], wait: int, k: int) -> dict[str, Any]:
    """The content of omnikv.json."""
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(llm.folder),
        "filter_layers": list(filters),
        "wait_layers": wait,
        "k": k,
        "scores": "softmax",
        "made_by": f"tools.calibrate {VERSION}",
    }


def by_loss(llm: LLM, args: argparse.Namespace, length: int) -> None:
    """Search, print, and write the calibration."""
    chosen, lines, k = run_by_loss(llm, args, length)
    print("\n".join(lines))
    print(
        f"\nchosen: {chosen.filters}, {len(chosen.full)} of "
        f"{len(llm.config.seeing_layers)} layers full, "
        f"held-out KL {chosen.held:.4f}"
    )
    if not args.dry_run:
        print(f"written: {save(llm.folder, calibration(llm, chosen.filters, 0, k), args.out)}")


def by_mass(llm: LLM, args: argparse.Namespace, length: int) -> None:
    """Measure reads kept and mass, print, and write what was asked for."""
    config = llm.config
    texts = texts_for(llm, args.text, args.texts, length, args.seed)
    tail = 64 if length < 2048 else 256
    mass, reads, heads, k = collect(llm, texts, args.positions, args.share, tail, say)
    value = reads if args.by == "reads" else mass
    sets = best_sets(value.tolist(), args.filters, args.wait_layers)
    chosen = chosen_set(args, sets, config.num_layers)
    aliases = [a for a in ALIASES.values() if a.filter_layers and a.hub_id == llm.resolved.hub_id]
    published = aliases[0].filter_layers if aliases else None
    size, wait = llm.dtype.itemsize, args.wait_layers
    lines = report(sets, chosen, config, length, k, tail, size, published, value, mass, wait)
    print("\n".join(lines))
    print(
        f"\nchosen: {chosen.filters}, {chosen.dense} of {config.num_layers} layers full, "
        f"by {args.by}: {chosen.mass:.4f}"
    )
    data = calibration(llm, chosen.filters, wait, k)
    if args.json:
        measured = {
            "mass": mass.tolist(),
            "reads": reads.tolist(),
            "by": args.by,
            "head_groups": head_groups(heads, max(1, config.num_layers // 4)),
            "sets": [[c.filters, c.dense, c.mass] for c in sets.values()],
        }
        replace_text(Path(args.json), json.dumps(data | measured))
    if not args.dry_run:
        print(f"written: {save(llm.folder, data, args.out)}")
    if args.plot:  # last: a plot that fails loses nothing
        plot(args.plot, mass, chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = parser().parse_args(argv)
    stopped = "stopped; a search by loss goes on from here next time" if args.by == "loss" else ""
    return guarded(lambda: run(args), stopped)
