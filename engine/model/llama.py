"""The Llama forward pass in two pieces per layer, around attention: `before` (norm, q/k/v,
rotation) and `after` (output, MLP).

Attention itself is not here: prefill and decode put their own between the two pieces. Both pieces
are pure functions of their tensors, so that torch.compile sees one small graph that all layers
share.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model.rope import apply_rope
from kernels.linear import pack_linear
from weights.checkpoint import Target


@dataclass
class Layer:
    """Weights of one layer; q, k, v and gate, up are fused along their output rows at load."""

    input_norm: torch.Tensor  # [hidden]
    qkv: object  # [(H + 2 Hkv) * D, hidden]
    o: object  # [hidden, H * D]
    post_norm: torch.Tensor  # [hidden]
    gate_up: object  # [2 * intermediate, hidden]
    down: object  # [hidden, intermediate]


@dataclass
class Llama:
    """A loaded model: config, dtype, device and weights. Holds no state of any request."""

    config: object
    dtype: torch.dtype
    device: torch.device
    embed: torch.Tensor  # [vocab, hidden]
    layers: list
    norm: torch.Tensor  # [hidden]
    lm_head: object  # [vocab, hidden]

    @property
    def nbytes(self):
        """Bytes of all weights, shared ones counted once."""
        own = [self.embed, self.norm] + [
            t for layer in self.layers for t in (layer.input_norm, layer.post_norm)
        ]
        packed = [self.lm_head] + [
            m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        shared = (
            self.embed.numel() * self.embed.element_size()
            if _shares(self.lm_head, self.embed)
            else 0
        )
        return (
            sum(t.numel() * t.element_size() for t in own) + sum(m.nbytes for m in packed) - shared
        )

    def logits(self, x):
        """x [..., hidden] after the last layer -> float32 logits [..., vocab]."""
        return self.lm_head(rms_norm(x, self.norm, self.config.rms_norm_eps)).float()


def _shares(linear, tensor):
    weight = getattr(linear, "weight", None)
    return weight is not None and weight.data_ptr() == tensor.data_ptr()


def rms_norm(x, weight, eps):
    """x * rsqrt(mean(x^2) + eps) in float32, back in x.dtype, times weight (the order transformers
    uses). x [..., hidden].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def pre_attention(layer, x, cos, sin, heads, kv_heads, head_dim, eps):
    """First half of a layer. x [B, S, hidden]; cos, sin [B or 1, S, D/2] float32.

    Returns q [B, S, H, D] and k [B, S, Hkv, D], both rotated, v [B, S, Hkv, D], and q before
    rotation (the selector's window keeps it).
    """
    batch, length, _ = x.shape
    qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(
        batch, length, heads + 2 * kv_heads, head_dim
    )
    q_pre_rope, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    rotated = apply_rope(qkv[:, :, : heads + kv_heads], cos, sin)
    return rotated[:, :, :heads], rotated[:, :, heads:], v, q_pre_rope


def post_attention(layer, x, attended, eps):
    """Second half of a layer. x [B, S, hidden], attended [B, S, H, D] -> x [B, S, hidden]."""
    x = x + layer.o(attended.flatten(2))
    gate, up = layer.gate_up(rms_norm(x, layer.post_norm, eps)).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)


def targets(config):
    """What the loader must fill, in file order: weights.checkpoint.Target per fused tensor, with
    every source's shape.
    """
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    found = [Target("embed", (("model.embed_tokens.weight", (config.vocab_size, hidden)),))]
    for i in range(config.num_layers):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        gate_up = (("gate_proj", inter), ("up_proj", inter))
        found += [
            Target(f"{i}.input_norm", ((f"model.layers.{i}.input_layernorm.weight", (hidden,)),)),
            Target(f"{i}.qkv", tuple((f"{at}{n}.weight", (rows, hidden)) for n, rows in qkv)),
            Target(f"{i}.o", ((f"{at}o_proj.weight", (hidden, q)),)),
            Target(
                f"{i}.post_norm",
                ((f"model.layers.{i}.post_attention_layernorm.weight", (hidden,)),),
            ),
            Target(
                f"{i}.gate_up", tuple((f"{mlp}{n}.weight", (rows, hidden)) for n, rows in gate_up)
            ),
            Target(f"{i}.down", ((f"{mlp}down_proj.weight", (hidden, inter)),)),
        ]
        if config.attention_bias:
            found += [
                Target(f"{i}.qkv.bias", tuple((f"{at}{n}.bias", (rows,)) for n, rows in qkv)),
                Target(f"{i}.o.bias", ((f"{at}o_proj.bias", (hidden,)),)),
            ]
        if config.mlp_bias:
            found += [
                Target(
                    f"{i}.gate_up.bias", tuple((f"{mlp}{n}.bias", (rows,)) for n, rows in gate_up)
                ),
                Target(f"{i}.down.bias", ((f"{mlp}down_proj.bias", (hidden,)),)),
            ]
    found.append(Target("norm", (("model.norm.weight", (hidden,)),)))
    if not config.tied_embeddings:
        found.append(Target("lm_head", (("lm_head.weight", (config.vocab_size, hidden)),)))
    return found


def ignored(config):
    """Whether a stored tensor may be left unread: rotary buffers of old exports, and lm_head where
    it is tied.
    """

    def may_skip(name):
        return name.endswith("rotary_emb.inv_freq") or (
            config.tied_embeddings and name == "lm_head.weight"
        )

    return may_skip


_PACKED = ("qkv", "o", "gate_up", "down")


def assemble(config, dtype, device, stream, form="auto"):
    """Build a Llama from an iterable of (target name, tensor), each packed as it arrives so that
    one copy of it lives.

    form: how weights are held, as in kernels.linear.pack_linear. A bias is kept until its weight
    has come (and the other way round): the loader may send them in any order.
    """
    plain, waiting, packed = {}, {}, {}
    for name, tensor in stream:
        base = name.removesuffix(".bias")
        kind = base.split(".")[-1]
        if kind not in _PACKED:
            plain[name] = tensor
            continue
        has_bias = config.attention_bias if kind in ("qkv", "o") else config.mlp_bias
        parts = waiting.setdefault(base, {})
        parts["bias" if name.endswith(".bias") else "weight"] = tensor
        del tensor
        if len(parts) == 1 + has_bias:
            del waiting[base]
            packed[base] = pack_linear(parts.pop("weight"), parts.pop("bias", None), backend=form)
    layers = [
        Layer(
            plain[f"{i}.input_norm"],
            packed[f"{i}.qkv"],
            packed[f"{i}.o"],
            plain[f"{i}.post_norm"],
            packed[f"{i}.gate_up"],
            packed[f"{i}.down"],
        )
        for i in range(config.num_layers)
    ]
    # The largest matrix of small models, and the embedding itself where it is tied: no form that
    # makes a second copy of it.
    lm_head = pack_linear(
        plain["embed" if config.tied_embeddings else "lm_head"],
        None,
        backend="left" if torch.device(device).type == "cpu" and form == "auto" else "plain",
    )
    return Llama(
        config, dtype, torch.device(device), plain["embed"], layers, plain["norm"], lm_head
    )


def random_stream(config, dtype, device, seed=0, sharpness=1.0):
    """Random weights of the true shape, generated on the device, one tensor at a time: (target
    name, tensor) as the loader yields.

    Normal with the variance that keeps activations near one; `sharpness` scales q and k so that
    attention is peaky.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    for target in targets(config):
        parts = []
        for name, shape in target.parts:
            t = torch.empty(shape, dtype=dtype, device=device)
            if "norm" in name:
                t.fill_(1.0)
            elif len(shape) == 1:
                t.normal_(0.0, 0.1, generator=generator)
            else:
                scale = sharpness if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                deviation = (
                    1.0
                    if target.name == "embed" and not config.tied_embeddings
                    else shape[1] ** -0.5
                )
                t.normal_(0.0, scale * deviation, generator=generator)
            parts.append(t)
        yield target.name, parts[0] if len(parts) == 1 else torch.cat(parts)
