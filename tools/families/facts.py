"""What is known of a family without running it: the fields of config.json that it reads, what its
block does differently, the tensors that it expects, its file and its aliases.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import engine.model.config.families as families
from engine.model.config.block import LLAMA
from engine.model.config.config import ModelConfig
from engine.model.config.family import Family
from engine.model.tensors import targets
from tools.families.models import VARIANTS, configuration
from weights.aliases import ALIASES, Alias
from weights.shapes import config_of

ROOT = Path(__file__).resolve().parents[2]


class Seen(dict[str, Any]):
    """A config.json that notes which of its fields are asked for."""

    def __init__(self, data: dict[str, Any], asked: set[str]):
        super().__init__(data)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@dataclasses.dataclass
class Facts:
    """One family. fields: of config.json that its own function reads. common: what every family
    reads. tensors: of a layer that Llama has not (+) and that only Llama has (-).
    """

    family: Family
    file: Path
    lines: int
    about: str
    variants: dict[str, ModelConfig]
    aliases: dict[str, Alias]
    fields: set[str]
    tensors: list[str]
    differs: list[str]


def known() -> tuple[list[Facts], set[str]]:
    """(the facts of every family in the order of engine/model/config/families, fields that all
    read).
    """
    configs: dict[str, dict[str, ModelConfig]] = {}
    asked: dict[str, set[str]] = {}
    for name in VARIANTS:
        # as json, because a file has no tuples
        data = json.loads(json.dumps(configuration(name).to_dict(), default=str))
        _parse(name, data, asked, configs)
    aliases: dict[str, dict[str, Alias]] = {}
    for name, alias in ALIASES.items():
        config = _parse(name, config_of(alias), asked, {}, alias.rope)
        aliases.setdefault(config.family, {})[name] = alias
    # Gemma names its activation otherwise, and nests the bases of its ropes; Nemotron-H and Granite
    # 4 have other names for two more
    others = {"hidden_act", "rope_theta", "rms_norm_eps", "intermediate_size", "num_hidden_layers"}
    common = set.intersection(*asked.values()) | others
    plain = _tensors(configs["Llama"]["llama"])
    found = []
    for family in families.FAMILIES:
        module = _module(family)
        file = Path(inspect.getsourcefile(module) or "")
        variants = configs.get(family.name, {})
        tensors: set[str] = set().union(*map(_tensors, variants.values()))
        changes = [f"+ {name}" for name in sorted(tensors - plain)]
        changes += [f"- {name}" for name in sorted(plain - tensors)]
        found.append(
            Facts(
                family,
                file.relative_to(ROOT),
                len(file.read_text(encoding="utf-8").splitlines()),
                inspect.cleandoc(module.__doc__ or ""),
                variants,
                aliases.get(family.name, {}),
                asked.get(family.name, set()) - common,
                changes,
                _differs(list(variants.values())),
            )
        )
    return found, common


def _parse(
    name: str,
    data: dict[str, Any],
    asked: dict[str, set[str]],
    configs: dict[str, dict[str, ModelConfig]],
    rope: str | None = None,
) -> ModelConfig:
    seen: set[str] = set()
    config = ModelConfig.from_dict(Seen(data, seen), name, rope=rope)
    asked.setdefault(config.family, set()).update(seen)
    configs.setdefault(config.family, {})[name] = config
    return config


def _module(family: Family) -> Any:
    """The module of engine/model/config/families that defines a family."""
    for name in families.__all__:
        module = importlib.import_module(f"engine.model.config.families.{name}")
        if family in vars(module).values():
            return module
    raise AssertionError(f"{family.name}: in no module of engine/model/config/families")


def _tensors(config: ModelConfig) -> set[str]:
    """Stored names of a layer's tensors, without their layer; biases by their matrix."""
    first = f"{config.prefix}layers.0."
    names = (name for target in targets(config) for name, _ in target.parts)
    return {name.removeprefix(first) for name in names if name.startswith(first)}


def _differs(configs: list[ModelConfig]) -> list[str]:
    """Fields of the block that are not Llama's in one of these configurations."""
    found: dict[str, set[str]] = {}
    for config in configs:
        for field in dataclasses.fields(LLAMA):
            value = getattr(config.block, field.name)
            if value != getattr(LLAMA, field.name):
                shown = "" if isinstance(value, float) else f" {value}"
                found.setdefault(field.name, set()).add(shown)
        if config.windows:
            found.setdefault("windows", set()).add("")
        if config.recurrent:
            found.setdefault("recurrent", set()).add("")
        if config.layer_ropes:
            found.setdefault("layer_ropes", set()).add("")
    return [name + "".join(sorted(values)) for name, values in found.items()]
