"""The rope part of config.json: either of its two forms in, one frozen Rope out.

The older form is `rope_theta` beside `rope_scaling: {"type" or "rope_type": ..., "factor": ...}`;
the newer one is `rope_parameters` with everything inside. Precedence and defaults follow
transformers 5.x (modeling_rope_utils.py, convert_rope_params_to_dict and
standardize_rope_params), so that a file means the same frequencies here and there. Unlike
transformers, we refuse senseless values.
"""

import math
from dataclasses import dataclass
from typing import Any

from engine.model.fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10000.0
# the largest released is 3.6e9 (llama-3-8b-1048k); float32 powers stay far from overflow
MAX_THETA = 1e15
# far beyond any released model, so that no product of sizes is absurd
MAX_POSITIONS = 1 << 31


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, resolved: the kind and all of its numbers.

    `theta` is the base. `original_max_positions` is in tokens; dynamic rope leaves frequencies
    unscaled up to that length. `attention_factor` multiplies cos and sin and is final: yarn's
    mscale is already worked in. A kind leaves fields that it does not use at their defaults, so
    that equal ropes compare equal.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def parse_rope(data: dict[str, Any], source: str, max_positions: int, head_dim: int) -> Rope:
    """Parse the rope that config.json's content `data` describes, in either form.

    A non-empty `rope_scaling` wins over `rope_parameters`, an inner rope_theta over the outer one,
    `rope_type` over `type`. Raises BadCheckpoint or UnsupportedCheckpoint; both name `source`.
    """
    outer = Fields(data, source)
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    inside = data.get(name) or {}
    if not isinstance(inside, dict):
        outer.refuse(name, inside, "an object or null")
    inner = Fields(inside, source, name + ".")
    kind_key = "rope_type" if inside.get("rope_type") is not None else "type"
    nested = [key for key, value in inside.items() if isinstance(value, dict)]
    if nested:
        # the key comes from the file, so it may contain anything
        named = nested[0] if nested[0].isidentifier() else ascii(nested[0])[:60]
        inner.unsupported(named, "a separate rope", "one rope for all layers")
    kind = inner.text(kind_key, default="default")
    if kind not in KINDS:
        inner.unsupported(kind_key, kind, "one of " + ", ".join(KINDS))
    for fields in (outer, inner):
        if fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0, closed=True) != 1.0:
            fields.unsupported("partial_rotary_factor", fields.data["partial_rotary_factor"], "1.0")
    has_inner_theta = inside.get("rope_theta") is not None
    theta = (inner if has_inner_theta else outer).number(
        "rope_theta", 1.0, MAX_THETA, default=DEFAULT_THETA
    )
    if kind == "default":
        return Rope("default", theta)
    if kind == "linear":
        return Rope("linear", theta, _factor(inner))
    if kind == "dynamic":
        if head_dim < 4:
            outer.refuse(
                "head_dim",
                head_dim,
                "at least 4 with dynamic rope, where the exponent is head_dim / (head_dim - 2)",
            )
        # stretches from max_position_embeddings even if the file names an original maximum
        return Rope("dynamic", theta, _factor(inner), max_positions)
    where = outer if data.get("original_max_position_embeddings") is not None else inner
    original = where.integer(
        "original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions
    )
    if kind == "llama3":
        low = inner.number("low_freq_factor", 0.0, 1e6)
        high = inner.number("high_freq_factor", 0.0, 1e6)
        if high <= low:
            inner.refuse("high_freq_factor", high, f"more than low_freq_factor = {low:g}")
        return Rope("llama3", theta, _factor(inner), original, low, high)
    return _yarn(inner, theta, original, max_positions)


def _factor(fields: Fields) -> float:
    return fields.number("factor", 1.0, 1e6, closed=True)


def _yarn(fields: Fields, theta: float, original: int, max_positions: int) -> Rope:
    """Parse YaRN (arXiv 2309.00071); the attention factor is resolved as in transformers 5.x."""
    has_factor = fields.data.get("factor") is not None
    if max_positions < original and not has_factor:
        fields.refuse(
            "original_max_position_embeddings",
            original,
            f"at most max_position_embeddings = {max_positions}",
        )
    factor = _factor(fields) if has_factor else max_positions / original
    # transformers takes 0 for unset
    beta_fast = fields.number("beta_fast", 0.0, 1e6, default=32.0, closed=True) or 32.0
    beta_slow = fields.number("beta_slow", 0.0, 1e6, default=1.0, closed=True) or 1.0
    if beta_fast < beta_slow:
        fields.refuse("beta_fast", beta_fast, f"at least beta_slow = {beta_slow:g}")
    attention = fields.number("attention_factor", 0.0, 1e3, default=None)
    mscale = fields.number("mscale", 0.0, 1e3, default=None, closed=True)
    mscale_all_dim = fields.number("mscale_all_dim", 0.0, 1e3, default=None, closed=True)
    if attention is None:
        attention = yarn_mscale(factor)
        if mscale and mscale_all_dim:  # transformers ignores one without the other
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention,
        truncate=fields.flag("truncate", default=True),
    )


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """Return YaRN's temperature (the paper's equation 22): 0.1 mscale ln(scale) + 1.

    1 where nothing is stretched.
    """
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
