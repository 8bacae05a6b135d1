"""The plot of a comparison: accuracy against the bytes that a step reads and a session holds."""

TICKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 75, 100)  # per cent
# controls read what OmniKV reads: beside it, not on top
ASIDE = {"omnikv_random": 0.985, "omnikv_newest": 1.015}


def plot_bytes(at_bytes, folder):
    """Paths of bytes-LENGTH.png in `folder`, one per length of {length: points_of}; none without
    matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    return [
        by_bytes(points, folder / f"bytes-{length}.png", length)
        for length, points in at_bytes.items()
        if any(point["read_share"] for point in points)
    ]


def by_bytes(points, path, length):
    """First and second questions (down), bytes read and bytes resident (across), both as shares of
    full attention's: a line per method through its budgets, controls in black, methods that evict
    dotted, layers kept dense as hollow marks.
    """
    from matplotlib import pyplot

    turns = [turn for turn in ("first", "second") if any(point[turn] for point in points)]
    figure, axes = pyplot.subplots(
        len(turns), 2, figsize=(13.5, 4.4 * len(turns)), squeeze=False, sharey=True, sharex="col"
    )
    lines = {}
    for point in points:
        lines.setdefault((point["name"], bool(point["kept"])), []).append(point)
    styles = _styles(lines, {p["name"]: (p["control"], p["evicts"]) for p in points})
    for row, turn in zip(axes, turns):
        for axis, share, what in (
            (row[0], "read_share", "bytes read per step"),
            (row[1], "resident_share", "bytes resident on the device"),
        ):
            for key in sorted(lines, key=_order):
                _line(axis, lines[key], turn, share, styles[key], _name(key))
            axis.set(xscale="log", ylim=(-0.03, 1.05))
            if turn == turns[-1]:
                axis.set_xlabel(f"{what}, % of full attention's")
            ticks = [tick for tick in TICKS if tick >= axis.get_xlim()[0]]
            axis.set_xticks(ticks, [f"{tick}" for tick in ticks])
            axis.minorticks_off()
            axis.grid(alpha=0.25)
        row[0].set_ylabel(f"accuracy, {turn} questions")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="center right", fontsize=7.5)
    figure.suptitle(f"accuracy at equal bytes, {length:,} tokens (all tasks, 95% intervals)")
    figure.tight_layout(rect=(0, 0, 0.87, 0.98))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _order(key):
    """Full attention, OmniKV and its controls first."""
    name, kept = key
    return name != "full", not name.startswith("omnikv"), name, kept


def _name(key):
    return key[0] + (" +dense" if key[1] else "")


def _styles(lines, facts):
    """{(name, kept): (colour, line, marker, fill)}."""
    from matplotlib import colormaps

    # without tab20's red: OmniKV's own
    colours = [*colormaps["tab20"].colors[::2], *colormaps["tab20b"].colors[::2]]
    del colours[3]
    marks, number, styles = "osD^v<>Pp*hd", 0, {}
    for name in sorted({name for name, _ in lines}):
        control, evicts = facts[name]
        colour, mark = colours[number % len(colours)], marks[number % len(marks)]
        if name == "full":
            colour, mark = "black", "*"
        elif control:
            colour, mark = "black", {"omnikv_random": "x", "omnikv_newest": "+"}.get(name, "1")
        elif name == "omnikv":
            colour, mark = "red", "o"
        else:
            number += 1
        for kept in (False, True):
            line = "--" if control else ":" if evicts else "-"
            styles[name, kept] = colour, line, mark, "none" if kept else colour
    return styles


def _line(axis, points, turn, share, style, name):
    """One method in one panel."""
    colour, line, mark, fill = style
    points = sorted((p for p in points if p[turn] and p[share]), key=lambda p: p[share])
    if not points:
        return
    aside = 100 * ASIDE.get(points[0]["name"], 1.0)
    across, means = [aside * p[share] for p in points], [p[turn].mean for p in points]
    low = [p[turn].mean - max(0.0, p[turn].low) for p in points]
    high = [min(1.0, p[turn].high) - p[turn].mean for p in points]
    strong = colour in ("black", "red")
    axis.errorbar(
        across,
        means,
        yerr=[[max(0.0, x) for x in low], [max(0.0, x) for x in high]],
        color=colour,
        linestyle=line,
        marker=mark,
        markerfacecolor=fill if mark not in "x+1" else colour,
        markersize=8 if strong else 4.5,
        linewidth=1.4 if strong else 0.8,
        elinewidth=0.5,
        label=name,
        zorder=3 if strong else 2,
    )
