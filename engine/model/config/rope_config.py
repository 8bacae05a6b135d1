"""The rope part of config.json: either of its two forms in, one frozen Rope out.

The older form is `rope_theta` beside `rope_scaling: {"type" or "rope_type": ..., "factor": ...}`;
the newer one is `rope_parameters` with everything inside. Precedence and defaults follow
transformers 5.x (modeling_rope_utils.py, convert_rope_params_to_dict and
standardize_rope_params), so that a file means the same frequencies here and there. Unlike
transformers, we refuse senseless values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.model.config.fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
LONGROPE = "longrope"
PROPORTIONAL = "proportional"
MAX_STRETCH = 1e6  # of one pair's frequency: far beyond any released factor (65)
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
    mscale is already worked in. `partial` is the share of a head, from its first dimension on, that
    rotates. `short_factor` and `long_factor` divide the frequencies of longrope's pairs; `long`
    says which (ModelConfig.at_context sets it). Kind "none" rotates nothing; "proportional" pairs
    the halves of a whole head and turns the first `partial` of the pairs. A kind leaves fields that
    it does not use at their defaults, so that equal ropes compare equal.
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
    partial: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False

    def width(self, head_dim: int) -> int:
        """Return how many dimensions of a head rotate."""
        return head_dim if self.kind == PROPORTIONAL else int(head_dim * self.partial)


@dataclass(frozen=True)
class RopeRules:
    """What a family's rope may be: the default base, kinds beside KINDS, kinds written for another
    one, whether a part of a head may stay as it is, the share that rotates where the file names
    none, for which type of layer the rope is wanted where `rope_parameters` has one for each type,
    and the key of the dimensions that rotate, where a file may give those.
    """

    theta: float = DEFAULT_THETA
    kinds: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    rotates: float = 1.0
    nested: str = ""
    dims: str = ""


def parse_rope(
    data: dict[str, Any],
    source: str,
    max_positions: int,
    head_dim: int,
    rules: RopeRules = RopeRules(),
    prefix: str = "",
) -> Rope:
    """Parse the rope that config.json's content `data` describes, in either form.

    A non-empty `rope_scaling` wins over `rope_parameters`, an inner rope_theta over the outer one,
    `rope_type` over `type`. Raises BadCheckpoint or UnsupportedCheckpoint; both name `source`, and
    keys behind `prefix`.
    """
    outer = Fields(data, source, prefix)
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    inside = data.get(name) or {}
    if not isinstance(inside, dict):
        outer.refuse(name, inside, "an object or null")
    if rules.nested and isinstance(inside.get(rules.nested), dict):
        inside, name = inside[rules.nested], f"{name}.{rules.nested}"
    inner = Fields(inside, source, f"{prefix}{name}.")
    kind_key = "rope_type" if inside.get("rope_type") is not None else "type"
    nested = [key for key, value in inside.items() if isinstance(value, dict)]
    if nested:
        # the key comes from the file, so it may contain anything
        named = nested[0] if nested[0].isidentifier() else ascii(nested[0])[:60]
        inner.unsupported(named, "a separate rope", "one rope for all layers")
    kind = inner.text(kind_key, default="default")
    kind = rules.renamed.get(kind, kind)
    if kind not in KINDS + rules.kinds:
        inner.unsupported(kind_key, kind, "one of " + ", ".join(KINDS + rules.kinds))
    partial = _partial(outer, inner, head_dim, rules, kind)
    has_inner_theta = inside.get("rope_theta") is not None
    theta = (inner if has_inner_theta else outer).number(
        "rope_theta", 1.0, MAX_THETA, default=rules.theta
    )
    where = outer if data.get("original_max_position_embeddings") is not None else inner
    rope = _parse_kind(kind, inner, where, theta, max_positions, int(head_dim * partial))
    return replace(rope, partial=partial)


def _parse_kind(
    kind: str, inner: Fields, where: Fields, theta: float, max_positions: int, rotary_dim: int
) -> Rope:
    """Parse the numbers of one kind. where: the fields that hold the original maximum; rotary_dim:
    dimensions of a head that rotate.
    """
    if kind in ("default", PROPORTIONAL):
        stretched = kind == PROPORTIONAL and inner.data.get("factor") is not None
        return Rope(kind, theta, _factor(inner) if stretched else 1.0)
    if kind == "linear":
        return Rope("linear", theta, _factor(inner))
    if kind == "dynamic":
        if rotary_dim < 4:
            Fields({}, inner.source).refuse(
                "head_dim",
                rotary_dim,
                "at least 4 with dynamic rope, where the exponent is head_dim / (head_dim - 2)",
            )
        # stretches from max_position_embeddings even if the file names an original maximum
        return Rope("dynamic", theta, _factor(inner), max_positions)
    original = where.integer(
        "original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions
    )
    if kind == "llama3":
        low = inner.number("low_freq_factor", 0.0, 1e6)
        high = inner.number("high_freq_factor", 0.0, 1e6)
        if high <= low:
            inner.refuse("high_freq_factor", high, f"more than low_freq_factor = {low:g}")
        return Rope("llama3", theta, _factor(inner), original, low, high)
    if kind == LONGROPE:
        return _longrope(inner, theta, original, max_positions, rotary_dim // 2)
    return _yarn(inner, theta, original, max_positions)


def _partial(outer: Fields, inner: Fields, head_dim: int, rules: RopeRules, kind: str) -> float:
    """Return the share of a head that rotates; the inner field wins."""
    partial, rotates = 1.0, rules.rotates
    if rules.dims and (dims := outer.integer(rules.dims, 2, head_dim, default=None)):
        rotates = dims / head_dim
    for fields, usual in ((outer, rotates), (inner, None)):
        found = fields.number("partial_rotary_factor", 0.0, 1.0, default=usual, closed=True)
        if found is None:
            continue
        partial = found
        if partial != 1.0 and not rules.partial and kind != PROPORTIONAL:
            fields.unsupported("partial_rotary_factor", partial, "1.0")
        width = int(head_dim * partial)
        if width < 2 or width % 2:
            fields.refuse(
                "partial_rotary_factor",
                partial,
                f"a share of head_dim = {head_dim} that is an even number, at least 2",
            )
    return partial


def _longrope(fields: Fields, theta: float, original: int, max_positions: int, pairs: int) -> Rope:
    """Parse LongRoPE (arXiv 2402.13753): a factor for every pair, one set up to the original
    maximum and one beyond it.
    """

    def factors(key: str) -> tuple[float, ...]:
        expected = f"a list of {pairs} numbers, one for each rotated pair"
        found = fields.data.get(key)
        if not isinstance(found, list) or len(found) != pairs:
            count = f"a list of {len(found)}" if isinstance(found, list) else found
            fields.refuse(key, count, expected)
        for value in found:
            if type(value) not in (int, float) or not 0 < value < MAX_STRETCH:
                fields.refuse(key, value, f"numbers above 0 and below {MAX_STRETCH:g}")
        return tuple(map(float, found))

    short, long = factors("short_factor"), factors("long_factor")
    factor = fields.number("factor", 1.0, 1e6, default=None, closed=True)
    factor = max(1.0, max_positions / original) if factor is None else factor
    attention = fields.number("attention_factor", 0.0, 1e3, default=None)
    if attention is None:
        attention = 1.0
        if factor > 1.0:
            attention = math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    return Rope(
        LONGROPE,
        theta,
        factor,
        original,
        attention_factor=attention,
        short_factor=short,
        long_factor=long,
    )


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
