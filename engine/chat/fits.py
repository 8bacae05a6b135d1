"""--list-models --fits: which models of the alias table fit on this machine, or on an imagined GPU,
with which context and which settings. Plans only: nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.errors import SettingError
from engine.methods.omnikv.settings import OmniKV
from engine.model.config import ModelConfig
from engine.plan.filter_layers import filter_layers
from engine.plan.free_memory import available_bytes
from engine.plan.memory import largest_context
from engine.units import human
from weights.aliases import ALIASES, Alias
from weights.resolve import Resolved
from weights.shapes import config_of

HEAD = ("name", "context", "fits", "needs", "settings")


def fits(gpu: int | None, device: str = "auto") -> str:
    """Return the table as text. gpu: bytes of an imagined GPU's free memory, beside this machine's
    RAM; None: this machine as `device` ("auto", "cpu" or "cuda") finds it.
    """
    host = available_bytes(torch.device("cpu"))[0]
    on_gpu = gpu is not None or (device != "cpu" and torch.cuda.is_available())
    where = torch.device("cuda" if on_gpu else "cpu")
    free = gpu if gpu is not None else available_bytes(where)[0]
    rows: list[tuple[str, ...]] = []
    out = []
    for name, alias in ALIASES.items():
        row = _row(alias, where, free, host)
        if row is None:
            out.append(name)
        else:
            rows.append((name, f"{alias.context:,}", *row))
    table = [HEAD, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    kind = "an imagined GPU" if gpu is not None else "the GPU" if on_gpu else "this machine's RAM"
    ram = f", {human(host)} of RAM beside it" if on_gpu else ""
    lines = [f"bfloat16, {human(free)} free on {kind}{ram}"]
    for cells_of in table:
        cells = (cell.ljust(width) for cell, width in zip(cells_of, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    lines.append(
        "not calibrated: --method omnikv guesses filter layers; python -m tools.calibrate finds "
        "the model's own in minutes"
    )
    if out:
        lines.append(f"do not fit: {', '.join(out)}")
    return "\n".join(lines)


def _row(alias: Alias, device: torch.device, free: int, host: int) -> tuple[str, str, str] | None:
    """Return (tokens that fit, bytes needed, settings), or None where not even the weights fit."""
    config = ModelConfig.from_dict(config_of(alias), alias.hub_id, rope=alias.rope)
    resolved = Resolved(Path(), "hub", alias.hub_id, alias.hub_id, alias=alias)
    known = filter_layers(None, resolved, config)
    method = OmniKV().completed(lambda: known)
    try:
        layers = method.plan(config)
    except SettingError:
        return None
    found = largest_context(config, method, layers, torch.bfloat16, device, free, host)
    if found.context == 0:
        return None
    settings = [] if found.context == alias.context else [f"--ctx {found.context}"]
    if found.placement is not None:
        settings.append(f"layers {len(found.placement.layers)} of {config.num_layers} in RAM")
    if known.source == "spread":
        settings.append("not calibrated")
    return f"{found.context:,}", human(found.bytes), "; ".join(settings)
