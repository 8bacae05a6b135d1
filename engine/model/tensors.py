"""The tensors that a checkpoint must hold for a model, by their stored names, and random ones of
the same shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from engine.model.config.config import ModelConfig
from engine.model.mixture import Experts
from engine.model.share.cut import cut_targets
from engine.model.share.divide import whole_of
from kernels.native.own_pages import empty, empty_on
from weights.checkpoint import MXFP4, TURNED, WIDE, Rows, Target
from weights.mxfp4 import COLUMNS


def targets(config: ModelConfig, first_experts: int | None = None) -> list[Target]:
    """List the fused tensors that the model needs, in file order, with their stored parts.

    first_experts: how many experts of each mixture are listed; None: all. Of a rank's share, the
    parts that it reads.
    """
    if config.share is not None:
        whole = whole_of(config)
        return cut_targets(targets(whole, first_experts), whole, config.share)
    hidden, first, names = config.hidden_size, config.prefix, config.names
    begins, ends = config.ends
    embed = Target("embed", ((f"{first}{names.embed}.weight", (config.vocab_size, hidden)),))
    found = [embed] if begins else []
    found += _per_layer(config)
    sizes, alone = config.recurrent, set(config.recurrent_layers)
    for i in range(config.num_layers):
        before, after = (
            [
                Target(f"{i}.{name}", ((f"{at}{stored}.weight", (width,)),))
                for name, stored, width in norms
            ]
            for norms, at in zip(_norms(config, i), _halves(config, i))
        )
        attends = _latent_attention if config.latent else _attention
        found += [*before, *([] if i in alone else attends(config, i))]
        if sizes is not None and i in sizes.layers:
            found += _delta_net(config, i) if sizes.ssd is None else _mamba(config, i)
        if i not in config.bare:
            found += [*after, *_mlp(config, i, first_experts)]
        found += _last(config, i)
    if ends:
        found.append(Target("norm", ((f"{first}{names.norm}.weight", (hidden,)),)))
    if ends and not config.tied_embeddings:
        found.append(Target("lm_head", (("lm_head.weight", (config.vocab_size, hidden)),)))
    return found


def _halves(config: ModelConfig, layer: int) -> tuple[str, str]:
    """What begins the stored names of a layer's two halves."""
    numbers = config.names.halves[layer] if config.names.halves else (layer, layer)
    first, second = (f"{config.prefix}layers.{number}." for number in numbers)
    return first, second


def _attention(config: ModelConfig, layer: int) -> list[Target]:
    """List the weights of a layer's attention, but for its norms."""
    heads, kv_heads, width, _ = config.sizes_of(layer)
    hidden, q, kv = config.hidden_size, heads * width, kv_heads * width
    at = f"{_halves(config, layer)[0]}{config.names.attention}"
    qkv: tuple[tuple[str, int], ...] = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    if config.block.keys_as_values and layer in config.seeing_layers:
        qkv = qkv[:2]
    qkv = tuple((name, count) for name, count in qkv if count)
    if config.block.fused:
        qkv = (("qkv_proj", q + 2 * kv),)
    rows: tuple[Rows | None, ...] = ()
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


def _latent_attention(config: ModelConfig, layer: int) -> list[Target]:
    """List the weights of a layer's latent attention: the product that makes queries (or their
    latent) and the row, what follows inside, and the output projection. kv_b_proj holds, head by
    head, the rows of its key matrix and of its value matrix.
    """
    sizes, hidden, heads = config.latent, config.hidden_size, config.num_heads
    assert sizes is not None
    at, pairs = f"{config.prefix}layers.{layer}.self_attn.", sizes.turned if sizes.pairs else 0
    queries = heads * sizes.head
    turned = Rows(heads, sizes.head, 0, sizes.head, pairs)
    # the rotated part of a row is stored last and held first
    row = sizes.rank + sizes.turned
    parts = Rows(1, row, sizes.rank, row, pairs), Rows(1, row, 0, sizes.rank)
    first = (
        ("q_a_proj", sizes.query_rank, None) if sizes.query_rank else ("q_proj", queries, turned)
    )
    latent = "kv_a_proj_with_mqa"
    made = first, (latent, sizes.turned, parts[0]), (latent, sizes.rank, parts[1])
    rows = tuple(some for *_, some in made)
    stored = tuple((f"{at}{name}.weight", (count, hidden)) for name, count, _ in made)
    found = [
        Target(f"{layer}.qkv", stored, rows=rows),
        Target(f"{layer}.o", ((f"{at}o_proj.weight", (hidden, config.value_size)),)),
        Target(f"{layer}.latent_norm", ((f"{at}kv_a_layernorm.weight", (sizes.rank,)),)),
    ]
    each = sizes.plain + sizes.value
    for name, start, stop in (("keys", 0, sizes.plain), ("values", sizes.plain, each)):
        part = f"{at}kv_b_proj.weight", (heads * (stop - start), sizes.rank)
        found.append(Target(f"{layer}.{name}", (part,), rows=(Rows(heads, each, start, stop),)))
    if sizes.query_rank:
        rank = sizes.query_rank
        part = f"{at}q_b_proj.weight", (queries, rank)
        found.append(Target(f"{layer}.queries", (part,), rows=(turned,)))
        found.append(Target(f"{layer}.query_norm", ((f"{at}q_a_layernorm.weight", (rank,)),)))
    if config.attention_bias:
        biases = tuple((f"{at}{name}.bias", (count,)) for name, count, _ in made)
        found.append(Target(f"{layer}.qkv.bias", biases, rows=rows))
        found.append(Target(f"{layer}.o.bias", ((f"{at}o_proj.bias", (hidden,)),)))
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
        Target(f"{layer}.mixer.conv", ((f"{at}conv1d.weight", (sizes.channels, 1, sizes.taps)),)),
        Target(f"{layer}.mixer.decay", ((f"{at}A_log", (heads,)),)),
        Target(f"{layer}.mixer.step", ((f"{at}dt_bias", (heads,)),)),
        Target(f"{layer}.mixer.out_norm", ((f"{at}norm.weight", (sizes.value_dim,)),)),
    ]
    if not sizes.interleaved:
        qkvz = (("in_proj_qkv", sizes.channels), ("in_proj_z", sizes.value_size))
        rates = (("in_proj_b", heads), ("in_proj_a", heads))
        for name, parts in (("qkv", qkvz), ("mixer.rates", rates)):
            stored = tuple((f"{at}{part}.weight", (rows, hidden)) for part, rows in parts)
            found.append(Target(f"{layer}.{name}", stored))
        return found
    # q, k, v and z of a key head lie together, and so do the rates of its value heads
    keys, group = sizes.key_heads, heads // sizes.key_heads
    for name, stored_as, widths in (
        ("qkv", "in_proj_qkvz", [sizes.key_dim] * 2 + [group * sizes.value_dim] * 2),
        ("mixer.rates", "in_proj_ba", [group, group]),
    ):
        stops = list(itertools.accumulate(widths))
        stored = tuple((f"{at}{stored_as}.weight", (keys * width, hidden)) for width in widths)
        rows = tuple(Rows(keys, stops[-1], b - a, b) for a, b in zip(widths, stops))
        found.append(Target(f"{layer}.{name}", stored, rows=rows))
    return found


def _mamba(config: ModelConfig, layer: int) -> list[Target]:
    """List the weights of a recurrent layer of Mamba-2, but for its input norm. Of the stored
    projection's rows, z, then x, B and C, then dt, the first two change places and dt is apart.
    """
    sizes, hidden = config.recurrent, config.hidden_size
    assert sizes is not None and sizes.ssd is not None
    ssd, wide, heads = sizes.ssd, sizes.value_size, sizes.value_heads
    at, total = f"{_halves(config, layer)[0]}{config.names.mixer}", wide + sizes.channels + heads
    first, second = ("mixer_in", "mixer_out") if ssd.beside else ("qkv", "o")
    stops, widths = (wide + sizes.channels, wide, total), (sizes.channels, wide, heads)
    xbc, z, dt = (
        ((f"{at}in_proj.weight", (width, hidden)), Rows(1, total, stop - width, stop))
        for width, stop in zip(widths, stops)
    )
    small: list[tuple[str, str, tuple[int, ...]]]
    small = [("decay", "A_log", (heads,)), ("step", "dt_bias", (heads,)), ("skip", "D", (heads,))]
    small.append(("conv", "conv1d.weight", (sizes.channels, 1, sizes.taps)))
    if ssd.conv_bias:
        small.append(("conv_bias", "conv1d.bias", (sizes.channels,)))
    if ssd.gate != "alone":
        small.append(("out_norm", "norm.weight", (wide,)))
    return [
        Target(f"{layer}.{first}", (xbc[0], z[0]), rows=(xbc[1], z[1])),
        Target(f"{layer}.{second}", ((f"{at}out_proj.weight", (hidden, wide)),)),
        Target(f"{layer}.mixer.rates", (dt[0],), rows=(dt[1],)),
        *(Target(f"{layer}.mixer.{name}", ((f"{at}{n}", shape),)) for name, n, shape in small),
    ]


def _mlp(config: ModelConfig, layer: int, first_experts: int | None) -> list[Target]:
    """List the weights of a layer's MLP, or of its router and experts."""
    hidden, names = config.hidden_size, config.names
    experts, inter = config.experts_of(layer), config.mlp_of(layer)
    first, bare = _halves(config, layer)[1], config.block.activation == "relu2"
    found: list[Target] = []
    if experts is None or experts.beside:
        stored = ("gate_up_proj",) if config.block.fused else names.gate_up
        rows = (1 if bare else 2) * inter // len(stored)
        found += _plain_mlp(config, layer, first + names.mlp, tuple((n, rows) for n in stored))
    if experts is None:
        return found
    listed = range(experts.count)[:first_experts]
    if experts.beside:
        return found + _beside(config, experts, layer, first, listed)
    at = first + names.mixture
    if experts.stored in ("stacked", MXFP4):
        return _stacked(experts, layer, at, hidden, listed)
    width = experts.width
    # another routing than the softmax's: scores that differ little choose
    form = WIDE if experts.routing else ""
    router = ((f"{at}{names.router}.weight", (experts.count, hidden)),)
    found = [Target(f"{layer}.router", router, form=form)]
    if experts.corrected:
        correction = ((f"{at}{names.correction}", (experts.count,)),)
        found.append(Target(f"{layer}.router.bias", correction, form=form))
    found += _shared(config, experts, layer, first + names.shared)
    if experts.stored == "rows":
        return found + _by_rows(config, experts, layer, at, listed)
    *made, down = names.expert
    for number in listed:
        mine, name = f"{at}experts.{number}.", f"{layer}.experts.{number}"
        parts = tuple((f"{mine}{n}.weight", (width, hidden)) for n in made)
        found.append(Target(f"{name}.gate_up", parts))
        found.append(Target(f"{name}.down", ((f"{mine}{down}.weight", (hidden, width)),)))
    return found


def _by_rows(
    config: ModelConfig, experts: Experts, layer: int, at: str, listed: range
) -> list[Target]:
    """List experts that lie in two tensors, each expert an entry, stored by output."""
    hidden, width, names = config.hidden_size, experts.width, config.names
    gate_ups, found = ("gate_up", names.gate_ups, (2 * width, hidden)), []
    for number in listed:
        for part, stored_as, shape in (gate_ups, ("down", names.downs, (hidden, width))):
            name, entry = f"{layer}.experts.{number}.{part}", (number, experts.count)
            found.append(Target(name, ((f"{at}{stored_as}", shape),), entry))
    return found


def _beside(
    config: ModelConfig, experts: Experts, layer: int, at: str, listed: range
) -> list[Target]:
    """List the mixture beside a layer's MLP: its router with two scales, experts, three norms."""
    hidden = config.hidden_size
    return [
        Target(f"{layer}.router", ((f"{at}router.proj.weight", (experts.count, hidden)),)),
        Target(f"{layer}.router.scale", ((f"{at}router.scale", (hidden,)),)),
        Target(f"{layer}.router.share", ((f"{at}router.per_expert_scale", (experts.count,)),)),
        *_by_rows(config, experts, layer, at, listed),
        *(
            Target(f"{layer}.{name}", ((f"{at}{stored}.weight", (hidden,)),))
            for name, stored in (
                ("mlp_norm", "post_feedforward_layernorm_1"),
                ("experts_norm", "pre_feedforward_layernorm_2"),
                ("mixed_norm", "post_feedforward_layernorm_2"),
            )
        ),
    ]


def _per_layer(config: ModelConfig) -> list[Target]:
    """List what makes a token's embeddings for each layer, those of later parts too, and streams
    of it and of them.
    """
    width, first = config.block.per_layer, config.prefix
    if not width:
        return []
    begins, made = config.ends[0], (config.num_layers + config.behind) * width
    shapes: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("layer_embed", "embed_tokens_per_layer", (config.per_layer_vocab, made)),
        ("layer_inputs", "per_layer_model_projection", (made, config.hidden_size)),
        ("layer_inputs_norm", "per_layer_projection_norm", (width,)),
    )
    found = [
        Target(name, ((f"{first}{stored}.weight", shape),))
        for name, stored, shape in (shapes if begins else ())
    ]
    square = config.hidden_size, config.hidden_size
    for i in range(config.block.streams - 1):
        pair = ("spread", "projections"), ("fold", "unembed_projections")
        for (name, stored), here in zip(pair, config.ends, strict=True):
            part = f"{first}altup_{stored}.{i}.weight", square
            found += [Target(f"altup.{name}.{i}", (part,))] if here else []
    return found


def _last(config: ModelConfig, layer: int) -> list[Target]:
    """List what finishes a layer's output (Llama.refined)."""
    at, width, hidden = (
        f"{config.prefix}layers.{layer}.",
        config.block.per_layer,
        config.hidden_size,
    )
    found, streams, rank = [], config.block.streams, config.block.laurel
    named: list[tuple[str, str, tuple[int, ...]]] = []
    if rank:
        named.append(("laurel.left", "laurel.linear_left.weight", (rank, hidden)))
        named.append(("laurel.right", "laurel.linear_right.weight", (hidden, rank)))
        named.append(("laurel.norm", "laurel.post_laurel_norm.weight", (hidden,)))
    if streams:
        named.append(("altup.router", "altup.modality_router.weight", (streams, hidden)))
        named.append(("altup.norm", "altup.router_norm.weight", (hidden,)))
        named.append(("altup.predictor", "altup.prediction_coefs.weight", (streams**2, streams)))
        named.append(("altup.corrector", "altup.correction_coefs.weight", (streams, streams)))
        named.append(("altup.scale", "altup.correct_output_scale", (hidden,)))
    found += [Target(f"{layer}.{name}", ((f"{at}{n}", shape),)) for name, n, shape in named]
    if config.block.scalar:
        found.append(Target(f"{layer}.scalar", ((f"{at}layer_scalar", (1,)),)))
    if width:
        shapes = (
            ("layer_gate", "per_layer_input_gate", (width, hidden)),
            ("layer_out", "per_layer_projection", (hidden, width)),
            ("layer_norm", "post_per_layer_input_norm", (hidden,)),
        )
        for name, stored, shape in shapes:
            found.append(Target(f"{layer}.{name}", ((f"{at}{stored}.weight", shape),)))
    return found


def _plain_mlp(
    config: ModelConfig, layer: int, at: str, gate_up: tuple[tuple[str, int], ...]
) -> list[Target]:
    """List an MLP's two matrices, of which the first may be stored in parts (name, rows), and their
    biases.
    """
    hidden, down = config.hidden_size, f"{at}{config.names.down}"
    parts = tuple((f"{at}{name}.weight", (rows, hidden)) for name, rows in gate_up)
    found = [
        Target(f"{layer}.gate_up", parts),
        Target(f"{layer}.down", ((f"{down}.weight", (hidden, config.mlp_of(layer))),)),
    ]
    if config.mlp_bias:
        biases = tuple((f"{at}{name}.bias", (rows,)) for name, rows in gate_up)
        found.append(Target(f"{layer}.gate_up.bias", biases))
        found.append(Target(f"{layer}.down.bias", ((f"{down}.bias", (hidden,)),)))
    return found


def _shared(config: ModelConfig, experts: Experts, layer: int, at: str) -> list[Target]:
    """List the expert that every token takes, under the names of a plain MLP, and its gate."""
    width, hidden, names = experts.shared, config.hidden_size, config.names
    if not width:
        return []
    rows = experts.activation.made * width // len(names.gate_up)
    parts = tuple((f"{at}{name}.weight", (rows, hidden)) for name in names.gate_up)
    found = [
        Target(f"{layer}.gate_up", parts),
        Target(f"{layer}.down", ((f"{at}{names.down}.weight", (hidden, width)),)),
    ]
    if not experts.shared_gate:
        return found
    gate = f"{at.removesuffix('.')}_gate.weight"
    return [Target(f"{layer}.shared", ((gate, (1, hidden)),)), *found]


def _stacked(experts: Experts, layer: int, at: str, hidden: int, listed: range) -> list[Target]:
    """List a mixture whose experts lie in one tensor, as gpt-oss's do: its router, and each expert
    as an entry; floats stored by input, MXFP4 by output.
    """
    router = f"{at}router."
    found = [
        Target(f"{layer}.router", ((f"{router}weight", (experts.count, hidden)),)),
        Target(f"{layer}.router.bias", ((f"{router}bias", (experts.count,)),)),
    ]
    sizes = (("gate_up", 2 * experts.width, hidden), ("down", hidden, experts.width))
    for number in listed:
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
    "before": (),
    "after": (("o_norm", "post_attention_layernorm"), ("down_norm", "post_feedforward_layernorm")),
    "both": (
        ("input_norm", "input_layernorm"),
        ("o_norm", "post_attention_layernorm"),
        ("post_norm", "pre_feedforward_layernorm"),
        ("down_norm", "post_feedforward_layernorm"),
    ),
}
_Norms = list[tuple[str, str, int]]  # (name in Layer, stored name, width)


def _norms(config: ModelConfig, layer: int) -> tuple[_Norms, _Norms]:
    """List a layer's norms: those before the product of attention, and the others."""
    kind, hidden, names = config.block.qk_norm, config.hidden_size, config.names
    around = [(name, stored, hidden) for name, stored in _AROUND[config.block.norms]]
    if config.block.norms == "before":
        around = [("input_norm", names.before, hidden), ("post_norm", names.after, hidden)]
    before = [norm for norm in around if norm[0] == "input_norm"]
    after = [norm for norm in around if norm[0] != "input_norm"]
    if kind != "none" and layer not in config.recurrent_layers:
        heads, kv_heads, head_dim, _ = config.sizes_of(layer)
        for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
            if count:
                width = count * head_dim if kind == "width" else head_dim
                before.append((name, f"self_attn.{name}", width))
    return before, after


def ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Return a function that says whether a stored tensor, by name, may be left unread.

    These are the rotary buffers of old exports, lm_head if it is tied, k and v of layers that read
    another's rows, and what a model has beside its language model: towers for images and sound, and
    layers that predict several tokens.
    """
    first = config.prefix
    beside: tuple[str, ...] = ("model.visual.", "mtp.") if config.recurrent else ()
    if config.latent:  # the layer behind the last predicts several tokens
        beside = (f"{first}layers.{config.num_layers}.",)
    tower = first.startswith("model.") and first != "model."
    readers = tuple(
        f"{first}layers.{i}.self_attn.{part}"
        for i in range(config.num_layers)
        for part in ("k_proj.", "v_proj.", "k_norm.")
        if config.rows_of(i) != i
    )

    def may_skip(name: str) -> bool:
        return (
            name.endswith("rotary_emb.inv_freq")
            or name.startswith((*beside, *readers))
            or (tower and name.startswith("model.") and not name.startswith(first))
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
            t = empty_on(shape, dtype, device)
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
        yield target.name, parts[0] if len(parts) == 1 else _below(parts)


def _below(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts below each other."""
    shape = sum(len(part) for part in parts), *parts[0].shape[1:]
    return torch.cat(parts, out=empty(shape, parts[0]))
