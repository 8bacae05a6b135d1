"""python -m tools.calibrate: find a model's filter layers by measuring what its layers attend to,
and write omnikv.json.

Reads long texts (yours, or tasks made for the purpose), measures at decode positions how much of
every layer's attention falls on the tokens that each layer below would choose, and picks the filter
layers by dynamic programming. Progress on stderr, results on stdout.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from engine import LLM, EngineError, Full
from engine.errors import UsageError
from engine.plan.filter_layers import FORMAT, NAME, cache_file
from engine.version import VERSION
from tools.choose_layers import best_sets, choose, mean_mass
from tools.similarity import head_groups, kept, measure
from tools.tasks import make_sample
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint

# retrieval, multi-hop, dictionary, many evidence
MADE = ("kv", "chains", "two_stage", "facts", "listing", "mixed", "frequent")


def texts_for(llm, files, count, length, seed):
    """(name, ids) of every calibration text: the user's files cut to `length` tokens, or made ones
    of about that length.
    """
    found = []
    for file in files:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--text {file}: found {error}, expected a readable UTF-8 file"
            ) from error
        ids = llm.tokenizer.encode(text)
        if len(ids) < 128:
            raise UsageError(f"--text {file}: found {len(ids)} tokens, expected at least 128")
        found.append((Path(file).name, ids[:length]))
    if found:
        return found

    def size(text):
        return len(llm.tokenizer.encode(text, special=False))

    # those need room
    kinds = [
        name for name in MADE if length >= 1024 or name not in ("mixed", "listing", "frequent")
    ]
    for number in range(count):
        name = kinds[number % len(kinds)]
        sample = make_sample(name, length - 96, size, seed + number)
        text = f"{sample.document}\n{sample.questions[0]}\n{sample.answers[0]}"
        try:
            rendered = llm.tokenizer.render(
                [{"role": "user", "content": f"{sample.document}\n{sample.questions[0]}"}]
            )
            ids = llm.tokenizer.encode(rendered + sample.answers[0], special=False)
        except EngineError:
            ids = llm.tokenizer.encode(text)
        found.append((name, ids[: llm.max_context]))
    return found


def collect(llm, texts, positions, share, tail, say):
    """Means over all texts: (mass [L, L], reads kept [L, L], heads [L, L, H], k of the longest
    text); see tools/similarity.py.
    """
    mass = heads = lost = pointed = 0
    steps, k, began = 0, 0, time.perf_counter()
    for number, (name, ids) in enumerate(texts):
        k = max(k, max(16, int(share * len(ids))))
        with llm.session() as session:
            meter = measure(
                session, ids, min(positions, len(ids) // 2), max(16, int(share * len(ids))), tail
            )
        mass, heads, steps = mass + meter.mass, heads + meter.heads, steps + meter.steps
        lost, pointed = lost + meter.lost, pointed + meter.pointed
        done = number + 1
        left = (time.perf_counter() - began) / done * (len(texts) - done)
        say(
            f"text {done}/{len(texts)} {name}: {len(ids)} tokens, {meter.steps} positions, about {left:.0f} s left"
        )
    return (
        mass / steps,
        kept(mass / steps, lost / steps, pointed / steps, llm.config.num_heads),
        heads / steps,
        k,
    )


def report(sets, chosen, config, n, k, tail, size, published, value, mass, wait):
    """The trade-off table and the choice as Markdown lines; value: the matrix that the sets were
    chosen by.
    """
    row, full = config.kv_bytes(size), config.num_layers * n * config.kv_bytes(size)
    lines = [
        f"| filters | full layers | reads kept | mass seen | KV bytes per step at {n} | share of full attention |",
        "|---|---|---|---|---|---|",
    ]
    for (_, _), c in sorted(sets.items(), key=lambda item: (len(item[1].filters), item[1].dense)):
        mark = " **chosen**" if c == chosen else ""
        lines.append(
            f"| {','.join(map(str, c.filters))}{mark} | {c.dense}/{config.num_layers} | "
            f"{mean_mass(value, c.filters, wait):.4f} | {mean_mass(mass, c.filters, wait):.4f} | "
            f"{c.bytes_per_step(n, k, tail, row)} | {c.bytes_per_step(n, k, tail, row) / full:.3f} |"
        )
    if published:
        lines.append(
            f"\npublished filter layers {published}: reads kept {mean_mass(value, published, wait):.4f}, "
            f"mass seen {mean_mass(mass, published, wait):.4f}"
        )
    return lines


def plot(folder, mass, heads, chosen):
    """similarity.png (heat map) and filter_ability.png (mean mass of the next 8 and 16 layers) in
    `folder`.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UsageError(f"--plot: {error}; install matplotlib (pip install '.[plots]')") from error
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 6))
    shown = axes.imshow(torch.where(mass > 0, mass, torch.nan), vmin=0, vmax=1, cmap="viridis")
    axes.set(
        xlabel="layer that attends",
        ylabel="layer that chooses",
        title="share of attention to old tokens on the chooser's top-k",
    )
    figure.colorbar(shown)
    figure.savefig(folder / "similarity.png", dpi=120, bbox_inches="tight")
    figure, axes = plt.subplots(figsize=(7, 4))
    layers = len(mass)
    for span in (8, 16):
        axes.plot(
            range(layers - 1),
            [float(mass[i, i + 1 : i + 1 + span].mean()) for i in range(layers - 1)],
            "o-",
            label=f"next {span}",
        )
    for f in chosen.filters if chosen else ():
        axes.axvline(f, color="grey", linestyle="--")
    axes.set(
        xlabel="layer",
        ylabel="mean mass kept",
        ylim=(0, 1.02),
        title="filter ability (dashed: chosen)",
    )
    axes.legend()
    figure.savefig(folder / "filter_ability.png", dpi=120, bbox_inches="tight")


def save(folder, data, out):
    """Write omnikv.json beside the model, to `out`, or to the user's cache where the folder cannot
    be written; returns the path.
    """
    text = json.dumps(data, indent=1) + "\n"
    for path in [Path(out)] if out else [Path(folder) / NAME, cache_file(data["fingerprint"])]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".tmp")
            beside.write_text(text)
            beside.replace(path)
            return path
        except OSError as error:
            last = error
    raise UsageError(f"--out: found {last}, expected a place that can be written")


def parser():
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m tools.calibrate", description="Find the filter layers of a model."
    )
    p.add_argument("--model", required=True, help="alias, hub id or folder")
    p.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="calibrate on this text (repeatable; - is stdin)",
    )
    p.add_argument(
        "--texts",
        type=int,
        default=10,
        help="how many texts to make where no --text is given (default 10)",
    )
    p.add_argument(
        "--length",
        type=int,
        help="tokens per text (default: 8192 on a CPU, 131072 on a GPU, or the model's limit)",
    )
    p.add_argument(
        "--positions",
        type=int,
        default=24,
        help="decode positions measured at the end of each text (default 24)",
    )
    p.add_argument(
        "--share", type=float, default=0.067, help="budget as a share of the text (default 0.067)"
    )
    p.add_argument("--wait-layers", type=int, default=1)
    p.add_argument("--filters", type=int, default=3, help="most filter layers (default 3)")
    p.add_argument(
        "--most-dense",
        type=float,
        default=0.375,
        help="most full layers, as a share of all (default 0.375)",
    )
    p.add_argument(
        "--slack",
        type=float,
        default=0.01,
        help="reads kept (or mass) that fewer full layers may cost (default 0.01)",
    )
    p.add_argument(
        "--by",
        choices=("reads", "mass"),
        default="reads",
        help="reads: heads that read one token must find it, diffuse ones count a tenth (default); mass: the paper's mean mass",
    )
    p.add_argument("--dtype", default="auto")
    p.add_argument("--device", default="auto")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--plot", metavar="DIR", type=Path, help="write similarity.png and filter_ability.png"
    )
    p.add_argument("--json", metavar="FILE", help="write everything measured")
    p.add_argument(
        "--out",
        metavar="FILE",
        help="where to write omnikv.json (default: beside the model, else the user's cache)",
    )
    p.add_argument("--dry-run", action="store_true", help="measure and print, write no omnikv.json")
    return p


def run(args):
    """Calibrate; returns the data of omnikv.json."""
    began = time.perf_counter()
    llm = LLM(args.model, device=args.device, dtype=args.dtype, method=Full())
    config = llm.config
    length = min(args.length or (8192 if llm.device.type == "cpu" else 131072), llm.max_context)
    if length < 256 or not 0 < args.share < 1 or args.positions < 1 or args.texts < 1:
        raise UsageError(
            f"found length {length}, share {args.share}, positions {args.positions}, texts {args.texts}; "
            f"expected a length of at least 256, a share in (0, 1) and counts of at least 1"
        )
    texts = texts_for(llm, args.text, args.texts, length, args.seed)
    tail = 64 if length < 2048 else 256
    mass, reads, heads, k = collect(
        llm, texts, args.positions, args.share, tail, lambda line: print(line, file=sys.stderr)
    )
    value = reads if args.by == "reads" else mass
    sets = best_sets(value.tolist(), args.filters, args.wait_layers)
    # shallow models need as many
    most_dense = max(int(args.most_dense * config.num_layers), min(4, config.num_layers - 1))
    chosen = choose(sets, most_dense, args.slack)
    if chosen is None:
        raise UsageError(
            f"--most-dense: found {args.most_dense}, expected a share that leaves a sparse layer of {config.num_layers}"
        )
    hub_id = llm.resolved.hub_id
    published = next(
        (a.filter_layers for a in ALIASES.values() if a.filter_layers and a.hub_id == hub_id), None
    )
    print(
        "\n".join(
            report(
                sets,
                chosen,
                config,
                length,
                k,
                tail,
                llm.dtype.itemsize,
                published,
                value,
                mass,
                args.wait_layers,
            )
        )
    )
    print(
        f"\nchosen: {chosen.filters}, {chosen.dense} of {config.num_layers} layers full, by {args.by}: {chosen.mass:.4f}"
    )
    data = {
        "format": FORMAT,
        "fingerprint": fingerprint(llm.folder),
        "filter_layers": list(chosen.filters),
        "wait_layers": args.wait_layers,
        "k": k,
        "scores": "softmax",
        "made_by": f"tools.calibrate {VERSION}",
    }
    if args.plot:
        plot(args.plot, mass, heads, chosen)
    if args.json:
        groups = head_groups(heads, max(1, config.num_layers // 4))
        Path(args.json).write_text(
            json.dumps(
                data
                | {
                    "mass": mass.tolist(),
                    "reads": reads.tolist(),
                    "by": args.by,
                    "head_groups": groups,
                    "sets": [[c.filters, c.dense, c.mass] for c in sets.values()],
                }
            )
        )
    if not args.dry_run:
        print(f"written: {save(llm.folder, data, args.out)}")
    print(
        f"{time.perf_counter() - began:.0f} s, {len(texts)} texts of up to {length} tokens",
        file=sys.stderr,
    )
    return data


def main(argv=None):
    """Command line: 0, 1 (run failure), 2 (usage), 130 (Ctrl-C)."""
    try:
        run(parser().parse_args(argv))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
