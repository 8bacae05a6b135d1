"""A rope of the user's choice in place of config.json's: the words of `--rope`, worked into the
content of config.json before it is parsed, so that an override means what an edited file means.

    yarn:4            YaRN by 4 from the original maximum, or from max_position_embeddings
    yarn:4:32768      the same from 32768 tokens
    linear:2  dynamic:4  default
    theta:1e6         another base; may follow one of the others: yarn:4,theta:1e6
    longrope          the long frequencies of a LongRoPE model at every context
"""

from __future__ import annotations

from typing import Any

from engine.base.errors import SettingError
from engine.model.config.family import FULL, Family
from engine.model.config.rope_config import LONGROPE

KINDS = ("yarn", "linear", "dynamic", "default", "theta", LONGROPE)
EXAMPLES = "yarn:4, yarn:4:32768, linear:2, dynamic:4, theta:1e6, default or longrope"


def overridden(data: dict[str, Any], text: str, family: Family) -> dict[str, Any]:
    """Return config.json's content `data` with the rope that `text` asks for; `data` stays as it
    is. Raises SettingError, which names the part that makes no sense.
    """
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    whole = data.get(name)
    whole = dict(whole) if isinstance(whole, dict) else {}
    nested = family.rope.nested and isinstance(whole.get(FULL), dict)
    inside = dict(whole[FULL]) if nested else whole
    for part in text.split(","):
        inside = _edited(inside, part.strip(), data, family)
    if nested:
        inside = {**whole, FULL: inside}
    return {**data, name: inside}


def pins_long(text: str | None) -> bool:
    """Say whether an override asks for LongRoPE's long frequencies at every context."""
    return text is not None and LONGROPE in (part.strip() for part in text.split(","))


def _edited(
    inside: dict[str, Any], part: str, data: dict[str, Any], family: Family
) -> dict[str, Any]:
    """Return the rope's fields after one part of the override."""
    kind, *values = part.split(":")
    if kind not in KINDS:
        raise SettingError(f"rope: found {part[:60]!r}, expected {EXAMPLES}")
    most = {"yarn": 2, "default": 0, LONGROPE: 0}.get(kind, 1)
    if len(values) > most or (most and not values):
        raise SettingError(f"rope: found {part[:60]!r}, expected a form such as {EXAMPLES}")
    numbers = [_number(part, value) for value in values]
    if kind == "theta":
        return {**inside, "rope_theta": numbers[0]}
    now = inside.get("rope_type", inside.get("type", "default"))
    if kind == LONGROPE:
        if family.rope.renamed.get(now, now) != LONGROPE:
            raise SettingError(
                f"rope: found longrope, expected a model that has its factors "
                f"(config.json's rope is {str(now)[:40]})"
            )
        return inside
    if kind in family.rope.renamed:
        raise SettingError(
            f"rope: found {part!r}, expected default, theta:1e6 or longrope: {family.name} files "
            f"mean {family.rope.renamed[kind]} by {kind}"
        )
    kept = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    fresh = {key: inside[key] for key in kept if inside.get(key) is not None}
    fresh["rope_type"] = kind
    if kind != "default":
        fresh["factor"] = numbers[0]
    if len(numbers) > 1:
        if not numbers[1].is_integer():
            raise SettingError(f"rope: found {part[:60]!r}, expected whole tokens after the factor")
        fresh["original_max_position_embeddings"] = int(numbers[1])
    return fresh


def _number(part: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingError(
            f"rope: found {part[:60]!r}, expected a number after the colon, as in {EXAMPLES}"
        ) from None
