"""Nemotron-H: layers of Mamba-2, of attention without rope and of an MLP without a gate, each by
itself. A layer here is one of the first two and the MLP after it, where there is one.

Reads `layers_block_type`, or `hybrid_override_pattern` (M, * and -), whose length num_hidden_layers
must be; `mamba_num_heads`, `mamba_head_dim`, `n_groups`, `ssm_state_size`, `conv_kernel`,
`use_conv_bias`, `attention_bias` and `mlp_bias`. Expects backbone.layers with a norm and a mixer.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Block, Facts
from engine.model.config.families.mamba_fields import OLDER, Keys, mamba
from engine.model.config.family import FULL, RECURRENT, Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.names import Names

MOST_LAYERS, MLP = 4096, "mlp"
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": "moe"}
PATTERN, LIST = "hybrid_override_pattern", "layers_block_type"
KEYS = Keys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
KEYS = KEYS._replace(conv_bias="use_conv_bias", biases=("use_bias", "mamba_proj_bias"))
NAMES = Names("backbone.", "embeddings", "norm_f", "mixer.", "mixer.", "mixer.")
NAMES = replace(NAMES, before="norm", after="norm", gate_up=("up_proj",))


def _stored(fields: Fields) -> tuple[str, list[str]]:
    """Return the field that names each stored layer, and these names."""
    key = LIST if fields.data.get(LIST) is not None else PATTERN
    found = fields.data.get(key)
    if not isinstance(found, list if key == LIST else str) or not 0 < len(found) <= MOST_LAYERS:
        fields.refuse(key, found, "what each layer is")
    count = fields.integer("num_hidden_layers", 1, MOST_LAYERS, default=len(found))
    if count != len(found):
        fields.refuse(key, f"{len(found)} layers", f"num_hidden_layers {count}")
    names = OLDER if key == LIST else LETTERS
    return key, [names.get(name, name) if isinstance(name, str) else name for name in found]


def _pairs(fields: Fields) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return the types of layers, and the stored numbers of their halves."""
    (key, stored), types, halves = _stored(fields), [], []
    for number, kind in enumerate(stored):
        if kind in (RECURRENT, FULL):
            types.append(kind)
            halves.append((number, -1))
        elif kind != MLP:
            fields.unsupported(key, kind, f"{RECURRENT}, {FULL} or {MLP}")
        elif not halves or halves[-1][1] >= 0:
            fields.unsupported(key, f"{MLP} in layer {number}", "one after another kind of layer")
        else:
            halves[-1] = halves[-1][0], number
    return tuple(types), tuple(halves)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    types, halves = _pairs(fields)
    if (act := fields.text("mamba_hidden_act", default="silu")) != "silu":
        fields.unsupported("mamba_hidden_act", act, "silu")
    return Facts(
        Block(wide_norm=True, activation="relu2"),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        layer_ropes=(replace(sizes.rope, kind="none", factor=1.0),) * sizes.layers,
        recurrent=mamba(fields, types, None, LIST, keys=KEYS),
        bare=tuple(layer for layer, (_, second) in enumerate(halves) if second < 0),
        names=replace(NAMES, halves=halves),
    )


FAMILY = Family(
    "Nemotron-H",
    {"NemotronHForCausalLM": "nemotron_h"},
    _facts,
    head_dim=128,  # whatever the width and the heads
    activation=("mlp_hidden_act", ("relu2",)),
    eps="layer_norm_epsilon",
    layers=lambda fields: len(_pairs(fields)[0]),
)
