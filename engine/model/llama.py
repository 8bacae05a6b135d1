"""The Llama model: its weights, where they come from, and a layer's two halves around attention.

`pre_attention` does norm, q/k/v and rotation; `post_attention` does the output projection and the
MLP. Prefill and decode put their own attention between them. Both are pure functions of their
tensors, so that torch.compile sees one small graph that all layers share. `targets` lists what a
checkpoint must hold, and `assemble` builds the model from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.model.rope import apply_rope
from kernels.linear import Linear, pack_linear
from weights.checkpoint import Target

if TYPE_CHECKING:
    from engine.model.config import ModelConfig


@dataclass
class Layer:
    """Weights of one layer. q, k, v and gate, up are fused along their output rows at load."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [(H + 2 Hkv) * D, hidden]
    o: Linear  # [hidden, H * D]
    post_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]


@dataclass
class Llama:
    """A loaded model: config, dtype, device and weights. It holds no state of any request."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embed: torch.Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor  # [hidden]
    lm_head: Linear  # [vocab, hidden]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tensor that two of them share counts once."""
        plain = [self.embed, self.norm] + [
            t for layer in self.layers for t in (layer.input_norm, layer.post_norm)
        ]
        packed = [self.lm_head] + [
            m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        tied = self.lm_head.weight.data_ptr() == self.embed.data_ptr()
        shared = self.embed.numel() * self.embed.element_size() if tied else 0
        return (
            sum(t.numel() * t.element_size() for t in plain)
            + sum(m.nbytes for m in packed)
            - shared
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., hidden] after the last layer to float32 logits [..., vocab]."""
        return self.lm_head(rms_norm(x, self.norm, self.config.rms_norm_eps)).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x [..., hidden] by its root mean square and scale it by weight [hidden].

    x * rsqrt(mean(x^2) + eps) in float32, then x.dtype, then times weight: transformers' order.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def pre_attention(
    layer: Layer,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the first half of a layer on x [B, S, hidden]; cos, sin float32 [B or 1, S, D/2].

    Returns rotated q [B, S, H, D], rotated k [B, S, Hkv, D], v [B, S, Hkv, D] and q before
    rotation, which the query ring keeps for selectors that look at a window of queries.
    """
    batch, length, _ = x.shape
    qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(
        batch, length, heads + 2 * kv_heads, head_dim
    )
    q_pre_rope, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    rotated = apply_rope(qkv[:, :, : heads + kv_heads], cos, sin)
    return rotated[:, :, :heads], rotated[:, :, heads:], v, q_pre_rope


def post_attention(
    layer: Layer, x: torch.Tensor, attended: torch.Tensor, eps: float
) -> torch.Tensor:
    """Run the second half of a layer: x [B, S, hidden], attended [B, S, H, D] -> new x."""
    x = x + layer.o(attended.flatten(2))
    gate, up = layer.gate_up(rms_norm(x, layer.post_norm, eps)).chunk(2, dim=-1)
    return x + layer.down(F.silu(gate) * up)


def targets(config: ModelConfig) -> list[Target]:
    """List the fused tensors that the model needs, in file order, with their stored parts."""
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


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Return a function that says whether a stored tensor, by name, may be left unread.

    These are the rotary buffers of old exports, and lm_head if it is tied.
    """

    def may_skip(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (
            config.tied_embeddings and name == "lm_head.weight"
        )

    return may_skip


_PACKED = ("qkv", "o", "gate_up", "down")


def assemble(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    stream: Iterable[tuple[str, torch.Tensor]],
    form: str = "auto",
) -> Llama:
    """Build a Llama from (target name, tensor) pairs in any order.

    Each matrix is packed as soon as it and its bias have arrived, so that only one copy of it
    lives. form: how weights are held, as in kernels.linear.pack_linear.
    """
    plain: dict[str, torch.Tensor] = {}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    packed: dict[str, Linear] = {}
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
            packed[base] = pack_linear(parts.pop("weight"), parts.pop("bias", None), form=form)
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
    # lm_head is the largest matrix of a small model, and the embedding itself if tied: hold it in a
    # form that makes no second copy.
    lm_head = pack_linear(
        plain["embed" if config.tied_embeddings else "lm_head"],
        None,
        form="left" if torch.device(device).type == "cpu" and form == "auto" else "plain",
    )
    return Llama(
        config, dtype, torch.device(device), plain["embed"], layers, plain["norm"], lm_head
    )


def random_stream(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    sharpness: float = 1.0,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Generate random weights of the true shapes on the device, one (target name, tensor) a time.

    Normal, with the variance that keeps activations near one. `sharpness` scales q and k, which
    makes attention peaky.
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
