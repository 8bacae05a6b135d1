"""Qwen2, Qwen2.5, Qwen2.5-1M and the Qwen distillations of DeepSeek-R1.

Always a bias on q, k and v, never on o. With `use_sliding_window`, layers from `max_window_layers`
on look back `sliding_window` tokens, or those that `layer_types` names. Dual chunk attention
(Qwen2.5-1M) is plain attention within one chunk, so its chunk is the context limit.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import FULL, SLIDING, Family, Sizes, layer_types, window, windows
from engine.model.config.fields import Fields


def sliding(fields: Fields, sizes: Sizes) -> tuple[int, ...]:
    """Return every layer's window as Qwen2 and Qwen3 describe it; () where none slides."""
    size = window(fields) if fields.flag("use_sliding_window", default=False) else None
    types = layer_types(fields, sizes.layers)
    if types is None:
        first = fields.integer("max_window_layers", 0, 1 << 20, default=28)
        types = tuple(
            SLIDING if size is not None and layer >= first else FULL
            for layer in range(sizes.layers)
        )
    return windows(fields, sizes, types, size)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    chunk = None
    dual = fields.data.get("dual_chunk_attention_config")
    if dual is not None:
        if not isinstance(dual, dict):
            fields.refuse("dual_chunk_attention_config", dual, "an object or null")
        inner = Fields(dual, fields.source, "dual_chunk_attention_config.")
        chunk = inner.integer("chunk_size", 1, 1 << 31)
    return Facts(
        Block(o_bias=False),
        attention_bias=True,
        windows=sliding(fields, sizes),
        positions=chunk,
    )


FAMILY = Family("Qwen2", {"Qwen2ForCausalLM": "qwen2"}, _facts)
