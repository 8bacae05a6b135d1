"""Gemma 3n (text): Gemma 3's attention over rows that the last layers share, several streams of a
token (AltUp), a low-rank map beside attention (LAUREL), embeddings for each layer, and MLPs whose
gate keeps what lies far above its mean.

Reads `layer_types` (missing: every fifth layer sees all), `sliding_window`, `num_kv_shared_layers`,
`hidden_size_per_layer_input`, `vocab_size_per_layer_input`, `altup_num_inputs`, `laurel_rank`,
`activation_sparsity_pattern` (missing: 0.95 in the first ten of more layers),
`final_logit_softcapping` and a rope for sliding layers. Widths of MLPs must be alike. Heads of v
are normed without a weight, and scores are not scaled. Of a checkpoint with towers it reads
text_config, and the tensors behind model.language_model.
"""

from __future__ import annotations

from statistics import NormalDist

from engine.model.config import family
from engine.model.config.block import Block, Facts
from engine.model.config.family import FULL, SLIDING, Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules

WIDEST = 1 << 20


def _cuts(fields: Fields, layers: int) -> tuple[float | None, ...]:
    """Return how many deviations above its mean each layer's gate is cut; () where none is."""
    key, usual = "activation_sparsity_pattern", [0.95] * 10 if layers > 10 else []
    found = fields.data.get(key) or usual + [0.0] * (layers - len(usual))
    if not isinstance(found, list) or len(found) != layers:
        fields.refuse(key, found, f"a list of {layers} shares, one for each layer")
    if any(type(share) not in (int, float) or not 0 <= share < 1 for share in found):
        fields.refuse(key, found, "shares of at least 0 and below 1")
    cuts = tuple(NormalDist().inv_cdf(share) if share else None for share in found)
    return cuts if any(found) else ()


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    types = family.layer_types(fields, sizes.layers)
    if types is None:
        types = tuple(SLIDING if (layer + 1) % 5 else FULL for layer in range(sizes.layers))
    for key, only in (("altup_active_idx", 0), ("altup_correct_scale", True)):
        if fields.data.get(key, only) != only:
            fields.unsupported(key, fields.data[key], str(only).lower())
    block = Block(
        qk_norm="head",
        norms="both",
        wide_norm=True,
        activation="gelu_tanh",
        embedding=sizes.hidden**0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0, 1e6, default=0.0),
        score=1.0,
        unit_values=True,
        per_layer=fields.integer("hidden_size_per_layer_input", 1, WIDEST, default=256),
        per_layer_vocab=fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=262144),
        streams=fields.integer("altup_num_inputs", 2, 16, default=4),
        laurel=fields.integer("laurel_rank", 1, WIDEST, default=64),
        cuts=_cuts(fields, sizes.layers),
    )
    fields.integer("num_kv_shared_layers", 0, sizes.layers - 1)  # must be there
    sliding = family.sliding_rope(fields, sizes, "rope_local_base_freq", 1e4)
    return Facts(
        block,
        attention_bias=fields.flag("attention_bias", default=False),
        windows=family.windows(fields, sizes, types, family.window(fields) or 512),
        layer_ropes=family.layer_ropes(types, sliding, sizes.rope),
        row_layers=family.shared_rows(fields, types),
    )


FAMILY = Family(
    "Gemma 3n",
    {"Gemma3nForConditionalGeneration": "gemma3n", "Gemma3nForCausalLM": "gemma3n_text"},
    _facts,
    tied=True,
    head_dim=256,
    activation=("hidden_activation", ("gelu_pytorch_tanh",)),
    rope=RopeRules(theta=1e6, nested=FULL),
    towers=("Gemma3nForConditionalGeneration",),
)
