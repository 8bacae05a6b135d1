"""What each stored layer of a Nemotron-H is, and which of them make one layer here."""

from __future__ import annotations

from engine.model.config.families.mamba_fields import OLDER
from engine.model.config.family import FULL, RECURRENT
from engine.model.config.fields import Fields

MOST_LAYERS, MLP, MOE = 4096, "mlp", "moe"
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": MOE}
PATTERN, LIST = "hybrid_override_pattern", "layers_block_type"


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


def pairs(fields: Fields) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...], list[str]]:
    """Return the types of layers, the stored numbers of their halves, and what each second is."""
    (key, stored), types, halves, seconds = _stored(fields), [], [], []
    for number, kind in enumerate(stored):
        if kind in (RECURRENT, FULL):
            types.append(kind)
            halves.append((number, -1))
            seconds.append("")
        elif kind not in (MLP, MOE):
            fields.unsupported(key, kind, f"{RECURRENT}, {FULL}, {MLP} or {MOE}")
        elif not seconds or seconds[-1]:
            fields.unsupported(key, f"{kind} in layer {number}", "one after another kind of layer")
        else:
            halves[-1], seconds[-1] = (halves[-1][0], number), kind
    return tuple(types), tuple(halves), seconds
