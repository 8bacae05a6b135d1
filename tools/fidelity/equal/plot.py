"""One figure of methods at equal bytes read: a panel per budget, a line per method, the nearest
on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.common.page import pyplot, saved
from tools.fidelity.equal.tables import Point

FLOOR = 1e-3  # nats: what is less is drawn here
COLOURS = {"omnikv": "#c0392b", "other": "#1f5fa8", "bound": "#2e7d32", "control": "#7f7f7f"}
SAYS = {
    "omnikv": "OmniKV and its kin",
    "other": "other methods",
    "bound": "bounds: told what to read",
    "control": "controls: by chance",
}
TICKS = (0.001, 0.01, 0.1, 1.0)  # nats
LEAST = 3  # lines of a panel: a budget that fewer reach stays in the tables


def plot(points: Sequence[Point], length: int, path: Path) -> bool:
    """Draw `points` of one length; False without matplotlib or anything to draw."""
    plt = pyplot()
    panels = {b: [p for p in points if p.budget == b] for b in sorted({p.budget for p in points})}
    panels = {budget: some for budget, some in panels.items() if len(some) >= LEAST}
    if not panels or plt is None:
        return False
    tallest = max(map(len, panels.values()))
    size = 4.2 * len(panels) + 0.6, 0.27 * tallest + 1.9
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharex=True)
    for axis, (budget, some) in zip(axes.flat, panels.items()):
        _panel(axis, some, tallest)
        axis.set_title(f"{budget:g}% of the bytes read", fontsize=10, fontweight="bold")
    figure.supxlabel("KL to full attention, nats (left is better); bars: 95% intervals", fontsize=9)
    there = {point.family for some in panels.values() for point in some}
    handles = [
        plt.Line2D([], [], color=colour, marker="o", linestyle="", label=SAYS[family])
        for family, colour in COLOURS.items()
        if family in there
    ]
    if any(len(point.kl) > 1 for point in points):
        dense = dict(color="black", marker="o", markerfacecolor="white", linestyle="")
        handles.append(plt.Line2D([], [], label="hollow: question read densely", **dense))
    across = min(len(handles), 2 * len(panels))
    figure.legend(handles=handles, loc="upper left", ncols=across, fontsize=8, frameon=False)
    top = 1 - 0.22 * -(-len(handles) // across) / size[1]
    figure.tight_layout(rect=(0, 0.01, 1, top))
    return bool(saved(figure, path))


def _panel(axis, points, tallest):  # type: ignore[no-untyped-def]
    """One budget: the nearest method on top."""
    for row, point in enumerate(points):
        colour = COLOURS[point.family]
        for setup, far in point.kl.items():
            own = setup == "sparse" or len(point.kl) == 1
            if own:
                low, high = (max(FLOOR, min(end, 1e2)) for end in (far.low, far.high))
                axis.plot([low, high], [row, row], color=colour, linewidth=1.4, zorder=2)
            axis.plot(
                max(FLOOR, far.mean),
                row,
                "o",
                color=colour,
                markerfacecolor=colour if own else "white",
                markersize=5.5 if own else 4.5,
                zorder=4 if own else 3,
            )
    axis.set(xscale="log", xlim=(0.8 * FLOOR, 6), ylim=(tallest - 0.4, -0.7))
    axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
    axis.minorticks_off()
    axis.set_yticks(range(len(points)), [point.shown for point in points], fontsize=8)
    for label, point in zip(axis.get_yticklabels(), points):
        label.set_color(COLOURS[point.family])
    axis.grid(axis="x", alpha=0.25)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
