"""The fields by which families of DeepSeek's kind describe their experts."""

from __future__ import annotations

from engine.model.config.family import Sizes
from engine.model.config.fields import Fields
from engine.model.config.names import Names
from engine.model.mixture import Experts
from kernels.experts.route import Routing

WIDEST, MOST = 1 << 20, 1 << 12  # of an MLP; of experts and of layers
NAMES = Names(shared="mlp.shared_experts.", correction="gate.e_score_correction_bias")


def groups(fields: Fields) -> tuple[int, int]:
    """Return (groups of experts, those of them that a token takes experts of)."""
    count = fields.integer("n_group", 1, MOST, default=1)
    return count, fields.integer("topk_group", 1, count, default=1)


def factor(fields: Fields, usual: float) -> float:
    """Return the factor of all shares."""
    return fields.number("routed_scaling_factor", 0.0, 1e4, default=usual)


def first_layers(fields: Fields, sizes: Sizes, usual: int) -> tuple[int, ...]:
    """Return the layers without experts."""
    first = fields.integer("first_k_dense_replace", 0, MOST, default=usual)
    return tuple(range(min(first, sizes.layers)))


def experts(
    fields: Fields, sizes: Sizes, dense: tuple[int, ...], routing: Routing, normalise: bool,
    stored: str = "apart",
) -> Experts | None:  # fmt: skip
    """Return the mixture of all layers but those in `dense`; None where that is all of them."""
    if len(dense) == sizes.layers:
        return None
    count = fields.integer("n_routed_experts", 1, MOST)
    taken = fields.integer("num_experts_per_tok", 1, count)
    each, rest = divmod(count, routing.groups)
    if rest:
        fields.refuse("n_group", routing.groups, f"a divisor of n_routed_experts = {count}")
    if routing.groups > 1 and (each < routing.ranked or taken > routing.kept * each):
        fields.refuse("topk_group", routing.kept, f"enough groups of {each} for {taken} experts")
    width = fields.integer("moe_intermediate_size", 1, WIDEST)
    shared = width * fields.integer("n_shared_experts", 0, 64, default=0)
    given = count, taken, width, normalise, dense
    return Experts(*given, stored=stored, shared=shared, shared_gate=False, routing=routing)
