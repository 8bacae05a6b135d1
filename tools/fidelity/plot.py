"""KL against the bytes that a step reads, one panel per length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.common.page import pyplot, saved
from tools.compare.methods import CONTROLS

FLOOR = 1e-4  # nats: what is less is drawn here
OMNIKV, CONTROL, OTHER = "omnikv", "control", "other"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw `row`s of tools/fidelity/report.py; False without matplotlib or anything to draw."""
    whole = {found["length"]: set(found["kinds"]) for found in rows if found["name"] == "full"}
    drawn = [
        found
        for found in rows
        # a column that has not seen every kind of text would lie beside others by luck
        if found["name"] != "full" and set(found["kinds"]) == whole.get(found["length"])
    ]
    if not drawn or pyplot() is None:
        return False
    lengths = sorted({found["length"] for found in drawn})
    width = 4.4 * len(lengths) + 2.6
    figure, axes = pyplot().subplots(
        1, len(lengths), figsize=(width, 5), sharey=True, squeeze=False
    )
    styles = _styles([_series(found) for found in drawn])
    for axis, length in zip(axes.flat, lengths):
        lines: dict[tuple, list] = defaultdict(list)
        for found in drawn:
            if found["length"] == length:
                point = found["bytes"] / 1e6, max(FLOOR, found["kl"].mean)
                lines[_series(found), found["filters"], found["wait"]].append(point)
        for (series, *_), points in lines.items():
            axis.plot(*zip(*sorted(points)), label=series[1], **styles[series])
        axis.set(title=f"{length:,} tokens", xscale="log", yscale="log")
        axis.set_xlabel("MB of keys and values read per step")
        low, high = axis.get_xlim()
        ticks = [f * 10**e for e in range(-3, 6) for f in (1, 2, 5) if low <= f * 10**e <= high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(True, alpha=0.2)
    axes[0, 0].set_ylabel("KL(full || method), nats")
    entries = {
        label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())
    }
    figure.tight_layout(rect=(0, 0, 1 - 2.5 / width, 1))
    figure.legend(entries.values(), entries.keys(), loc="center right", fontsize=6)
    return bool(saved(figure, path))


def _series(found: Mapping[str, Any]) -> tuple[str, str]:
    """(its family, its name in the legend): a control has one for all filter sets."""
    name = found["name"]
    if name in CONTROLS:
        return CONTROL, f"control: {name.removeprefix('omnikv_')}"
    if name == "omnikv":
        return OMNIKV, f"OmniKV, {found['filters']}" + " and wait layers" * bool(found["wait"])
    return OTHER, name


def _styles(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """OmniKV in thick lines, its controls dashed and black, the others thin and dotted."""
    from matplotlib import colormaps

    markers = "osv^<>DPXdph*8"
    lines = {OMNIKV: ("-", 2.0, 5), CONTROL: ("--", 0.8, 4), OTHER: (":", 1.0, 4)}
    colours = {OMNIKV: colormaps["tab10"], OTHER: colormaps["tab20"]}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for family in (OMNIKV, CONTROL, OTHER):
        style, width, size = lines[family]
        for number, one in enumerate(dict.fromkeys(s for s in series if s[0] == family)):
            found[one] = {
                "color": "black" if family == CONTROL else colours[family](number % 20),
                "marker": "o" if family == OMNIKV else markers[number % len(markers)],
                "linestyle": style,
                "linewidth": width,
                "markersize": size,
                "zorder": 3 if family == OMNIKV else 2,
            }
    return found
