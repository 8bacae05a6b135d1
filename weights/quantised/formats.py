"""Which format a config.json says that its checkpoint has."""

from __future__ import annotations

from typing import Any

from weights.errors import UnsupportedCheckpoint
from weights.jsonfile import shown
from weights.quantised.awq import AWQ
from weights.quantised.bitsandbytes import NF4, Int8
from weights.quantised.compressed import CompressedTensors
from weights.quantised.format import Format, Settings
from weights.quantised.fp8 import FP8Blocks
from weights.quantised.gptq import GPTQ

KNOWN = "compressed-tensors, gptq, awq, fp8 and bitsandbytes"


def format_of(data: dict[str, Any], source: str) -> Format | None:
    """The format that a config.json's content names; None for float weights.

    Raises UnsupportedCheckpoint, by name, for a format that is not read, BadCheckpoint for settings
    without sense.
    """
    key = next(
        (key for key in ("quantization_config", "compression_config") if data.get(key) is not None),
        None,
    )
    if key is None:
        if isinstance(data.get("quantization"), dict):
            raise UnsupportedCheckpoint(
                f"{source}: quantization: quantised formats not supported yet: mlx; expected "
                f"{KNOWN}"
            )
        return None
    settings = Settings(data[key], source, key + ".")
    method = settings.data.get("quant_method")
    if method is None and settings.data.get("load_in_4bit") is True:
        method = "bitsandbytes"
    if method == "compressed-tensors" or method is None and "config_groups" in settings.data:
        return CompressedTensors(settings)
    if method == "gptq":
        return GPTQ(settings)
    if method == "awq":
        return AWQ(settings)
    if method == "fp8":
        return FP8Blocks(settings)
    if method == "mxfp4":
        return None  # read, or refused, with its family's tensors (engine/model/config/families)
    if method == "bitsandbytes":
        if settings.flag("load_in_4bit", False):
            return NF4(settings)
        if settings.flag("load_in_8bit", False):
            return Int8()
        settings.refuse("load_in_4bit", None, "load_in_4bit or load_in_8bit to be true")
    raise UnsupportedCheckpoint(
        f"{source}: {key}: quantised formats not supported yet: "
        f"{'unnamed' if method is None else shown(method)}; expected {KNOWN}"
    )
