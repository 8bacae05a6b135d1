"""The model families that the engine runs, one file each, and the search for one by name."""

from __future__ import annotations

import difflib

from engine.model.config.families import (
    bamba,
    deepseek_v2,
    deepseek_v3,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granite_hybrid,
    llama,
    minicpm3,
    minimax_m2,
    mistral,
    mistral4,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from engine.model.config.family import Family
from engine.model.config.fields import Fields

__all__ = [
    "bamba",
    "deepseek_v2",
    "deepseek_v3",
    "falcon_h1",
    "gemma",
    "gemma3n",
    "gemma4",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granite_hybrid",
    "llama",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "nemotron_h",
    "mistral4",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
]
FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5_moe.FAMILY,
    qwen3_next.FAMILY,
    smollm3.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    granite_hybrid.FAMILY,
    nemotron_h.FAMILY,
    falcon_h1.FAMILY,
    bamba.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    gemma.GEMMA3,
    gemma.GEMMA2,
    gemma3n.FAMILY,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    minimax_m2.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    glm4_moe_lite.FAMILY,
    minicpm3.FAMILY,
    mistral4.FAMILY,
)
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def find(fields: Fields) -> tuple[str, Family]:
    """Return (architecture, family) from `architectures` or, if that is missing, model_type.

    Raises UnsupportedCheckpoint for an unknown name, with the nearest known one and where all are
    listed.
    """
    names = fields.data.get("architectures")
    if names is None:
        model_type = fields.text("model_type", default="")
        for name, family in BY_ARCHITECTURE.items():
            if model_type.lower() == family.architectures[name].lower():
                return name, family
        found = f"model_type {model_type}" if model_type else None
        fields.unsupported("architectures", found, _expected(model_type))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        fields.refuse("architectures", names, "a list with one name")
    if names[0] not in BY_ARCHITECTURE:
        fields.unsupported("architectures", names[0], _expected(names[0]))
    return names[0], BY_ARCHITECTURE[names[0]]


def _expected(name: str) -> str:
    """Say how many architectures are known, and name the one nearest to `name`."""
    known = {architecture.lower(): architecture for architecture in BY_ARCHITECTURE}
    wanted = name[:100].lower()
    if "for" not in wanted:
        wanted += "forcausallm"
    near = [known[key] for key in difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)]
    hint = f" (the nearest is {near[0]})" if near else ""
    # a list of all is 640 characters, and a terminal's error shows 300
    return (
        f"one of {next(iter(BY_ARCHITECTURE))} and {len(BY_ARCHITECTURE) - 1} others that "
        f"docs/MODELS.md lists{hint}"
    )
