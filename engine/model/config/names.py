"""What a family calls the tensors of its checkpoints, where that is not as Llama's does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Stored names. first: what begins those of the layers, "" where the architecture says
    (Family.prefix). Of a layer: its parts attention, mixer (a recurrent layer's), mlp, mixture
    (with its router, the correction of sigmoids, its stacked matrices, and gate, if there is one,
    up and down of an expert that lies apart), the expert that all tokens take (shared), the norms
    before its halves, and of an MLP gate and up, stored as one or as two (one where there is no
    gate), and down. halves: for each layer the stored numbers of its halves, which are layers of
    their own there; -1: it has no second one. Empty: a layer is a layer.
    """

    first: str = ""
    embed: str = "embed_tokens"
    norm: str = "norm"
    attention: str = "self_attn."
    mixer: str = "mamba."
    mlp: str = "mlp."
    mixture: str = "mlp."
    router: str = "gate"
    correction: str = "e_score_correction_bias"
    expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gate_ups: str = "experts.gate_up_proj"
    downs: str = "experts.down_proj"
    shared: str = "mlp.shared_expert."
    before: str = "input_layernorm"
    after: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    halves: tuple[tuple[int, int], ...] = ()


LLAMA_NAMES = Names()
