"""What a search has measured, on disk: a run with the same settings goes on from there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from tools.common.program import replace_json

FORMAT = 1
Layers = tuple[int, ...]


class State:
    """Costs of sets of full layers: costs {set: KL of each search text measured so far}, held
    {set: (mean KL, share of same tokens) on the held-out texts}.

    Raises UsageError where the file was made with other settings, or is damaged. fresh: start over.
    """

    def __init__(self, path: Path, settings: dict[str, Any], layers: int, fresh: bool = False):
        self.path, self.settings = path, settings
        self.costs: dict[Layers, list[float]] = {}
        self.held: dict[Layers, tuple[float, float]] = {}
        if fresh or not path.is_file():
            return
        data = self._read()
        found = data["settings"]
        if found != settings:
            other = [name for name in settings if found.get(name) != settings[name]]
            raise self._refusal(f"a search with other {', '.join(other) or 'settings'}")
        texts = len(settings["texts"])
        for name in ("costs", "held"):
            for key, values in data[name].items():
                if not _sound(key, values, layers, 2 if name == "held" else texts):
                    raise self._refusal(f"{name} {key[:40]!r}: {str(values)[:40]}")
                full = tuple(map(int, key.split(",")))
                if name == "held":
                    self.held[full] = values[0], values[1]
                else:
                    self.costs[full] = values

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._refusal(f"no readable JSON ({error})") from error
        parts = ("settings", "costs", "held")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self._refusal("another format")
        if any(not isinstance(data.get(name), dict) for name in parts):
            raise self._refusal(f"no {', '.join(parts)}")
        return data

    def _refusal(self, found: str) -> UsageError:
        return UsageError(
            f"{self.path}: found {found}, expected a search with these settings; --fresh starts "
            "over, --out FILE keeps this one elsewhere"
        )

    def save(self) -> None:
        """Write all of it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(
                self.path,
                {
                    "format": FORMAT,
                    "settings": self.settings,
                    "costs": {_key(full): costs for full, costs in self.costs.items()},
                    "held": {_key(full): figures for full, figures in self.held.items()},
                },
            )
        except OSError as error:
            raise UsageError(
                f"{self.path}: found {error}, expected a place that can be written; --out FILE "
                "names another"
            ) from error


def _key(full: Layers) -> str:
    return ",".join(map(str, full))


def _sound(key: str, values: object, layers: int, most: int) -> bool:
    """Whether a set and its figures can be what a search wrote."""
    parts = key.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        return False
    full = [int(part) for part in parts]
    ascending = full[0] == 0 and full[-1] < layers and all(a < b for a, b in zip(full, full[1:]))
    if not ascending or not isinstance(values, list) or len(values) > most:
        return False
    return all(isinstance(v, float | int) and math.isfinite(v) and v >= 0 for v in values)
