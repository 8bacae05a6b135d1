"""Heat maps of a comparison: accuracy by depth of the evidence and length of the document."""

import math

from tools.common.page import pyplot, saved
from tools.compare.stats import DEPTH_BINS

# one piece of evidence at one depth
NEEDLES = ("needle", "passkey", "number_string", "kv", "kv_uuid", "needle_multi_key")


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
