"""--list-models --fits: which models of the alias table fit on this machine, or on an imagined GPU,
with which context and which settings, and in which form those would that do not. Plans only:
nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.base.errors import SettingError
from engine.base.figures import count, human
from engine.load.memory import largest_context
from engine.load.options import Options
from engine.methods.omnikv.method import OmniKV
from engine.model.config.config import ModelConfig
from engine.model.low_bits import OnTheWay
from engine.plan.filter_layers import filter_layers
from engine.plan.free_memory import Free, free_bytes
from weights.aliases import ALIASES, Alias
from weights.resolve import Resolved
from weights.shapes import config_of

HEAD = ("name", "context", "fits", "needs", "settings")
OTHERS = ("name", "with", "fits", "needs")
# fields of Options that take less memory, from what changes answers least to what does most
FORMS: tuple[dict[str, str], ...] = (
    {"bank": "int8"},
    {"weights": "int8"},
    {"weights": "int8", "bank": "int8"},
    {"weights": "int4"},
    {"weights": "int4", "bank": "int8"},
    {"weights": "int4", "bank": "int4"},
)
USEFUL = 4096  # tokens; a model that fits with fewer is listed as one that does not


def flags(form: dict[str, str]) -> str:
    """Format fields of Options as the flags that set them."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in form.items())


def fits(options: Options) -> str:
    """Return the table as text. options: what the models would run with; max_context: the context
    that they must reach, else as much as fits.
    """
    machine = Machine.of(options)
    rows: list[tuple[str, ...]] = []
    others: list[tuple[str, ...]] = []
    none, short = [], []
    for name, alias in ALIASES.items():
        if options.max_context is not None and alias.context < options.max_context:
            short.append(name)
        elif row := machine.row(alias, options):
            rows.append((name, f"{alias.context:,}", *row))
        elif (found := machine.other(alias, options)) is not None:
            others.append((name, *found))
        else:
            none.append(name)
    lines = [machine.heading, *_aligned([HEAD, *rows])]
    if any("not calibrated" in row[-1] for row in rows):
        lines.append(
            "not calibrated: --method omnikv guesses filter layers; --calibrate -f FILE finds the "
            "model's own in minutes"
        )
    if others:
        lines += ["", "do not fit so, but in another form:", *_aligned([OTHERS, *others])]
    if none:
        lines.append(f"do not fit in any form: {', '.join(none)}")
    if short and options.max_context is not None:
        lines.append(f"shorter than {count(options.max_context)}: {', '.join(short)}")
    return "\n".join(lines)


def _aligned(table: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _tokens(text: str) -> int:
    return int(text.replace(",", ""))


@dataclass(frozen=True)
class Machine:
    """Where the models would run, and the line that says so."""

    device: torch.device
    free: Free
    heading: str

    @classmethod
    def of(cls, options: Options) -> Machine:
        device = options.resolved_device()
        imagined = options.imagined_gpu, options.imagined_host
        on_gpu, ram = device.type == "cuda", options.ram_budget
        free = free_bytes(device, options.vram_budget if on_gpu else ram, ram, *imagined)
        dtype = str(options.resolved_dtype("bfloat16", device)).removeprefix("torch.")
        forms = {"weights": options.weights, "bank": options.bank}
        held = (f"{k} {dtype if v in ('auto', 'model', 'float') else v}" for k, v in forms.items())
        text = f"{', '.join(held)}; {free.name}"
        if not on_gpu:
            text = text.replace(" free RAM", " of free RAM")
        elif free.host_name.endswith("of this machine"):
            text += (
                f", beside {human(free.host)} of this machine's host memory "
                f"(--fits {free.bytes / 1e9:g}+128 names another)"
            )
        else:
            whose = "" if free.host_name.endswith("host memory") else " of host memory"
            text += f", beside {free.host_name}{whose}"
        if options.max_context is not None:
            text += f"; for a context of {count(options.max_context)}"
        return cls(device, free, text)

    def row(self, alias: Alias, options: Options) -> tuple[str, str, str] | None:
        """Return (tokens that fit, bytes needed, settings); None where too few fit."""
        try:
            config = ModelConfig.from_dict(config_of(alias), alias.hub_id, rope=alias.rope)
            config = options.holding(config)
            dtype = options.resolved_dtype(config.dtype, self.device)
            rounding = OnTheWay.of(options.weights, config, self.device.type != "cpu")
            resolved = Resolved(Path(), "hub", alias.hub_id, alias.hub_id, alias=alias)
            known = filter_layers(None, resolved, config)
            method = (options.method or OmniKV()).completed(lambda: known)
            layers = method.plan(config)
        except SettingError:
            return None
        found = largest_context(
            config,
            method,
            layers,
            dtype,
            self.device,
            self.free.bytes,
            self.free.host,
            rounding.bytes(config, dtype, self.device, options.backend),
            options.offload,
            options.max_context,
            options.savepoints,
        )
        if found.context < (options.max_context or min(USEFUL, alias.context)):
            return None
        whole = found.context == (options.max_context or alias.context)
        settings = [] if whole else [f"--ctx {found.context}"]
        if found.placement is not None:
            settings.append(f"layers {len(found.placement.layers)} of {config.num_layers} in RAM")
        if known.source == "spread" and isinstance(method, OmniKV):
            settings.append("not calibrated")
        return f"{found.context:,}", human(found.bytes), "; ".join(settings)

    def best(self, alias: Alias, options: Options) -> tuple[dict[str, str], str, str] | None:
        """Return (form, tokens that fit, settings) of the form of the longest context, and among
        those of equal contexts of the one that changes answers least. None where no form fits.
        """
        found: tuple[dict[str, str], str, str] | None = None
        for form in ({}, *FORMS):
            row = self.row(alias, replace(options, **form))  # type: ignore[arg-type]
            if row and (found is None or _tokens(row[0]) > _tokens(found[1])):
                found = form, row[0], row[2]
        return found

    def other(self, alias: Alias, options: Options) -> tuple[str, str, str] | None:
        """Return (flags, tokens that fit, bytes needed) of the first form that fits: as asked for
        but for that, or with the bank's own rows where a model takes none of fewer bits.
        """
        own = {"bank": "model"}
        more = [] if options.bank == "model" else [own, *({**form, **own} for form in FORMS)]
        for form in (*FORMS, *more):
            if row := self.row(alias, replace(options, **form)):  # type: ignore[arg-type]
                return flags(form), *row[:2]
        return None
