"""The fields of Mamba-2's layers, which several families read: no family of its own."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.model.config.family import FULL, RECURRENT
from engine.model.config.fields import Fields
from engine.model.recurrent import Recurrent, Ssd

MOST_HEADS = 4096
MOST_DIM = 1024
MOST_TAPS = 5  # of the convolution: as many as a state's rings hold; released models have 4
OLDER = {"mamba": RECURRENT, "attention": FULL}  # names of layer types before transformers 5


class Keys(NamedTuple):
    """Names of the fields: heads, their dimension, groups of B and C, the state's dimension, taps
    of the convolution, whether it has a bias, and biases of the products, which must not be there.
    """

    heads: str = "mamba_n_heads"
    head: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    biases: tuple[str, ...] = ("mamba_proj_bias",)


SSD, KEYS = Ssd(), Keys()


def mamba(
    fields: Fields,
    types: tuple[str, ...],
    width: int | None,
    source: str = "layer_types",
    ssd: Ssd = SSD,
    keys: Keys = KEYS,
) -> Recurrent | None:
    """Return the recurrent layers; None where every layer attends. types: of all layers, from the
    field `source`; width: of all heads, None: as the fields of heads say. ssd: what its fields do
    not say.
    """
    layers = tuple(i for i, kind in enumerate(types) if kind == RECURRENT)
    if not layers:
        return None
    if len(layers) == len(types) and not ssd.beside:
        fields.unsupported(source, f"{RECURRENT} for each layer", f"{FULL} for one at least")
    heads = fields.integer(keys.heads, 1, MOST_HEADS, default=128)
    given = fields.data.get(keys.head)
    if given in (None, "auto") and width is not None:
        if width % heads:
            fields.refuse(keys.heads, heads, f"a divisor of the recurrent layers' width {width}")
        size = width // heads
    else:
        size = fields.integer(keys.head, 1, MOST_DIM, default=64)
    if width is not None and size * heads != width:
        fields.refuse(keys.head, size, f"{width} / {keys.heads} {heads}")
    if size > MOST_DIM:
        fields.refuse(keys.heads, heads, f"heads of at most {MOST_DIM}, found {size}")
    groups = fields.integer(keys.groups, 1, MOST_HEADS, default=1)
    if heads % groups:
        fields.refuse(keys.groups, groups, f"a divisor of {keys.heads} {heads}")
    for key in keys.biases:
        if fields.flag(key, default=False):
            fields.unsupported(key, True, "false")
    _no_limit(fields)
    return Recurrent(
        layers,
        groups,
        heads,
        fields.integer(keys.state, 1, MOST_DIM, default=128),
        size,
        fields.integer(keys.taps, 2, MOST_TAPS, default=4),
        ssd=ssd._replace(conv_bias=fields.flag(keys.conv_bias, default=True)),
    )


def _no_limit(fields: Fields) -> None:
    """Refuse steps within limits, which transformers obeys in prompts only."""
    found = fields.data.get("time_step_limit")
    if found is None:
        return
    low, high = found if isinstance(found, list) and len(found) == 2 else (None, None)
    if isinstance(high, dict):  # as transformers writes what JSON has no word for
        high = math.inf if high.get("__float__") == "Infinity" else None
    if low != 0 or high != math.inf:
        fields.unsupported("time_step_limit", found, "[0, Infinity]")
