"""The columns of a measurement: methods at budgets, OmniKV and its controls crossed with filter
sets and wait layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import LLM
from engine.base.errors import SettingError, UsageError
from engine.calibration.search import seeing
from engine.model.config.config import ModelConfig
from engine.plan.filter_layers import filter_layers
from engine.plan.layers import spread_over
from tools.compare.build import Facts
from tools.compare.methods import CONTROLS, REGISTRY, Variant, built, wanted

CROSSED = ("omnikv", *CONTROLS)
PUBLISHED, PUBLISHED_DEPTH = (2, 8, 18), 32  # Llama-3-8B's filter layers
EVEN = 4  # filters of the set "even"
SETS = ("published", "even", "calibrated")
DEFAULT_METHODS = ("omnikv@1,3,6.67,10,30", "controls@1,3,6.67,10,30", "rivals@6.67,30")


@dataclass(frozen=True)
class FilterSet:
    """Filter layers under a name. wait: wait layers that belong to them, None where --waits says
    how many.
    """

    name: str
    layers: tuple[int, ...]
    wait: int | None = None


@dataclass(frozen=True)
class Column(Variant):
    """A method at a budget, for texts of one length. filters, wait: of OmniKV and its controls, ""
    and None elsewhere.
    """

    filters: str = ""
    wait: int | None = None

    @property
    def label(self) -> str:
        """Name in tables: "h2o 10%", "omnikv 6.67% even w0"."""
        return super().label + (f" {self.filters} w{self.wait}" if self.filters else "")


def rivals() -> tuple[str, ...]:
    """Every method of the registry that neither is full attention nor an OmniKV nor a bound, nor
    differs from another by the place of the bank only.
    """
    return tuple(
        name
        for name, entry in REGISTRY.items()
        if name != "full" and not name.startswith("omnikv") and entry.place == "device"
        if entry.group != "bounds"
    )


def filter_sets(llm: LLM, words: Sequence[str]) -> list[FilterSet]:
    """The filter sets of a command line: names of SETS, "2,8,17", or "name=2,8,17".

    published: {2, 8, 18} of 32 layers, scaled to this depth. even: four layers at equal distances.
    calibrated: those of omnikv.json beside the model, or found here for it. Raises UsageError.
    """
    found = []
    for word in words:
        name, equals, numbers = word.rpartition("=")
        if not equals and word in SETS:
            found.append(_known(llm, word))
            continue
        try:
            layers = tuple(sorted({int(number) for number in numbers.split(",")}))
        except ValueError:
            raise UsageError(
                f"--filters: found {word!r}, expected one of {', '.join(SETS)}, or layers such as "
                "2,8,17 or loss=2,8,17"
            ) from None
        found.append(FilterSet(name or "{" + ",".join(map(str, layers)) + "}", layers))
    names = [one.name for one in found]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--filters: found {' '.join(words)}, expected sets of distinct names")
    return found


def _known(llm: LLM, name: str) -> FilterSet:
    if name == "published":
        return FilterSet(name, published(llm.config))
    if name == "even":
        return FilterSet(name, even(llm.config))
    known = filter_layers(llm.folder, llm.resolved, llm.config)
    if known.source not in ("file", "found"):
        raise UsageError(
            f"--filters calibrated: {llm.folder} has no omnikv.json; run python -m tools.calibrate "
            "or leave it out"
        )
    return FilterSet(name, known.layers, known.wait)


def published(config: ModelConfig) -> tuple[int, ...]:
    """Return {2, 8, 18} of 32 layers at this model's depth, the engine's guess for an uncalibrated
    model.
    """
    numbers = seeing(config.num_layers, config.local_layers)
    depth = len(numbers)
    if depth < 12:
        return spread_over(config.num_layers, config.local_layers)
    scaled = {max(1, round(layer * depth / PUBLISHED_DEPTH)) for layer in PUBLISHED}
    return tuple(numbers[layer] for layer in sorted(scaled))


def even(config: ModelConfig) -> tuple[int, ...]:
    """EVEN filters, one every fifth of the depth from near layer 2 on."""
    numbers = seeing(config.num_layers, config.local_layers)
    depth = len(numbers)
    if depth < 12:
        return spread_over(config.num_layers, config.local_layers)
    found = (depth // 15 + number * depth // (EVEN + 1) for number in range(EVEN))
    return tuple(numbers[layer] for layer in found)


def asked(words: Sequence[str]) -> list[tuple[str, str, float]]:
    """[(name, kind, budget)] of words such as "omnikv@3,6.67", "rivals@r30", "controls@6.67"."""
    bounds = tuple(name for name, entry in REGISTRY.items() if entry.group == "bounds")
    groups = {"rivals": rivals(), "controls": CONTROLS, "bounds": bounds}
    spelled = []
    for word in words:
        base, at, budgets = word.partition("@")
        spelled += [f"{name}{at}{budgets}" for name in groups.get(base, (base,))]
    found = wanted(spelled, [6.67, 30], [])
    other = next((kind for _, kind, _ in found if kind == "mem"), None)
    if other:
        raise UsageError(
            "--methods: found a budget in bytes that are held (m30), expected per cent of the "
            "tokens (30) or of the bytes that a step reads (r30)"
        )
    return found


def columns(
    llm: LLM,
    length: int,
    names: Sequence[tuple[str, str, float]],
    sets: Sequence[FilterSet],
    waits: Sequence[int],
    tail: int,
) -> list[Column]:
    """The columns for texts of `length` tokens; one without a method says why."""
    found: dict[str, Column] = {}
    for name, kind, budget in names:
        crossed = [(s, w) for s in sets for w in (waits if s.wait is None else [s.wait])]
        if name not in CROSSED:
            crossed = crossed[:1]  # other kinds of OmniKV run on the first set only
        for filters, wait in crossed:
            plain = name == "full" or not name.startswith("omnikv")
            column = Column(
                name,
                kind,
                budget,
                filters="" if plain else filters.name,
                wait=None if plain else wait,
            )
            facts = Facts(llm, length, filters.layers, wait, tail)
            found.setdefault(column.label, _built(llm, column, facts))
    return list(found.values())


def _built(llm: LLM, column: Column, facts: Facts) -> Column:
    try:
        made = built(facts, column)
        if isinstance(made, str):
            return replace(column, why=made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the column says it in `why`
            method, plan = llm.resolve_method(made)
    except SettingError as error:
        return replace(column, why=str(error))
    if column.entry.sparse and not plan.partial_layers:
        return replace(column, why=f"no sparse layer ({plan.describe()})")
    return replace(column, method=method)
