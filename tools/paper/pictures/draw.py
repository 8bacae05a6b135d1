"""Pictures of chosen sets and of the mass that they keep. Needs matplotlib; one hue for shares, one
colour a layer, labels at the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.common import page

COLOURS = ("#1b6ca8", "#c2571a", "#3b8b4f", "#8a4fa3", "#7a6a2f", "#b03060")
GREY = "#777777"
SHARES = "Blues"
WRITTEN = 12  # layers or steps up to which every share is written into its cell


def draw(data: dict[str, Any], folder: Path) -> list[Path] | None:
    """Write layers.png, steps.png and depth.png; their paths, None without matplotlib."""
    if page.pyplot() is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _layers(data, folder / "layers.png"),
        _steps(data, folder / "steps.png"),
        _depth(data, folder / "depth.png"),
    ]


def about(data: dict[str, Any]) -> str:
    """What a picture is of, in a line."""
    return (
        f"{Path(data['model']).name}; {data['prompt']}; {data['chosen']:,} of {data['tokens']:,} "
        f"tokens chosen; {data['steps']} steps"
    )


def shares(axis: Any, rows: Sequence[Sequence[float]], labels: Sequence[str]) -> Any:
    """A square of shares from 0 to 1; each is written where there are few."""
    image = axis.imshow(rows, vmin=0, vmax=1, cmap=SHARES)
    each = max(1, len(labels) // 10)
    places = list(range(0, len(labels), each))
    axis.set_xticks(places, [labels[i] for i in places], fontsize=8)
    axis.set_yticks(places, [labels[i] for i in places], fontsize=8)
    if len(labels) <= WRITTEN:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                ink = "white" if value > 0.6 else "black"
                axis.text(
                    x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=ink
                )
    return image


def _layers(data: dict[str, Any], path: Path) -> Path:
    rows = data["between_layers"]
    figure, axis = page.pyplot().subplots(figsize=(6.4, 5.6))
    image = shares(axis, rows, [str(i) for i in range(len(rows))])
    axis.set(xlabel="layer", ylabel="layer")
    axis.set_title("Tokens that two layers both choose, in per cent of a choice", fontsize=10)
    _bar(figure, image, axis)
    return _saved(figure, data, path)


def _steps(data: dict[str, Any], path: Path) -> Path:
    found = data["between_steps"]
    figure, axes = page.pyplot().subplots(
        1,
        len(found),
        figsize=(3.9 * len(found) + 0.9, 4.4),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for axis, (layer, rows) in zip(axes.flat, found.items()):
        image = shares(axis, rows, [str(i) for i in range(1, 1 + len(rows))])
        axis.set_title(f"layer {layer}", fontsize=10)
        axis.set_xlabel("step")
    axes[0, 0].set_ylabel("step")
    figure.suptitle("Tokens that two steps both choose, in per cent of a choice", fontsize=10)
    _bar(figure, image, list(axes.flat))
    return _saved(figure, data, path)


def _depth(data: dict[str, Any], path: Path) -> Path:
    mass, last = data["mass"], len(data["mass"]) - 1
    figure, axis = page.pyplot().subplots(figsize=(8.2, 4.6))
    lines = [("own choice", 0, [mass[i][i] for i in range(last + 1)], GREY, "--")]
    lines += [("first, newest", 0, data["edges"], GREY, ":")]
    lines += [("chance", 0, [data["chance"]] * (last + 1), GREY, "-")]
    for number, layer in enumerate(data["layers"]):
        colour = COLOURS[number % len(COLOURS)]
        if layer < last:
            lines.append((f"layer {layer}'s", layer, mass[layer][layer:], colour, "-"))
    for _, first, values, colour, style in lines:
        width = 1.2 if colour == GREY else 2.0
        axis.plot(range(first, last + 1), values, style, color=colour, linewidth=width)
    for (name, *_, colour, _), place in zip(lines, _apart([v[-1] for _, _, v, _, _ in lines])):
        axis.text(last + 0.02 * last + 0.1, place, name, color=colour, va="center", fontsize=9)
    axis.set(xlabel="layer that attends", ylim=(0, 1.02), xlim=(0, last * 1.14 + 0.5))
    axis.set_xticks(range(0, last + 1, max(1, (last + 1) // 10)))
    axis.set_ylabel("share of its attention to the prompt")
    axis.set_title("Attention that falls on the choice of a layer below", fontsize=10)
    axis.grid(True, alpha=0.2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _saved(figure, data, path)


def _apart(values: Sequence[float], gap: float = 0.055) -> list[float]:
    """Heights of labels near these values, of which no two are nearer than `gap`."""
    out = list(values)
    order = sorted(range(len(out)), key=lambda i: out[i])
    for low, high in zip(order, order[1:]):
        out[high] = max(out[high], out[low] + gap)
    over = max(0.0, max(out) - 1.0)
    for high, low in zip(order[::-1], order[-2::-1]):
        out[high] = min(out[high], 1.0) if over else out[high]
        if over and out[low] > out[high] - gap:
            out[low] = out[high] - gap
    return out


def _bar(figure: Any, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.03)
    bar.set_ticks([0, 0.5, 1], labels=["0", "50", "100%"])
    bar.ax.tick_params(labelsize=8)


def _saved(figure: Any, data: dict[str, Any], path: Path) -> Path:
    figure.text(0.01, -0.03, about(data), fontsize=7, color=GREY)
    return page.saved(figure, path, 120, bbox_inches="tight")
