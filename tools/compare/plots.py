"""Plots of a comparison: accuracy by budget (the shape of the paper's Figure 3), in both turns, and
heat maps of depth by length.
"""

import math

from tools.eval.report import DEPTH_BINS

# one piece of evidence at one depth
NEEDLES = ("needle", "passkey", "number_string", "kv", "kv_uuid", "needle_multi_key")


def plots(rows, evicting, folder):
    """Paths of budget-LENGTH.png, second-LENGTH.png and depth.png in `folder`; none without
    matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    paths = []
    for length in sorted({row["length"] for row in rows}):
        for turn, name in ((1, "budget"), (2, "second")):
            found = [row for row in rows if row["length"] == length and row["turn"] == turn]
            if found:
                title = f"{'first' if turn == 1 else 'second'} questions, {length:,} tokens"
                paths.append(by_budget(found, evicting, folder / f"{name}-{length}.png", title))
    first = [row for row in rows if row["turn"] == 1]
    tasks = next(
        ([task] for task in NEEDLES if any(row["task"] == task for row in first)),
        sorted({row["task"] for row in first}),
    )
    if first:
        paths.append(
            depth_maps(
                [row for row in first if row["task"] in tasks],
                folder / "depth.png",
                ", ".join(tasks),
            )
        )
    return paths


def by_budget(rows, evicting, path, title):
    """Accuracy over token share: a panel for the mean and per task, a line per method; full
    attention dashed, what evicts dotted.
    """
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    panels, across = ["mean", *tasks], min(3, len(tasks) + 1)
    down = -(-len(panels) // across)
    # layers kept dense are another method, not another budget
    rows = [row for row in rows if not row["kept"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    # the legend is beside the panels
    height = max(2.9 * down, 0.18 * len(names)) + 0.4
    figure, axes = pyplot.subplots(
        down, across, figsize=(3.6 * across + 2.2, height), squeeze=False, sharey=True
    )
    shares = sorted({row["budget"] for row in rows if row["kind"] == "share"}) or [100.0]
    styles = _styles(names, evicting)
    for axis, panel in zip(axes.flat, panels):
        some = rows if panel == "mean" else [row for row in rows if row["task"] == panel]
        for number, (name, style) in enumerate(styles.items()):
            # equal values beside each other, not on top
            aside = 1.0 + min(0.02, 0.3 / len(styles)) * (number - len(styles) / 2)
            _line(
                axis,
                [row for row in some if row["name"] == name],
                shares,
                style,
                name,
                aside,
                panel == "mean",
            )
        axis.set(title=panel, ylim=(-0.03, 1.05), xscale="log")
        named = [f"{share:g}%\n{round(share * rows[0]['length'] / 100):,}" for share in shares]
        axis.set_xticks(shares, named, fontsize=7)
        axis.minorticks_off()
        axis.set_xlabel("budget: % of the prompt's tokens, tokens", fontsize=8)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"accuracy by budget: {title}", fontsize=10)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="center right", fontsize=7)
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / (3.6 * across + 2.2), 1 - 0.3 / height))
    return _save(figure, path)


def _styles(names, evicting):
    """{method: (colour, line, marker)}: full attention black, methods that evict dotted."""
    from matplotlib import colormaps

    strong, other, markers = colormaps["tab20"].colors, colormaps["tab20b"].colors, "osD^v<>Pp*X"
    colours = [*strong[::2], *strong[1::2], *other[::2]]  # 30: more than there are methods
    return {
        name: ("black", "--", None)
        if name == "full"
        else (
            colours[i % len(colours)],
            ":" if name in evicting else "-",
            markers[i % len(markers)],
        )
        for i, name in enumerate(sorted(names, key=lambda n: n != "full"), start=-1)
    }


def _line(axis, rows, shares, style, name, aside, mean):
    """One method in one panel: its accuracy at each share (mean over tasks in the panel of the
    mean), or a level where it has none.
    """
    colour, line, marker = style
    if not any(row["kind"] == "share" for row in rows):
        rows = [row for row in rows if row["kind"] == "none"]
        if rows:
            level = sum(row["accuracy"] for row in rows) / len(rows)
            axis.plot(
                [shares[0] * 0.85, shares[-1] * 1.18],
                [level, level],
                color=colour,
                linestyle="--",
                linewidth=1,
                label=name,
            )
        return
    points = []
    for share in shares:
        found = [row for row in rows if row["kind"] == "share" and row["budget"] == share]
        if found:
            points.append(
                (
                    share * aside,
                    sum(row["accuracy"] for row in found) / len(found),
                    found[0] if len(found) == 1 and not mean else None,
                )
            )
    axis.plot(
        [p[0] for p in points],
        [p[1] for p in points],
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=4,
        linewidth=1,
        label=name,
    )
    for share, _, row in points:
        if row is not None:
            axis.plot(
                [share, share], [row["low"], row["high"]], color=colour, linewidth=0.6, alpha=0.6
            )


def depth_maps(rows, path, title):
    """Accuracy by depth (down) and length (across), a map per method at the largest token share
    that it ran with.
    """
    from matplotlib import pyplot

    largest = {}
    for row in rows:
        if (
            row["kind"] != "mem"
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
    figure, axes = pyplot.subplots(
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
    return _save(figure, path)


def _share(rows, variant, length, depth):
    found = [
        row["depths"][depth]
        for row in rows
        if row["variant"] == variant and row["length"] == length
    ]
    asked = sum(n for _, n in found)
    return sum(r for r, _ in found) / asked if asked else math.nan


def _save(figure, path):
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
