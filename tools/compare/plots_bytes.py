"""The plots of a comparison, one per question: accuracy of first and of second questions against
the bytes that a method holds, or against those that a step reads where no budget was of resident
bytes. A panel per method, with full attention, OmniKV and the control by chance in each.
"""

from tools.common.page import pyplot, saved

TICKS = (1, 2, 3, 5, 10, 20, 30, 50, 75, 100)  # per cent
OMNIKV, EVICTS, CHOOSES, CONTROL, FULL = "#c0392b", "#1f5fa8", "#2e7d32", "#7f7f7f", "black"
ACROSS = 4  # panels beside each other
APART = 0.075  # of a panel's height: labels do not overlap
BY_CHANCE = "random_eviction_all"


def plot_bytes(at_bytes, folder):
    """Paths of first-LENGTH.png and second-LENGTH.png in `folder`, for each length of
    {length: points_of}; none without matplotlib.
    """
    if pyplot() is None:
        return []
    paths = []
    for length, points in at_bytes.items():
        at_resident = any(point["kind"] == "mem" for point in points)
        share = "resident_share" if at_resident else "read_share"
        if at_resident:  # at other budgets what evicts has its bank beside it
            points = [p for p in points if p["kind"] != "share" or not p["evicts"]]
        for turn in ("first", "second"):
            shown = [point for point in points if point[turn] and point[share]]
            if any(_family(point) for point in shown):
                paths.append(by_bytes(shown, turn, share, length, folder / f"{turn}-{length}.png"))
    return paths


def by_bytes(points, turn, share, length, path):
    """One question's figure: accuracy with its 95% interval by bytes in % of full attention's."""
    panels = {}
    for point in points:
        if _family(point):
            panels.setdefault(_family(point), []).append(point)
    names = sorted(panels, key=lambda name: (not name.startswith("omnikv"), name))
    across = min(ACROSS, len(names))
    down = -(-len(names) // across)
    figure, axes = pyplot().subplots(
        down,
        across,
        figsize=(3.5 * across, 2.6 * down + 0.7),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    lowest = 100 * min(point[share] for point in points)
    for axis, name in zip(axes.flat, names):
        _panel(axis, name, panels[name], points, turn, share)
        ticks = [tick for tick in TICKS if tick >= 0.8 * lowest]
        axis.set(xscale="log", ylim=(-0.04, 1.06), xlim=(0.8 * min(ticks[0], lowest), 112))
        axis.set_xticks(ticks, [f"{tick}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    what = "resident K and V" if share == "resident_share" else "K and V read per step"
    figure.supxlabel(f"{what}, % of full attention's", fontsize=10)
    figure.supylabel(f"accuracy, {turn} questions", fontsize=10)
    figure.suptitle(
        f"{turn} questions, {length:,} tokens (all tasks; shaded and bars: 95% intervals)",
        fontsize=11,
    )
    return saved(figure, path, 100)


def _family(point):
    """The panel of a point; None of full attention and of controls."""
    if point["name"] == "full" or point["control"]:
        return None
    return point["name"] + (" +dense" if point["kept"] else "")


def _panel(axis, name, own, points, turn, share):
    """One method, and what it stands beside."""
    evicts = own[0]["evicts"]
    colour = OMNIKV if name.startswith("omnikv") else EVICTS if evicts else CHOOSES
    axis.set_title(name, color=colour, fontsize=10, fontweight="bold", loc="left")
    labels = []
    full = next((p for p in points if p["name"] == "full"), None)
    if full is not None:
        axis.axhline(full[turn].mean, color=FULL, linestyle="--", linewidth=0.9)
        labels.append((full[turn].mean, "full", FULL))
    beside = [(BY_CHANCE, "by chance", CONTROL, evicts), ("omnikv", "OmniKV", OMNIKV, True)]
    beside += [
        (f"omnikv_{kind}", kind, CONTROL, not evicts) for kind in ("random", "newest", "one")
    ]
    for other, said, paint, wanted in beside:
        found = [p for p in points if p["name"] == other and not p["kept"]]
        if wanted and found and other != name:
            labels.append((_line(axis, found, turn, share, paint, thin=True), said, paint))
    _line(axis, own, turn, share, colour)
    _labelled(axis, labels)


def _line(axis, points, turn, share, colour, thin=False):
    """A method through its budgets; returns the accuracy at its right end."""
    points = sorted(points, key=lambda point: point[share])
    across = [100 * point[share] for point in points]
    means = [point[turn].mean for point in points]
    low = [max(0.0, point[turn].low) for point in points]
    high = [min(1.0, point[turn].high) for point in points]
    axis.plot(
        across,
        means,
        color=colour,
        marker="o",
        markersize=3 if thin else 5,
        linewidth=0.9 if thin else 1.8,
        zorder=2 if thin else 3,
    )
    if len(points) > 1:
        axis.fill_between(across, low, high, color=colour, alpha=0.1 if thin else 0.22, linewidth=0)
    else:
        axis.vlines(across, low, high, color=colour, linewidth=0.9)
    return means[-1]


def _labelled(axis, labels):
    """Names at the right of a panel, at their lines' ends, moved apart."""
    last = 2.0
    for height, said, colour in sorted(labels, reverse=True):
        last = min(height, last - APART)
        axis.annotate(
            said,
            (1.01, last),
            xycoords=("axes fraction", "data"),
            color=colour,
            fontsize=7.5,
            va="center",
            annotation_clip=False,
        )
