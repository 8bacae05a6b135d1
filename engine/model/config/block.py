"""What a family's block does where Llama's does not: the constants that steer the two halves of a
layer (engine/model/llama.py).

They are facts of a frozen configuration, so torch.compile sees constants and no family pays for
another's branch. The defaults are Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.config.names import LLAMA_NAMES, Names
from engine.model.config.rope_config import Rope
from engine.model.mixture import Experts
from engine.model.recurrent import Recurrent


@dataclass(frozen=True)
class Block:
    """Constants of a family's block.

    qk_norm: RMSNorm of q and k before rotation: "none", "head" (each head) or "width" (all heads at
    once). norms: where a layer normalises: "before" its halves, "after" them, or "both". wide_norm:
    a norm's weight multiplies in float32, before the cast. norm_offset: what a norm adds to its
    stored weight. activation: "silu" or "gelu_tanh", or "relu2" without a gate. o_bias: whether
    attention_bias is on o as well. fused: q, k, v are stored as one tensor, and gate, up as one.
    embedding, residual, logits: factors of the embedding, of what a half adds to the residual, and
    of the logits. gate, down: factors of an MLP's gate before the activation, and of its output
    (without experts). logit_cap:
    logits become cap * tanh(logits / cap); 0: they stay. score: factor of q . k, None:
    head_dim ** -0.5. score_cap: as logit_cap, of attention's logits. sinks: whether every query
    head has a learned logit that counts in its softmax and brings no value. gated: whether the
    sigmoid of a product of the layer's input, stored beside q, multiplies attention's output.
    unit_values: whether each head of v is divided by its root mean square. keys_as_values: whether
    layers that see everything have no v_proj and take k before its norm. scalar: whether a stored
    number multiplies a layer's output. per_layer: width of the embedding that a token has for each
    layer beside its own (engine/model/per_layer.py), 0: there is none. per_layer_vocab: tokens of
    its table, whose first serves those beyond; 0: every token has its own. wide_readers: whether
    the MLP of a layer that reads another's rows is twice as wide. streams: of a token between
    layers (engine/model/altup.py), 0: x alone. laurel: rank of the map beside attention, 0: there
    is none. cuts: how many standard deviations above its mean each layer's gate is cut, None: it is
    not; empty: none is.
    """

    qk_norm: str = "none"
    norms: str = "before"
    wide_norm: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    o_bias: bool = True
    fused: bool = False
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    logit_cap: float = 0.0
    score: float | None = None
    score_cap: float = 0.0
    sinks: bool = False
    gated: bool = False
    unit_values: bool = False
    keys_as_values: bool = False
    scalar: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 0
    wide_readers: bool = False
    streams: int = 0
    laurel: int = 0
    cuts: tuple[float | None, ...] = ()


LLAMA = Block()


@dataclass(frozen=True)
class Facts:
    """What a family reads from config.json beside the sizes that all share.

    attention_bias, mlp_bias: as in ModelConfig. windows: tokens that each layer looks back, its own
    included, 0 for all of them; empty: every layer sees everything. layer_ropes: the rope of each
    layer; empty: one for all. positions: a limit of the context below max_position_embeddings.
    experts: the mixture in place of the MLP, None: there is none. recurrent: the layers that have a
    recurrent state in place of attention or beside it, None: there are none. bare: layers without
    an MLP. names: of the stored tensors. seeing_heads: (K/V heads, head_dim) of the layers that see
    everything, where the sizes that all share are those of sliding ones. row_layers: the layer
    whose K and V each layer reads; empty: its own.
    """

    block: Block = LLAMA
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    layer_ropes: tuple[Rope, ...] = ()
    positions: int | None = None
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    bare: tuple[int, ...] = ()
    names: Names = LLAMA_NAMES
    seeing_heads: tuple[int, int] | None = None
    row_layers: tuple[int, ...] = ()
