"""The methods that a benchmark runs: from names to frozen settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.registry import methods
from tools.common.planted_selection import Replay

# what a method needs to know of a model beforehand, and where it lies beside the weights
FILES = {"gates": "duo.json", "heads": "razor.json", "channels": "double_sparsity.json"}


@dataclass(frozen=True)
class Spec:
    """One row of the benchmark: label, settings, and where the sparse layers' K and V are
    ("device" or "host").
    """

    label: str
    method: Method
    offload: str = "device"


def specs(
    names: Sequence[str],
    filter_layers: Sequence[int] | None,
    tokens: int,
    waits: Sequence[int],
    reuses: Sequence[float | None],
    dense_below: int | str = 0,
    tail: int = 256,
    folder: Path | None = None,
) -> list[Spec]:
    """Spec list for names such as "full", "omnikv", "omnikv-host", "brutal" or any registered
    method.

    OmniKV is multiplied by `waits` (numbers of wait layers) and, on "omnikv-host", by `reuses`
    (planted shares; None: as chosen). folder: of the model, whose files of gates, scores and
    channels are taken. Raises SettingError for an unknown name, and where a method
    cannot have `tokens`.
    """
    known = methods()
    found: list[Spec] = []
    for name in names:
        base, _, place = name.partition("-")
        base, place = ("brutal_offload", "host") if name == "brutal" else (base, place)
        if place not in ("", "host") or base not in known:
            raise SettingError(
                f"methods: found {name!r}, expected full, omnikv, omnikv-host, brutal or one of "
                f"{', '.join(known)}"
            )
        if base == "omnikv":
            settings = dict(
                filter_layers=filter_layers, tokens=tokens, dense_below=dense_below, tail=tail
            )
            found += _omnikv(settings, waits, reuses if place else (None,), place)
        else:
            found.append(
                Spec(
                    name,
                    _fill(known[base], filter_layers, tokens, dense_below, folder),
                    "host" if place else "device",
                )
            )
    return found


def _omnikv(
    settings: dict[str, Any],
    waits: Sequence[int],
    reuses: Sequence[float | None],
    place: str,
) -> Iterator[Spec]:
    for wait in waits:
        for reuse in reuses:
            label = f"omnikv{'-host' if place else ''} w{wait}" + (
                "" if reuse is None else f" reuse {reuse:g}"
            )
            method = (
                OmniKV(wait_layers=wait, **settings)
                if reuse is None
                else Replay(wait_layers=wait, reuse=reuse, **settings)
            )
            yield Spec(label, method, "host" if place else "device")


def _fill(
    cls: type,
    filter_layers: Sequence[int] | None,
    tokens: int,
    dense_below: int | str,
    folder: Path | None,
) -> Method:
    """A method with those of these settings that it has."""
    if cls is Full:
        return Full()
    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    names = set(kinds)
    offered = dict(filter_layers=filter_layers, tokens=tokens, dense_below=dense_below)
    offered["forget"] = False  # prompts are synthetic banks
    if names & {"gates", "heads", "eps"}:  # heads have no budget of their own there
        del offered["tokens"]
    for name, file in FILES.items():
        taken = "Path" in kinds.get(name, "")  # a number of channels is no file
        if taken and folder is not None and (folder / file).is_file():
            offered[name] = folder / file
    try:
        return cls(**{name: value for name, value in offered.items() if name in names})
    except SettingError as error:
        raise SettingError(f"{cls().name}: {error}") from error
