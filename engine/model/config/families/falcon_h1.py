"""Falcon-H1: in every layer attention and Mamba-2 beside each other, on the same input, and factors
of nearly every product.

Reads Bamba's fields of Mamba-2 and `mamba_d_ssm` (width of its heads), `mamba_rms_norm` and
`mamba_norm_before_gate`; `attention_in_multiplier`, `key_multiplier`, `attention_out_multiplier`,
`ssm_in_multiplier`, `ssm_multipliers` (of z, x, B, C and dt), `ssm_out_multiplier`,
`mlp_multipliers`, `embedding_multiplier` and `lm_head_multiplier`; `attention_bias`, `mlp_bias` and
`projectors_bias`. Expects self_attn, mamba and feed_forward in each layer.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.families.bamba import NAMES
from engine.model.config.families.mamba_fields import Keys, mamba
from engine.model.config.family import RECURRENT, Family, Sizes
from engine.model.config.fields import Fields
from engine.model.recurrent import Recurrent, Ssd

WIDEST = 1 << 20
MOST = 1e6  # far beyond any released factor
KEYS = Keys(biases=("mamba_proj_bias", "projectors_bias"))


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    found = fields.data.get(key)
    if found is None:
        return (1.0,) * count
    sound = isinstance(found, list) and len(found) == count
    if not sound or any(type(f) not in (int, float) or not 0 < abs(f) < MOST for f in found):
        fields.refuse(key, found, f"a list of {count} factors")
    return tuple(map(float, found))


def _mamba(fields: Fields, sizes: Sizes, attended: float) -> Recurrent | None:
    expand = fields.integer("mamba_expand", 1, 64, default=2)
    width = fields.integer("mamba_d_ssm", 1, WIDEST, default=expand * sizes.hidden)
    gate = "alone"
    if fields.flag("mamba_rms_norm", default=False):
        gate = "after" if fields.flag("mamba_norm_before_gate", default=True) else "before"
    first = fields.number("ssm_in_multiplier", -MOST, MOST, default=1.0)
    factors = tuple(first * factor for factor in _factors(fields, "ssm_multipliers", 5))
    out = fields.number("ssm_out_multiplier", -MOST, MOST, default=1.0)
    ssd = Ssd(True, gate, True, factors, out, attended)
    return mamba(fields, (RECURRENT,) * sizes.layers, width, ssd=ssd, keys=KEYS)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    def factor(key: str) -> float:
        return fields.number(key, -MOST, MOST, default=1.0)

    # attention's input counts twice in q . k, and once in what is summed
    first, gate_down = factor("attention_in_multiplier"), _factors(fields, "mlp_multipliers", 2)
    block = Block(
        embedding=factor("embedding_multiplier"),
        logits=factor("lm_head_multiplier"),
        gate=gate_down[0],
        down=gate_down[1],
        score=first * first * factor("key_multiplier") * sizes.head_dim**-0.5,
    )
    bias, last = fields.flag("attention_bias", default=False), factor("attention_out_multiplier")
    if bias and (first, last) != (1.0, 1.0):  # which a bias has no part in, or all of
        fields.unsupported("attention_bias", True, "false beside multipliers of attention")
    return Facts(
        block,
        attention_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        recurrent=_mamba(fields, sizes, first * last),
        names=NAMES,
    )


FAMILY = Family("Falcon-H1", {"FalconH1ForCausalLM": "falcon_h1"}, _facts)
