"""Accuracy of a comparison by length of the document, and by depth of the evidence in it."""

import math

from tools.common.page import pyplot, saved
from tools.compare.stats import DEPTH_BINS

LINES = 12  # of a panel, at most
# one piece of evidence at one depth
NEEDLES = ("needle", "passkey", "number_string", "kv", "kv_uuid", "needle_multi_key")


def lengths_plot(rows, folder):
    """Path of accuracy.png in `folder`, of the first questions: by length, a panel per task, a line
    per method with 95% intervals; None where there are more than LINES methods, one length, or no
    matplotlib.
    """
    first = [row for row in rows if row["turn"] == 1]
    variants, tasks = (
        list(dict.fromkeys(row[key] for row in first)) for key in ("variant", "task")
    )
    lengths = sorted({row["length"] for row in first})
    if len(lengths) < 2 or len(variants) > LINES or pyplot() is None:
        return None
    across = min(4, len(tasks))
    down = -(-len(tasks) // across)
    size = 3.2 * across, 2.6 * down
    figure, axes = pyplot().subplots(down, across, figsize=size, squeeze=False, sharey=True)
    for axis, task in zip(axes.flat, tasks):
        for variant in variants:
            own = [row for row in first if (row["task"], row["variant"]) == (task, variant)]
            own.sort(key=lambda row: row["length"])
            at, means = [row["length"] for row in own], [row["accuracy"] for row in own]
            ends = [[max(0.0, row["accuracy"] - row["low"]) for row in own]]
            ends += [[max(0.0, row["high"] - row["accuracy"]) for row in own]]
            axis.errorbar(at, means, ends, marker="o", markersize=3, capsize=2, label=variant)
        axis.set(title=task, ylim=(-0.03, 1.05), xscale="log")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=7)
        axis.minorticks_off()  # a log axis writes 2 x 10^3 between the lengths
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    figure.tight_layout()
    return saved(figure, folder / "accuracy.png")


def depth_plot(rows, folder):
    """Path of depth.png in `folder`, of the first questions; None without them or without
    matplotlib.
    """
    if pyplot() is None:
        return None
    first = [row for row in rows if row["turn"] == 1]
    if not first:
        return None
    tasks = next(
        ([task] for task in NEEDLES if any(row["task"] == task for row in first)),
        sorted({row["task"] for row in first}),
    )
    found = [row for row in first if row["task"] in tasks]
    return depth_maps(found, folder / "depth.png", ", ".join(tasks))


def depth_maps(rows, path, title):
    """Accuracy by depth (down) and length (across), a map per method at the largest budget that it
    ran with, of token shares where there are some.
    """
    largest = {}
    by_share = any(row["kind"] == "share" for row in rows)
    for row in rows:
        if (
            not (by_share and row["kind"] == "mem")
            and not row["kept"]
            and row["budget"] >= largest.get(row["name"], row)["budget"]
        ):
            largest[row["name"]] = row
    variants, lengths = (
        [row["variant"] for row in largest.values()],
        sorted({row["length"] for row in rows}),
    )
    across = min(6, len(variants))
    down = -(-len(variants) // across)
    figure, axes = pyplot().subplots(
        down, across, figsize=(1.9 * across + 0.8, 2.0 * down + 0.6), squeeze=False
    )
    image = None
    for axis, variant in zip(axes.flat, variants):
        grid = [
            [_share(rows, variant, length, depth) for length in lengths]
            for depth in range(DEPTH_BINS)
        ]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6)
        axis.set_title(variant, fontsize=7)
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=6)
        axis.set_yticks(
            range(DEPTH_BINS), [f"{100 * i // DEPTH_BINS}%" for i in range(DEPTH_BINS)], fontsize=6
        )
    for axis in list(axes.flat)[len(variants) :]:
        axis.set_visible(False)
    figure.suptitle(f"accuracy by depth of the evidence and length: {title}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 0.93, 1 - 0.35 / (2.0 * down + 0.6)))
    figure.colorbar(image, cax=figure.add_axes((0.945, 0.15, 0.012, 0.7))).ax.tick_params(
        labelsize=6
    )
    return saved(figure, path, 120)


def _share(rows, variant, length, depth):
    found = [
        row["depths"][depth]
        for row in rows
        if row["variant"] == variant and row["length"] == length
    ]
    asked = sum(n for _, n in found)
    return sum(r for r, _ in found) / asked if asked else math.nan
