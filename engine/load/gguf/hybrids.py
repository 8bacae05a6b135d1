"""What a GGUF file says of a hybrid (Qwen3.5, its mixtures, Qwen3-Next): its fields, and where the
tensors of its recurrent layers, norms and experts lie.

llama.cpp's converter (conversion/qwen.py of github.com/ggml-org/llama.cpp) changes some of them.
Norms are stored as 1 + w, but for a recurrent layer's own. A_log is stored as -exp(A_log), dt_bias
as ssm_dt.bias, the convolution without its dimension of one. Of Qwen3.5 the value heads lie tiled:
the first of every key head, then the second of every one. Of Qwen3-Next they lie as here, q, k and
v apart from z, and only ssm_ba key head by key head; older files have ssm_in, which holds q, k, v
and z key head by key head. A file with heads that predict several tokens counts their blocks among
its own; they are left unread.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from engine.model.config.config import MAX_LAYERS, MAX_WIDTH, ModelConfig
from engine.model.config.fields import Fields
from engine.model.recurrent import Recurrent
from weights.gguf.checkpoint import ONE_MORE, RATE, Place
from weights.gguf.header import GGUF

# Hugging Face's name -> GGUF's, inside "model.layers.N." and "blk.N."
NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
MIXED = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
RECURRENT = {
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
}


def sizes(fields: Fields, key: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of config.json that such a file has beside a plain one's. Raises
    BadCheckpoint for those without sense, UnsupportedCheckpoint for a list of recurrent layers.
    """
    if fields.data.get(key + "attention.recurrent_layers") is not None:
        fields.unsupported(key + "attention.recurrent_layers", "a list", "full_attention_interval")
    blocks = fields.integer(key + "block_count", 1, MAX_LAYERS)
    further = fields.integer(key + "nextn_predict_layers", 0, blocks - 1, 0)
    known = RECURRENT | (MIXED if key + "expert_count" in fields.data else {})
    found = {name: fields.integer(key + part, 1, MAX_WIDTH) for part, name in known.items()}
    inner = fields.integer(key + "ssm.inner_size", 1, MAX_WIDTH)
    if inner % found["linear_num_value_heads"]:
        fields.refuse(key + "ssm.inner_size", inner, "a multiple of ssm.time_step_rank")
    if "num_experts" in found and key + "feed_forward_length" not in fields.data:
        # no layer is plain
        found["intermediate_size"] = found["shared_expert_intermediate_size"]
    rotated = fields.integer(key + "rope.dimension_count", 1, head_dim, head_dim // 4)
    return found | {
        "num_hidden_layers": blocks - further,
        "linear_value_head_dim": inner // found["linear_num_value_heads"],
        "full_attention_interval": fields.integer(
            key + "full_attention_interval", 1, MAX_LAYERS, 4
        ),
        "partial_rotary_factor": rotated / head_dim,
    }


def apart(config: ModelConfig) -> ModelConfig:
    """Return a configuration whose recurrent layers have the projections that a GGUF file has."""
    assert config.recurrent is not None
    return replace(config, recurrent=replace(config.recurrent, interleaved=False))


def unread(config: ModelConfig, name: str) -> bool:
    """Say whether a stored tensor is of a block behind the model's layers."""
    number = name.removeprefix("blk.").partition(".")[0]
    return name.startswith("blk.") and number.isdecimal() and int(number) >= config.num_layers


def place(
    file: GGUF, config: ModelConfig, tiled: bool, layer: str, part: str, kind: str
) -> Place | None:
    """Return where a layer's tensor lies; None: where a plain model's would. tiled: the order of
    value heads. part, kind: of the tensor's name, "linear_attn.conv1d" and "weight".
    """
    net, at = config.recurrent, f"blk.{layer}."
    assert net is not None
    if part == "linear_attn" or part.startswith("linear_attn."):
        return _recurrent(file, net, config.hidden_size, tiled, at, part, kind)
    mixture, _, rest = part.partition(".experts.")
    if mixture == "mlp" and rest:
        number, _, name = rest.partition(".")
        experts = config.experts
        assert experts is not None
        wide, hidden = experts.width, config.hidden_size
        rows, columns = (hidden, wide) if name == "down_proj" else (wide, hidden)
        span = slice(int(number) * rows, (int(number) + 1) * rows)
        return Place(f"{at}{EXPERT[name]}.{kind}", shape=(experts.count, rows, columns), rows=span)
    name = NAMES.get(part, "")
    if part.endswith("norm"):
        plain = {"input_layernorm": "attn_norm"}
        qk = part.removeprefix("self_attn.")
        return Place(f"{at}{name or plain.get(part) or 'attn_' + qk}.{kind}", value=ONE_MORE)
    return Place(f"{at}{name}.{kind}") if name else None


def _recurrent(
    file: GGUF, net: Recurrent, hidden: int, tiled: bool, at: str, part: str, kind: str
) -> Place:
    """Return where a recurrent layer's own tensor lies."""
    group = net.value_heads // net.key_heads
    # (r, key head) in the file -> key head by key head
    order = tuple(r * net.key_heads + k for k in range(net.key_heads) for r in range(group))
    heads = order if tiled and group > 1 else None

    def rows(width: int, before: int = 0) -> tuple[int, ...] | None:
        if heads is None:
            return None
        moved = (before + head * width + i for head in heads for i in range(width))
        return *range(before), *moved

    if part == "linear_attn":  # A_log, dt_bias
        if kind == "A_log":
            return Place(f"{at}ssm_a", rows=rows(1), value=RATE)
        return Place(f"{at}ssm_dt.bias", rows=rows(1))
    name = part.removeprefix("linear_attn.")
    if not tiled and name in ("in_proj_b", "in_proj_a"):
        first = group if name == "in_proj_a" else 0
        mine = _of_heads(net.key_heads, 2 * group, first, first + group)
        return Place(f"{at}ssm_ba.{kind}", shape=(2 * net.value_heads, hidden), rows=mine)
    old = f"{at}ssm_in.{kind}"
    if name in ("in_proj_qkv", "in_proj_z") and old in file.tensors:
        size = net.channels + net.value_size, hidden
        return Place(old, shape=size, rows=_of_old(net, name == "in_proj_z"))
    stored = f"{at}{NAMES[part]}.{kind}"
    if name == "in_proj_qkv" or name == "conv1d":
        return Place(stored, rows=rows(net.value_dim, 2 * net.key_size))
    if name == "out_proj":
        return Place(stored, columns=heads)
    if name == "norm":
        return Place(stored)
    return Place(stored, rows=rows(net.value_dim if name == "in_proj_z" else 1))


def _of_heads(groups: int, size: int, first: int, stop: int) -> tuple[int, ...]:
    """Rows first .. stop-1 of each of `groups` groups of `size`."""
    return tuple(group * size + i for group in range(groups) for i in range(first, stop))


def _of_old(net: Recurrent, z: bool) -> tuple[int, ...]:
    """Rows of q, k and v, or of z, in a matrix that holds them key head by key head."""
    wide = net.value_heads // net.key_heads * net.value_dim
    stops = list(itertools.accumulate((net.key_dim, net.key_dim, wide, wide)))
    spans = list(zip([0, *stops], stops))
    wanted = spans[3:] if z else spans[:3]
    found = (_of_heads(net.key_heads, stops[-1], first, stop) for first, stop in wanted)
    return tuple(itertools.chain.from_iterable(found))
