"""The tensors that a checkpoint must hold for a model, by their stored names, and random ones of
the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine.model.config.config import ModelConfig
from engine.model.mixture import Experts
from weights.checkpoint import MXFP4, TURNED, Target
from weights.mxfp4 import COLUMNS


def targets(config: ModelConfig) -> list[Target]:
    """List the fused tensors that the model needs, in file order, with their stored parts."""
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    found = [Target("embed", (("model.embed_tokens.weight", (config.vocab_size, hidden)),))]
    qkv: tuple[tuple[str, int], ...] = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    gate_up: tuple[tuple[str, int], ...] = (("gate_proj", inter), ("up_proj", inter))
    if config.block.fused:
        qkv, gate_up = (("qkv_proj", q + 2 * kv),), (("gate_up_proj", 2 * inter),)
    for i in range(config.num_layers):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        before, after = (
            [
                Target(f"{i}.{name}", ((f"model.layers.{i}.{stored}.weight", (width,)),))
                for name, stored, width in norms
            ]
            for norms in _norms(config)
        )
        found += [
            *before,
            Target(f"{i}.qkv", tuple((f"{at}{n}.weight", (rows, hidden)) for n, rows in qkv)),
            Target(f"{i}.o", ((f"{at}o_proj.weight", (hidden, q)),)),
            *after,
            *_mlp(config, i, mlp, gate_up),
        ]
        if config.attention_bias:
            found.append(Target(f"{i}.qkv.bias", tuple((f"{at}{n}.bias", (r,)) for n, r in qkv)))
        if config.o_bias:
            found.append(Target(f"{i}.o.bias", ((f"{at}o_proj.bias", (hidden,)),)))
        if config.block.sinks:
            found.append(Target(f"{i}.sinks", ((f"{at}sinks", (config.num_heads,)),)))
        if config.mlp_bias:
            found += [
                Target(f"{i}.gate_up.bias", tuple((f"{mlp}{n}.bias", (r,)) for n, r in gate_up)),
                Target(f"{i}.down.bias", ((f"{mlp}down_proj.bias", (hidden,)),)),
            ]
    found.append(Target("norm", (("model.norm.weight", (hidden,)),)))
    if not config.tied_embeddings:
        found.append(Target("lm_head", (("lm_head.weight", (config.vocab_size, hidden)),)))
    return found


def _mlp(
    config: ModelConfig, layer: int, at: str, gate_up: tuple[tuple[str, int], ...]
) -> list[Target]:
    """List the weights of a layer's MLP, or of its router and experts."""
    hidden, experts = config.hidden_size, config.experts_of(layer)
    if experts is None:
        fused = tuple((f"{at}{name}.weight", (rows, hidden)) for name, rows in gate_up)
        down = ((f"{at}down_proj.weight", (hidden, config.intermediate_size)),)
        return [Target(f"{layer}.gate_up", fused), Target(f"{layer}.down", down)]
    if experts.stored != "apart":
        return _stacked(experts, layer, at, hidden)
    width = experts.width
    found = [Target(f"{layer}.router", ((f"{at}gate.weight", (experts.count, hidden)),))]
    for number in range(experts.count):
        mine, name = f"{at}experts.{number}.", f"{layer}.experts.{number}"
        parts = tuple((f"{mine}{n}_proj.weight", (width, hidden)) for n in ("gate", "up"))
        found.append(Target(f"{name}.gate_up", parts))
        found.append(Target(f"{name}.down", ((f"{mine}down_proj.weight", (hidden, width)),)))
    return found


def _stacked(experts: Experts, layer: int, at: str, hidden: int) -> list[Target]:
    """List a mixture whose experts lie in one tensor, as gpt-oss's do: its router, and each expert
    as an entry; floats stored by input, MXFP4 by output.
    """
    router = f"{at}router."
    found = [
        Target(f"{layer}.router", ((f"{router}weight", (experts.count, hidden)),)),
        Target(f"{layer}.router.bias", ((f"{router}bias", (experts.count,)),)),
    ]
    sizes = (("gate_up", 2 * experts.width, hidden), ("down", hidden, experts.width))
    for number in range(experts.count):
        entry = number, experts.count
        for part, rows, columns in sizes:
            name, stored = f"{layer}.experts.{number}.{part}", f"{at}experts.{part}_proj"
            parts: tuple[tuple[str, tuple[int, ...]], ...] = ((stored, (columns, rows)),)
            if experts.stored == MXFP4:
                groups = columns // COLUMNS
                blocks = f"{stored}_blocks", (rows, groups, COLUMNS // 2)
                parts = blocks, (f"{stored}_scales", (rows, groups))
            form = MXFP4 if experts.stored == MXFP4 else TURNED
            found.append(Target(name, parts, entry, form))
            found.append(Target(f"{name}.bias", ((f"{stored}_bias", (rows,)),), entry))
    return found


# (name in Layer, stored name) of the norms around a layer's halves; "both" renames the MLP's
_AROUND = {
    "before": (("input_norm", "input_layernorm"), ("post_norm", "post_attention_layernorm")),
    "after": (("o_norm", "post_attention_layernorm"), ("down_norm", "post_feedforward_layernorm")),
    "both": (
        ("input_norm", "input_layernorm"),
        ("o_norm", "post_attention_layernorm"),
        ("post_norm", "pre_feedforward_layernorm"),
        ("down_norm", "post_feedforward_layernorm"),
    ),
}
_Norms = list[tuple[str, str, int]]  # (name in Layer, stored name, width)


def _norms(config: ModelConfig) -> tuple[_Norms, _Norms]:
    """List a layer's norms: those before the product of attention, and the others."""
    kind, hidden = config.block.qk_norm, config.hidden_size
    around = [(name, stored, hidden) for name, stored in _AROUND[config.block.norms]]
    before = [norm for norm in around if norm[0] == "input_norm"]
    after = [norm for norm in around if norm[0] != "input_norm"]
    if kind != "none":
        whole = kind == "width"
        before += [
            ("q_norm", "self_attn.q_norm", config.q_size if whole else config.head_dim),
            ("k_norm", "self_attn.k_norm", config.kv_size if whole else config.head_dim),
        ]
    return before, after


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Return a function that says whether a stored tensor, by name, may be left unread.

    These are the rotary buffers of old exports, and lm_head if it is tied.
    """

    def may_skip(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (
            config.tied_embeddings and name == "lm_head.weight"
        )

    return may_skip


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
        made = target.parts if not target.form else (("", target.shape),)
        for name, shape in made:
            t = torch.empty(shape, dtype=dtype, device=device)
            if "norm" in name:
                t.fill_(1.0)
            elif len(shape) == 1:
                t.normal_(0.0, 0.1, generator=generator)
            else:
                sharp = ("q_proj.weight", "k_proj.weight", "qkv_proj.weight")
                scale = sharpness if name.endswith(sharp) else 1.0
                deviation = (
                    1.0
                    if target.name == "embed" and not config.tied_embeddings
                    else shape[1] ** -0.5
                )
                t.normal_(0.0, scale * deviation, generator=generator)
            parts.append(t)
        yield target.name, parts[0] if len(parts) == 1 else torch.cat(parts)
