"""What a calibration found, as a Markdown table and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from tools.calibrate.choose_layers import Choice, mean_mass
from tools.common.page import pyplot, saved, table


def report(
    sets: dict[tuple[int, int], Choice],
    chosen: Choice,
    config: ModelConfig,
    n: int,
    k: int,
    tail: int,
    itemsize: int,
    published: Sequence[int] | None,
    value: torch.Tensor,
    mass: torch.Tensor,
    wait: int,
) -> list[str]:
    """Lines: the trade-off of every set, and what the published filter layers would have kept.

    n, k, tail: tokens of the context, the budget and the tail; itemsize: bytes of a number; value:
    the [L, L] matrix that the sets were chosen by (reads kept, or mass).
    """
    row = config.kv_bytes(itemsize)
    full = config.num_layers * n * row
    rows = []
    for (_, _), c in sorted(sets.items(), key=lambda item: (len(item[1].filters), item[1].dense)):
        mark = " **chosen**" if c == chosen else ""
        size = c.bytes_per_step(n, k, tail, row)
        means = [f"{mean_mass(of, c.filters, wait):.4f}" for of in (value, mass)]
        name, dense = ",".join(map(str, c.filters)) + mark, f"{c.dense}/{config.num_layers}"
        rows.append((name, dense, *means, size, f"{size / full:.3f}"))
    head = f"filters | full layers | reads kept | mass seen | KV bytes per step at {n} | "
    lines = table(head + "share of full attention", rows)
    if published:
        lines.append(
            f"\npublished filter layers {published}: "
            f"reads kept {mean_mass(value, published, wait):.4f}, "
            f"mass seen {mean_mass(mass, published, wait):.4f}"
        )
    return lines


def plot(folder: Path, mass: torch.Tensor, chosen: Choice) -> None:
    """Write similarity.png (heat map) and filter_ability.png (mean mass of the next 8 and 16
    layers). Raises UsageError without matplotlib.
    """
    plt = pyplot()
    if plt is None:
        raise UsageError("--plot: needs matplotlib: pip install '.[plots]'")
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 6))
    shown = axes.imshow(torch.where(mass > 0, mass, torch.nan), vmin=0, vmax=1, cmap="viridis")
    axes.set(
        xlabel="layer that attends",
        ylabel="layer that chooses",
        title="share of attention to old tokens on the chooser's top-k",
    )
    figure.colorbar(shown)
    saved(figure, folder / "similarity.png", 120, bbox_inches="tight")
    figure, axes = plt.subplots(figsize=(7, 4))
    layers = len(mass)
    for span in (8, 16):
        means = [float(mass[i, i + 1 : i + 1 + span].mean()) for i in range(layers - 1)]
        axes.plot(range(layers - 1), means, "o-", label=f"next {span}")
    for f in chosen.filters:
        axes.axvline(f, color="grey", linestyle="--")
    axes.set(
        xlabel="layer",
        ylabel="mean mass kept",
        ylim=(0, 1.02),
        title="filter ability (dashed: chosen)",
    )
    axes.legend()
    saved(figure, folder / "filter_ability.png", 120, bbox_inches="tight")
