"""The tensors that a checkpoint must hold for a model, by their stored names, and random ones of
the same shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from engine.model.config.config import ModelConfig
from engine.model.mixture import Experts
from weights.checkpoint import MXFP4, TURNED, Rows, Target
from weights.mxfp4 import COLUMNS


def targets(config: ModelConfig) -> list[Target]:
    """List the fused tensors that the model needs, in file order, with their stored parts."""
    hidden, inter = config.hidden_size, config.intermediate_size
    first = config.prefix
    found = [Target("embed", ((f"{first}embed_tokens.weight", (config.vocab_size, hidden)),))]
    gate_up: tuple[tuple[str, int], ...] = (("gate_proj", inter), ("up_proj", inter))
    if config.block.fused:
        gate_up = (("gate_up_proj", 2 * inter),)
    recurrent = set(config.recurrent_layers)
    for i in range(config.num_layers):
        mlp = f"{first}layers.{i}.mlp."
        before, after = (
            [
                Target(f"{i}.{name}", ((f"{first}layers.{i}.{stored}.weight", (width,)),))
                for name, stored, width in norms
            ]
            for norms in _norms(config, i in recurrent)
        )
        mixer = _delta_net(config, i) if i in recurrent else _attention(config, i)
        found += [*before, *mixer, *after, *_mlp(config, i, mlp, gate_up)]
        if config.mlp_bias:
            found += [
                Target(f"{i}.gate_up.bias", tuple((f"{mlp}{n}.bias", (r,)) for n, r in gate_up)),
                Target(f"{i}.down.bias", ((f"{mlp}down_proj.bias", (hidden,)),)),
            ]
    found.append(Target("norm", ((f"{first}norm.weight", (hidden,)),)))
    if not config.tied_embeddings:
        found.append(Target("lm_head", (("lm_head.weight", (config.vocab_size, hidden)),)))
    return found


def _attention(config: ModelConfig, layer: int) -> list[Target]:
    """List the weights of a layer's attention, but for its norms."""
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    at = f"{config.prefix}layers.{layer}.self_attn."
    qkv: tuple[tuple[str, int], ...] = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    if config.block.fused:
        qkv = (("qkv_proj", q + 2 * kv),)
    rows: tuple[Rows | None, ...] = ()
    heads, width = config.num_heads, config.head_dim
    if config.block.gated:  # q and its gate take turns, head by head
        rows = Rows(heads, 2 * width, 0, width), None, None
    parts = tuple((f"{at}{n}.weight", (count, hidden)) for n, count in qkv)
    found = [
        Target(f"{layer}.qkv", parts, rows=rows),
        Target(f"{layer}.o", ((f"{at}o_proj.weight", (hidden, q)),)),
    ]
    gate = (Rows(heads, 2 * width, width, 2 * width),)
    if config.block.gated:
        found.append(Target(f"{layer}.gate", ((f"{at}q_proj.weight", (q, hidden)),), rows=gate))
    if config.attention_bias:
        biases = tuple((f"{at}{n}.bias", (count,)) for n, count in qkv)
        found.append(Target(f"{layer}.qkv.bias", biases, rows=rows))
        if config.block.gated:
            found.append(Target(f"{layer}.gate.bias", ((f"{at}q_proj.bias", (q,)),), rows=gate))
    if config.o_bias:
        found.append(Target(f"{layer}.o.bias", ((f"{at}o_proj.bias", (hidden,)),)))
    if config.block.sinks:
        found.append(Target(f"{layer}.sinks", ((f"{at}sinks", (config.num_heads,)),)))
    return found


def _delta_net(config: ModelConfig, layer: int) -> list[Target]:
    """List the weights of a recurrent layer, but for its input norm. Its two matrices have the
    names of attention's, so that they are held alike.
    """
    sizes, hidden = config.recurrent, config.hidden_size
    assert sizes is not None
    at, heads = f"{config.prefix}layers.{layer}.linear_attn.", sizes.value_heads
    found = [
        Target(f"{layer}.o", ((f"{at}out_proj.weight", (hidden, sizes.value_size)),)),
        Target(f"{layer}.delta.conv", ((f"{at}conv1d.weight", (sizes.channels, 1, sizes.taps)),)),
        Target(f"{layer}.delta.decay", ((f"{at}A_log", (heads,)),)),
        Target(f"{layer}.delta.step", ((f"{at}dt_bias", (heads,)),)),
        Target(f"{layer}.delta.out_norm", ((f"{at}norm.weight", (sizes.value_dim,)),)),
    ]
    if not sizes.interleaved:
        qkvz = (("in_proj_qkv", sizes.channels), ("in_proj_z", sizes.value_size))
        rates = (("in_proj_b", heads), ("in_proj_a", heads))
        for name, parts in (("qkv", qkvz), ("delta.rates", rates)):
            stored = tuple((f"{at}{part}.weight", (rows, hidden)) for part, rows in parts)
            found.append(Target(f"{layer}.{name}", stored))
        return found
    # q, k, v and z of a key head lie together, and so do the rates of its value heads
    keys, group = sizes.key_heads, heads // sizes.key_heads
    for name, stored_as, widths in (
        ("qkv", "in_proj_qkvz", [sizes.key_dim] * 2 + [group * sizes.value_dim] * 2),
        ("delta.rates", "in_proj_ba", [group, group]),
    ):
        stops = list(itertools.accumulate(widths))
        stored = tuple((f"{at}{stored_as}.weight", (keys * width, hidden)) for width in widths)
        rows = tuple(Rows(keys, stops[-1], b - a, b) for a, b in zip(widths, stops))
        found.append(Target(f"{layer}.{name}", stored, rows=rows))
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
    if experts.stored in ("stacked", MXFP4):
        return _stacked(experts, layer, at, hidden)
    width = experts.width
    found = [Target(f"{layer}.router", ((f"{at}gate.weight", (experts.count, hidden)),))]
    found += _shared(experts, layer, at, hidden)
    if experts.stored == "rows":
        shapes = (("gate_up", (2 * width, hidden)), ("down", (hidden, width)))
        for number in range(experts.count):
            for part, shape in shapes:
                name, stored = f"{layer}.experts.{number}.{part}", f"{at}experts.{part}_proj"
                found.append(Target(name, ((stored, shape),), (number, experts.count)))
        return found
    for number in range(experts.count):
        mine, name = f"{at}experts.{number}.", f"{layer}.experts.{number}"
        parts = tuple((f"{mine}{n}_proj.weight", (width, hidden)) for n in ("gate", "up"))
        found.append(Target(f"{name}.gate_up", parts))
        found.append(Target(f"{name}.down", ((f"{mine}down_proj.weight", (hidden, width)),)))
    return found


def _shared(experts: Experts, layer: int, at: str, hidden: int) -> list[Target]:
    """List the expert that every token takes, under the names of a plain MLP, and its gate."""
    width, mine = experts.shared, f"{at}shared_expert."
    if not width:
        return []
    parts = tuple((f"{mine}{name}_proj.weight", (width, hidden)) for name in ("gate", "up"))
    return [
        Target(f"{layer}.shared", ((f"{at}shared_expert_gate.weight", (1, hidden)),)),
        Target(f"{layer}.gate_up", parts),
        Target(f"{layer}.down", ((f"{mine}down_proj.weight", (hidden, width)),)),
    ]


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


def _norms(config: ModelConfig, recurrent: bool = False) -> tuple[_Norms, _Norms]:
    """List a layer's norms: those before the product of attention, and the others."""
    kind, hidden = config.block.qk_norm, config.hidden_size
    around = [(name, stored, hidden) for name, stored in _AROUND[config.block.norms]]
    before = [norm for norm in around if norm[0] == "input_norm"]
    after = [norm for norm in around if norm[0] != "input_norm"]
    if kind != "none" and not recurrent:
        whole = kind == "width"
        before += [
            ("q_norm", "self_attn.q_norm", config.q_size if whole else config.head_dim),
            ("k_norm", "self_attn.k_norm", config.kv_size if whole else config.head_dim),
        ]
    return before, after


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Return a function that says whether a stored tensor, by name, may be left unread.

    These are the rotary buffers of old exports, lm_head if it is tied, and what a model has beside
    its language model: a vision tower, and layers that predict several tokens.
    """
    beside = ("model.visual.", "mtp.") if config.recurrent else ()

    def may_skip(name: str) -> bool:
        return (
            name.endswith("rotary_emb.inv_freq")
            or name.startswith(beside)
            or (config.tied_embeddings and name == "lm_head.weight")
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
            elif name.endswith("A_log"):  # decays of some 80 tokens
                t.normal_(-4.0, 0.5, generator=generator)
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
