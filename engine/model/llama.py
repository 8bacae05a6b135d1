"""The model: its weights, where they come from, and a layer's two halves around attention.

`pre_attention` does norm, q/k/v and rotation; `post_attention` does the output projection and the
MLP. Prefill and decode put their own attention between them. Both are pure functions of their
tensors, so that torch.compile sees one small graph that all layers share. `assemble` builds the
model from the tensors that engine/model/tensors.py lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.model.altup import AltUp, Laurel
from engine.model.config.block import LLAMA, Block
from engine.model.config.config import ModelConfig
from engine.model.heads.latent import LatentHeads
from engine.model.mamba import Mamba2
from engine.model.mixture import Mixture, Stacks
from engine.model.per_layer import LayerTable, PerLayer, rounded
from engine.model.recurrent import DeltaNet, Mixed, Mixer
from engine.model.rope import apply_rope
from engine.model.share.matrix import Joined
from engine.model.share.mean import DividedMean, DividedSpread
from engine.model.share.table import SharedTable
from kernels.layer.linear import Linear, choose_form, pack_linear
from kernels.native.pages import moved
from kernels.quant.linear import QuantisedLinear, pack_quantised
from kernels.quant.matrix import Quantised

NORMS = ("input_norm", "q_norm", "k_norm", "o_norm", "post_norm", "down_norm")
OWN = ("qkv", "o", "gate", "gate_up", "down", "mixer_in", "mixer_out")  # a layer's own matrices
Held = Linear | QuantisedLinear
Matrix = Held | Joined
Embedding = torch.Tensor | QuantisedLinear | SharedTable


@dataclass
class Layer:
    """Weights of one layer. q, k, v and gate, up are fused along their output rows at load."""

    input_norm: torch.Tensor | None  # [hidden], before attention
    qkv: Matrix  # [(H + 2 Hkv) * D, hidden]
    o: Matrix  # [hidden, H * D]
    post_norm: torch.Tensor | None  # [hidden], before the MLP
    # [2 * intermediate, hidden]; None: a mixture; beside one: of the expert that all tokens take
    gate_up: Matrix | None
    down: Matrix | None  # [hidden, intermediate]
    block: Block = LLAMA
    q_norm: torch.Tensor | None = None  # [D] or [H * D]
    k_norm: torch.Tensor | None = None  # [D] or [Hkv * D]
    o_norm: torch.Tensor | None = None  # [hidden], after attention
    down_norm: torch.Tensor | None = None  # [hidden], after the MLP
    mixture: Mixture | None = None  # in place of gate_up and down, or with `shared` beside them
    sinks: torch.Tensor | None = None  # [H]
    gate: Matrix | None = None  # [H * D, hidden], of attention's output
    # of a recurrent layer, whose qkv is [C + Hv * dv, hidden] and whose o is [hidden, Hv * dv]
    mixer: Mixer | None = None
    shared: torch.Tensor | None = None  # [1, hidden], gate of the expert that all tokens take
    # qkv and o of a mixer beside attention
    mixer_in: Matrix | None = None
    mixer_out: Matrix | None = None
    scalar: torch.Tensor | None = None  # [1], of the layer's output
    # of a mixture beside the MLP, [hidden]: of the MLP's output, of the experts' input and output
    beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    # of latent attention, whose qkv makes queries (or their latent) and one row of all heads
    latent: LatentHeads | None = None
    laurel: Laurel | None = None
    cut: float | None = None  # standard deviations above its mean, of the MLP's gate
    # of q and of k, where ranks divide the heads that a norm takes together
    means: DividedMean | None = None
    # of the MLP's gate, where ranks divide its width and it is cut
    spread: DividedSpread | None = None

    @property
    def norms(self) -> list[torch.Tensor]:
        """The norms that this layer has."""
        found = [t for name in NORMS if (t := getattr(self, name)) is not None]
        return found + list(self.beside or ())

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that this layer has, but for the router of a mixture."""
        found: list[Matrix | None] = [getattr(self, name) for name in OWN]
        found.append(None if self.latent is None else self.latent.query)
        experts = [] if self.mixture is None else self.mixture.matrices
        return [matrix for matrix in found if matrix is not None] + experts

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Layer:
        """Return the same layer with what `change` makes of each of its matrices, always in the
        same order.
        """
        found = {name: getattr(self, name) for name in OWN}
        made: dict[str, Any] = {n: change(held) for n, held in found.items() if held is not None}
        latent = self.latent and self.latent.mapped(change)
        mixture = self.mixture and self.mixture.mapped(change)
        return replace(self, latent=latent, mixture=mixture, **made)

    def on_torch(self) -> Layer:
        """Return the same layer, multiplied by torch's operators alone."""
        return self.mapped(lambda matrix: matrix.on_torch())


class Staged(Protocol):
    """Layers whose matrices come to the device in turn (engine/forward/staged/)."""

    pinned: bool
    streamed: int  # bytes that came over

    @property
    def layers(self) -> tuple[int, ...]:
        """Their numbers, ascending."""
        ...

    def turns(self, layers: Sequence[Layer], first: int = 0) -> Iterator[tuple[int, Layer]]:
        """As Llama.turns."""
        ...

    def arrive(self, number: int) -> None:
        """As Llama.arrive."""
        ...

    def place(self, number: int) -> None:
        """As Llama.place."""
        ...

    def replayed(self, layers: int) -> None:
        """Count a pass that a graph made."""
        ...


@dataclass
class Llama:
    """A loaded model: config, dtype, device and weights. It holds no state of any request."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embed: Embedding  # [vocab, hidden]
    layers: list[Layer]
    norm: torch.Tensor  # [hidden]
    lm_head: Matrix  # [vocab, hidden]
    per_layer: PerLayer | None = None
    altup: AltUp | None = None  # of models with several streams
    staged: Staged | None = None  # layers that stream; None: all stay on the device
    # the same layers by device, numbered from 0 in each; (): all of them lie on `device`
    parts: tuple[Llama, ...] = ()

    def __post_init__(self) -> None:
        """Round what embeddings are multiplied by: a step asks no tensor for it."""
        self.scale = rounded(self.config.block.embedding, self.dtype)

    @property
    def sinks(self) -> tuple[torch.Tensor, ...]:
        """Attention sinks of every layer, [H]; () where there are none."""
        return tuple(layer.sinks for layer in self.layers if layer.sinks is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tensor that two of them share counts once. Of a part of a model
        without embedding and head, which others have.
        """
        begins, ends = self.config.ends
        plain = [self.norm] * ends + [t for layer in self.layers for t in layer.norms]
        plain += [
            t for layer in self.layers if layer.mixture is not None for t in layer.mixture.routers
        ]
        plain += self.sinks
        plain += [layer.shared for layer in self.layers if layer.shared is not None]
        plain += [layer.scalar for layer in self.layers if layer.scalar is not None]
        parts = [self.altup, *(m for x in self.layers for m in (x.mixer, x.latent, x.laurel))]
        plain += [tensor for part in parts if part is not None for tensor in part.tensors]
        packed = [m for layer in self.layers for m in layer.matrices]
        if self.per_layer is not None:
            plain += self.per_layer.tensors
            packed += self.per_layer.matrices
        head = self.lm_head.inner if isinstance(self.lm_head, Joined) else self.lm_head
        embed = self.embed.table if isinstance(self.embed, SharedTable) else self.embed
        shared = head is embed or (isinstance(head, Linear) and head.weight is embed)
        if ends and not shared:
            packed.append(head)
        return (
            self.embed.nbytes * begins
            + sum(t.numel() * t.element_size() for t in plain)
            + sum(m.nbytes for m in packed)
        )

    @property
    def capturable(self) -> bool:
        """Whether a step asks nothing of the host: not where it chooses a mixture's experts."""
        mixtures = [layer.mixture for layer in self.layers if layer.mixture is not None]
        return all(mixture.stacks is not None for mixture in mixtures)

    def on_host(self) -> Llama:
        """Return the same model, of the same memory, whose experts the host chooses: itself where
        there is no mixture, or the host chooses anyway.
        """
        if not any(x.mixture is not None and x.mixture.stacks is not None for x in self.layers):
            return self
        layers = [replace(x, mixture=x.mixture and x.mixture.on_host()) for x in self.layers]
        return replace(self, layers=layers, parts=())

    def first(self, layers: int) -> Llama:
        """Return the model of the first `layers` layers and the head, of the same memory."""
        return replace(self, layers=self.layers[:layers], parts=())

    def on_torch(self) -> Llama:
        """Return the same model, of the same memory, multiplied by torch's operators alone: for
        backends without C++ kernels. Itself where it has none.
        """
        if not any(m.native for m in (self.lm_head, *(m for x in self.layers for m in x.matrices))):
            return self
        head = self.lm_head.on_torch()
        embed = head if self.lm_head is self.embed else self.embed
        assert not isinstance(embed, Linear | Joined)
        layers = [layer.on_torch() for layer in self.layers]
        more = None if self.per_layer is None else self.per_layer.on_torch()
        same = replace(self, embed=embed, layers=layers, lm_head=head, per_layer=more)
        return replace(same, parts=())

    def turns(self, first: int = 0) -> Iterator[tuple[int, Layer]]:
        """Go through the layers from number `first` on in order: (number, layer), each with its
        matrices in place for the work that is issued before the next is asked for.
        """
        if self.staged is not None:
            return self.staged.turns(self.layers, first)
        return ((number, self.layers[number]) for number in range(first, len(self.layers)))

    def arrive(self, number: int) -> None:
        """Have the matrices of a layer in place before its turn, in that of the layer before."""
        if self.staged is not None:
            self.staged.arrive(number)

    def place(self, number: int) -> None:
        """Put the matrices of a layer in place outside of `turns`."""
        if self.staged is not None:
            self.staged.place(number)

    @property
    def streaming(self) -> tuple[int, ...]:
        """The layers whose matrices come to the device in turn, of all parts, ascending."""
        found: list[int] = []
        first = 0
        for part in self.parts or (self,):
            own = part.staged.layers if part.staged is not None else ()
            found += [first + layer for layer in own]
            first += len(part.layers)
        return tuple(found)

    @property
    def rings(self) -> tuple[Staged, ...]:
        """What brings those of each part that has some."""
        held = (part.staged for part in self.parts or (self,))
        return tuple(ring for ring in held if ring is not None)

    def replayed(self) -> None:
        """Note that a graph has gone through all layers."""
        if self.staged is not None:
            self.staged.replayed(len(self.layers))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens int64 [...] to the first layer's x [..., hidden]."""
        table = self.embed
        x = table[tokens] if isinstance(table, torch.Tensor) else table.gather(tokens)
        return x if self.scale == 1.0 else x * self.scale

    def begun(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map tokens int64 [B, S] to (what goes into the first layer: their embeddings, or streams
        [B, S, A, hidden] of them; what layers add beside their halves [B, S, L, P], or None).
        """
        x, more = self.embedded(tokens), self.per_layer
        streams = x if self.altup is None else self.altup.spread(x)
        if more is None:
            return streams, None
        assert more.made is not None, "the first part of a model begins"
        return streams, more.made.inputs(tokens, x)

    def packed(self, x: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
        """Pack what the part behind this one takes into one tensor [B, S, width]: what the last
        layer left, [B, S, hidden] or streams, and what later layers add beside their halves.
        """
        if more is None:
            return x
        later = more[:, :, self.config.num_layers :]
        return torch.cat((x.flatten(2), later.flatten(2)), dim=2)

    def unpacked(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `begun`, of what the part before this one has packed [B, S, width]."""
        block, hidden = self.config.block, self.config.hidden_size
        if not block.per_layer:
            return x, None
        own = max(1, block.streams) * hidden
        given, more = x[:, :, :own].contiguous(), x[:, :, own:]
        streams = given.unflatten(2, (-1, hidden)) if block.streams else given
        return streams, more.unflatten(2, (-1, block.per_layer))

    def entered(self, number: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (what a layer computes of [B, S, hidden], its predicted streams or None) from x as
        the layer before it left it.
        """
        if self.altup is None:
            return x, None
        predicted = self.altup.predicted(number, x)
        return predicted[:, :, 0], predicted

    def refined(
        self,
        number: int,
        x: torch.Tensor,
        inputs: torch.Tensor | None = None,
        predicted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Finish a layer's output x [B, S, hidden]: correct the streams that were predicted, add
        what its inputs [B, S, P] gate (PerLayer.inputs), and scale it. x itself in families that
        have none of these.
        """
        scalar = self.layers[number].scalar
        if self.altup is not None:
            assert inputs is not None and predicted is not None and self.per_layer is not None
            x = self.altup.corrected(number, predicted, x)
            first = x[:, :, 0] * self.altup.scales[number]
            more = self.per_layer.gated(number, first, inputs)[:, :, None]
            return torch.cat((x[:, :, :1], x[:, :, 1:] + more), dim=2)
        if self.per_layer is not None:
            assert inputs is not None
            x = x + self.per_layer.gated(number, x, inputs)
        return x if scalar is None else x * scalar

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., hidden], or streams [..., A, hidden], after the last layer to float32 logits
        [..., vocab].
        """
        block = self.config.block
        x = x if self.altup is None else self.altup.folded(x)
        found = self.lm_head(rms_norm(x, self.norm, self.config.rms_norm_eps, block)).float()
        if block.logits != 1.0:
            found *= block.logits
        if block.logit_cap:
            found.div_(block.logit_cap).tanh_().mul_(block.logit_cap)
        return found


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, block: Block = LLAMA
) -> torch.Tensor:
    """Normalise x [..., hidden] by its root mean square and scale it by weight [hidden].

    x * rsqrt(mean(x^2) + eps) in float32, then x.dtype, then times weight: transformers' order.
    With block.wide_norm the weight comes before the cast.
    """
    return (_normalised(x, eps, block) * _offset(weight, block)).to(x.dtype)


def _normalised(x: torch.Tensor, eps: float, block: Block) -> torch.Tensor:
    """Divide x [..., N] by its root mean square; float32 with block.wide_norm, else x.dtype."""
    return F.rms_norm(x.float() if block.wide_norm else x, x.shape[-1:], None, eps)


def _offset(weight: torch.Tensor, block: Block) -> torch.Tensor:
    """Return what a norm multiplies by: a float32 weight holds the block's offset since it was
    loaded (`_folded`).
    """
    if not block.norm_offset or weight.dtype == torch.float32:
        return weight
    return block.norm_offset + weight.float()


def _folded(weight: torch.Tensor, block: Block) -> torch.Tensor:
    """Add the block's offset to a norm's weight once and for all, where that neither rounds nor
    takes more bytes: in float32.
    """
    if not block.norm_offset or weight.dtype != torch.float32:
        return weight
    return weight + block.norm_offset


def pre_attention(
    layer: Layer,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    absorb: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the first half of a layer on x [B, S, hidden]; cos, sin float32 [B or 1, S, R/2], R being
    the part of a head that rotates.

    Returns rotated q [B, S, H, D], rotated k [B, S, Hkv, D], v [B, S, Hkv, D] and q before
    rotation (normed where the family norms q), which the query ring keeps for selectors that look
    at a window of queries. kv_heads: 0 where the layer reads another's rows. Where no v was stored
    (Block.keys_as_values) v is k before its norm. absorb: of latent attention, as
    LatentHeads.split takes it.
    """
    batch, length, _ = x.shape
    if layer.input_norm is not None:
        x = rms_norm(x, layer.input_norm, eps, layer.block)
    if layer.latent is not None:
        return layer.latent.split(layer.qkv(x), cos, sin, absorb)
    qkv = layer.qkv(x).view(batch, length, -1, head_dim)
    qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, qkv.shape[2] - kv_heads :]
    if layer.block.unit_values:
        v = unit_values(v, eps, layer.block)
    if layer.q_norm is not None:
        qk = normed_heads(layer, qk, heads, eps)
    rotated = apply_rope(qk, cos, sin)
    return rotated[:, :, :heads], rotated[:, :, heads:], v, qk[:, :, :heads]


def pre_recurrence(layer: Layer, x: torch.Tensor, eps: float) -> Mixed:
    """Run the first half of a recurrent layer on x [B, S, hidden], up to its convolution."""
    assert layer.mixer is not None and layer.input_norm is not None
    x = rms_norm(x, layer.input_norm, eps, layer.block)
    return layer.mixer.mixed(x, (layer.mixer_in or layer.qkv)(x))


def unit_values(v: torch.Tensor, eps: float, block: Block) -> torch.Tensor:
    """Divide each head of v [B, S, Hkv, D] by its root mean square."""
    return _normalised(v, eps, block).to(v.dtype)


def normed_heads(layer: Layer, qk: torch.Tensor, heads: int, eps: float) -> torch.Tensor:
    """Norm q and k, qk [B, S, H + Hkv, D]: each head, or all heads of each at once."""
    block = layer.block
    assert layer.q_norm is not None
    if layer.k_norm is None:  # the layer reads another's rows
        return rms_norm(qk, layer.q_norm, eps, block)
    if block.qk_norm == "width":
        q, k = qk[:, :, :heads], qk[:, :, heads:]
        if layer.means is not None:
            return _normed_among_ranks(layer, layer.means, (q, k), eps)
        q = rms_norm(q.flatten(2), layer.q_norm, eps, block).view_as(q)
        k = rms_norm(k.flatten(2), layer.k_norm, eps, block).view_as(k)
        return torch.cat((q, k), dim=2)
    # one pass over all heads, then each side's weight in place
    even = _normalised(qk, eps, block)
    even[:, :, :heads].mul_(_offset(layer.q_norm, block))
    even[:, :, heads:].mul_(_offset(layer.k_norm, block))
    return even.to(qk.dtype)


def _normed_among_ranks(
    layer: Layer, means: DividedMean, parts: tuple[torch.Tensor, torch.Tensor], eps: float
) -> torch.Tensor:
    """Norm q [B, S, H, D] and k [B, S, Hkv, D] over the heads of all ranks, as `rms_norm` rounds:
    [B, S, H + Hkv, D].
    """
    block, wide = layer.block, [part.flatten(2).float() for part in parts]
    scales = torch.rsqrt(means(torch.stack([x.square().sum(-1) for x in wide], -1)) + eps)
    normed = []
    for x, part, scale, norm in zip(
        wide, parts, scales.unbind(-1), (layer.q_norm, layer.k_norm), strict=True
    ):
        assert norm is not None
        even = x * scale[..., None]
        even = even if block.wide_norm else even.to(part.dtype)
        normed.append((even * _offset(norm, block)).to(part.dtype).view_as(part))
    return torch.cat(normed, dim=2)


def post_attention(
    layer: Layer, x: torch.Tensor, attended: torch.Tensor, eps: float
) -> torch.Tensor:
    """Run the second half of a layer: x [B, S, hidden], attended [B, S, H, D] -> new x. attended
    may be [B, S, N], of heads that are joined already; of latent attention it then holds values.
    """
    block = layer.block
    if layer.latent is not None and attended.dim() == 4:
        attended = layer.latent.values(attended)
    attended = attended.flatten(2)
    if layer.gate is not None:
        assert layer.input_norm is not None
        attended = attended * torch.sigmoid(layer.gate(rms_norm(x, layer.input_norm, eps, block)))
    before = x
    x = _added(x, attention_out(layer, attended), layer.o_norm, eps, block)
    if layer.laurel is not None:
        assert layer.input_norm is not None
        x = layer.laurel.joined(x, rms_norm(before, layer.input_norm, eps, block))
    return through_mlp(layer, x, eps)


def through_mlp(layer: Layer, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Run what follows a layer's attention: x [B, S, hidden] through its MLP or its experts."""
    block = layer.block
    y = x if layer.post_norm is None else rms_norm(x, layer.post_norm, eps, block)
    if layer.gate_up is None or layer.down is None:
        if layer.mixture is None:
            return x
        if layer.down_norm is None and block.residual == 1.0:
            return layer.mixture(y, residual=x)
        return _added(x, layer.mixture(y), layer.down_norm, eps, block)
    out = layer.down(activated_mlp(layer.gate_up(y), layer))
    if block.down != 1.0:
        out = out * block.down
    if layer.mixture is not None and layer.beside is not None:
        out = _beside(layer, x, out, eps)
    elif layer.mixture is not None:
        if layer.shared is not None:
            out = torch.sigmoid(F.linear(y, layer.shared)) * out
        out = layer.mixture(y) + out
    return _added(x, out, layer.down_norm, eps, block)


def attention_out(layer: Layer, attended: torch.Tensor) -> torch.Tensor:
    """What attention brings to the residual, and what a mixer beside it brings, which follows it in
    `attended`.
    """
    if layer.mixer_out is None or layer.mixer is None:
        return layer.o(attended)
    width, o = layer.mixer.sizes.value_size, layer.o
    attended, mixed = attended[..., :-width], layer.mixer_out(attended[..., -width:])
    if isinstance(o, Joined):  # both in one sum over ranks
        return o.join(o.inner(attended) + mixed)
    return o(attended) + mixed


def activated_mlp(both: torch.Tensor, layer: Layer) -> torch.Tensor:
    """A layer's MLP between its products: gate and up side by side, or what has no gate."""
    block = layer.block
    if block.activation == "relu2":
        return F.relu(both).square()
    gate, up = both.chunk(2, dim=-1)
    if block.gate != 1.0:
        gate = gate * block.gate
    if layer.cut is not None:
        if layer.spread is None:
            mean, spread = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, correction=0)
        else:
            mean, spread = (part.to(gate.dtype) for part in layer.spread(gate))
        least = mean + spread * layer.cut
        gate = F.relu(gate - least)
    gate = F.silu(gate) if block.activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate * up


def _beside(layer: Layer, x: torch.Tensor, out: torch.Tensor, eps: float) -> torch.Tensor:
    """Add to the MLP's output `out` [B, S, hidden] that of the mixture beside it, which takes x
    [B, S, hidden] as attention left it.
    """
    mixture, block = layer.mixture, layer.block
    assert mixture is not None and mixture.scale is not None and layer.beside is not None
    after, before, last = layer.beside
    routed = _normalised(x, eps, block).to(x.dtype) * mixture.scale * x.shape[-1] ** -0.5
    mixed = mixture(rms_norm(x, before, eps, block), routed=routed)
    return rms_norm(out, after, eps, block) + rms_norm(mixed, last, eps, block)


def _added(
    x: torch.Tensor, part: torch.Tensor, norm: torch.Tensor | None, eps: float, block: Block
) -> torch.Tensor:
    """Add what a half of a layer computed to the residual x, normed and scaled."""
    if norm is not None:
        part = rms_norm(part, norm, eps, block)
    return x + part if block.residual == 1.0 else x + part * block.residual


PACKED = ("qkv", "o", "queries", "gate", "gate_up", "down", "mixer_in", "mixer_out")
_PER_LAYER = ("layer_gate", "layer_out", "layer_inputs")
_FOLDED = (*NORMS, "norm")
SMALL = 32 << 20  # bytes of a tensor that may be twice in memory for a moment


def assemble(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    stream: Iterable[tuple[str, torch.Tensor | Quantised]],
    form: str = "auto",
    few_bits: str = "auto",
    rounds: bool = False,
    head_twice: bool = False,
    stacked: bool = False,
    keep: Callable[[str, Held], Held] | None = None,
    head_on: torch.device | None = None,
) -> Llama:
    """Build a Llama from (target name, tensor) pairs in any order.

    Each matrix is packed as soon as it and its bias have arrived, so that only one copy of it
    lives. A tied lm_head may come in few bits, before an embedding in few bits. form, few_bits: how
    floats and few bits are held, as pack_linear and pack_quantised say. rounds: so too, of the
    matrices of layers. head_twice: hold a tied lm_head beside the embedding, in the form that is
    fastest. stacked: hold a layer's experts in one tensor, from which the device chooses. keep:
    makes of each matrix of a layer, by its target's name, what is kept of it. head_on: where a tied
    lm_head has its own memory.
    """
    experts = config.experts if stacked else None
    stacks = None if experts is None else Stacks(experts, config.hidden_size, dtype)
    coming = config.parameters * dtype.itemsize
    plain: dict[str, torch.Tensor] = {}
    waiting: dict[str, dict[str, torch.Tensor | Quantised]] = {}
    packed: dict[str, Held] = {}
    for name, tensor in stream:
        base = name.removesuffix(".bias")
        kind = base.split(".")[-1]
        if kind in ("lm_head", "embed") and isinstance(tensor, Quantised):
            # rows are only looked up, unless the embedding is lm_head as well
            alone = kind == "embed" and ("lm_head" in packed or not config.tied_embeddings)
            packed[name] = pack_quantised(tensor, None, dtype, "blocks" if alone else few_bits)
            continue
        if isinstance(tensor, torch.Tensor):
            coming -= tensor.nbytes
            tensor = _placed(tensor, form, coming)
        if kind not in (*PACKED, *_PER_LAYER):
            assert isinstance(tensor, torch.Tensor)
            # for a moment there are two of it, where the weights to come will lie
            if kind == "lm_head" and coming >= tensor.nbytes:
                packed[name] = pack_linear(tensor, form=form)
            else:
                plain[name] = _folded(tensor, config.block) if kind in _FOLDED else tensor
            continue
        parts = waiting.setdefault(base, {})
        parts["bias" if name.endswith(".bias") else "weight"] = tensor
        del tensor
        if len(parts) == 1 + _has_bias(config, base):
            del waiting[base]
            packed[base] = _packed(base, parts, dtype, form, few_bits, rounds, stacks)
            if keep is not None and kind in PACKED:
                packed[base] = keep(base, packed[base])
    embed = packed.get("embed", plain.get("embed"))
    assert embed is not None and not isinstance(embed, Linear | Joined)
    lm_head = packed.get("lm_head") or _head(config, embed, plain, form, head_twice, head_on)
    layers = _layers(config, plain, packed, stacks)
    more = _per_layer(config, plain, packed), _altup(config, plain)
    own = config, dtype, torch.device(device)
    return Llama(*own, embed, layers, plain["norm"], lm_head, *more)


def _packed(
    name: str,
    parts: dict[str, torch.Tensor | Quantised],
    dtype: torch.dtype,
    form: str,
    few_bits: str,
    rounds: bool,
    stacks: Stacks | None,
) -> Held:
    """The matrix of a target, of its weight and its bias, which leave `parts`."""
    weight, bias = parts.pop("weight"), parts.pop("bias", None)
    assert not isinstance(bias, Quantised)
    if stacks is not None and ".experts." in name:
        return stacks.take(name, weight, bias, form, few_bits)
    if isinstance(weight, Quantised):
        return pack_quantised(weight, bias, dtype, few_bits, rounds)
    return pack_linear(weight, bias, form=form)


def _placed(tensor: torch.Tensor, form: str, coming: int) -> torch.Tensor:
    """A tensor where a CPU reads it fastest, if that is the memory that its product will read.
    coming: bytes of the weights after it; while it is copied there are two of it, where they will
    lie. Without so many, the last of a model, it stays.
    """
    if tensor.device.type != "cpu" or tensor.dim() < 2 or max(coming, SMALL) < tensor.nbytes:
        return tensor
    kept = choose_form(tensor, form) not in ("narrow", "packed")
    return moved(tensor) if kept else tensor


def _layers(
    config: ModelConfig,
    plain: dict[str, torch.Tensor],
    packed: dict[str, Held],
    stacks: Stacks | None,
) -> list[Layer]:
    """Put each layer together from what has arrived."""
    return [
        Layer(
            plain.get(f"{i}.input_norm"),
            packed[f"{i}.qkv"],
            packed[f"{i}.o"],
            plain.get(f"{i}.post_norm"),
            packed.get(f"{i}.gate_up"),
            packed.get(f"{i}.down"),
            config.block,
            plain.get(f"{i}.q_norm"),
            plain.get(f"{i}.k_norm"),
            plain.get(f"{i}.o_norm"),
            plain.get(f"{i}.down_norm"),
            _mixture(config, i, plain, packed, stacks),
            plain.get(f"{i}.sinks"),
            packed.get(f"{i}.gate"),
            _mixer(config, i, plain),
            plain.get(f"{i}.shared"),
            packed.get(f"{i}.mixer_in"),
            packed.get(f"{i}.mixer_out"),
            plain.get(f"{i}.scalar"),
            _norms_beside(i, plain),
            _latent_heads(config, i, plain, packed),
            _laurel(config, i, plain),
            config.block.cuts[i] if config.block.cuts else None,
        )
        for i in range(config.num_layers)
    ]


def _has_bias(config: ModelConfig, name: str) -> bool:
    """Whether the matrix of a target has a bias."""
    if ".experts." in name:
        return config.experts is not None and config.experts.bias
    number, _, kind = name.rpartition(".")
    if kind == "queries":
        return False
    if kind in ("qkv", "o", "gate"):
        attends = int(number) not in config.recurrent_layers
        return attends and (config.o_bias if kind == "o" else config.attention_bias)
    return config.mlp_bias and not kind.startswith("mixer")


def _norms_beside(
    layer: int, plain: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The norms of a mixture beside a layer's MLP; None where there is none."""
    if f"{layer}.mlp_norm" not in plain:
        return None
    after, before, last = (
        plain[f"{layer}.{name}"] for name in ("mlp_norm", "experts_norm", "mixed_norm")
    )
    return after, before, last


def _per_layer(
    config: ModelConfig, plain: dict[str, torch.Tensor], packed: dict[str, Held]
) -> PerLayer | None:
    """Make the embeddings for each layer of what has arrived; None where there are none."""
    if not config.block.per_layer:
        return None
    layers, eps = range(config.num_layers), config.rms_norm_eps
    table = plain["layer_embed"], packed["layer_inputs"], plain["layer_inputs_norm"]
    return PerLayer(
        LayerTable(*table, eps),
        [packed[f"{i}.layer_gate"] for i in layers],
        [packed[f"{i}.layer_out"] for i in layers],
        [plain[f"{i}.layer_norm"] for i in layers],
        eps,
    )


def _laurel(config: ModelConfig, layer: int, plain: dict[str, torch.Tensor]) -> Laurel | None:
    """Make a layer's map beside attention; None where there is none."""
    if not config.block.laurel:
        return None
    left, right, norm = (plain[f"{layer}.laurel.{name}"] for name in ("left", "right", "norm"))
    return Laurel(left, right, norm, config.rms_norm_eps)


def _altup(config: ModelConfig, plain: dict[str, torch.Tensor]) -> AltUp | None:
    """Make what keeps several streams of what has arrived; None where there is one."""
    if not config.block.streams:
        return None
    others = range(config.block.streams - 1)
    spreads, folds = ([plain[f"altup.{name}.{i}"] for i in others] for name in ("spread", "fold"))
    routers, norms, predictors, correctors, scales = (
        [plain[f"{layer}.altup.{name}"] for layer in range(config.num_layers)]
        for name in ("router", "norm", "predictor", "corrector", "scale")
    )
    each = routers, norms, predictors, correctors, scales
    return AltUp(spreads, folds, *each, config.rms_norm_eps)


def _mixer(config: ModelConfig, layer: int, plain: dict[str, torch.Tensor]) -> Mixer | None:
    """Make the small weights of a recurrent layer; None for another."""
    if config.recurrent is None or layer not in config.recurrent.layers:
        return None
    at = f"{layer}.mixer."
    held = {name.removeprefix(at): t for name, t in plain.items() if name.startswith(at)}
    if config.recurrent.ssd is not None:
        return Mamba2.of(config.recurrent, config.recurrent.ssd, held)
    conv, *rest = (held[name] for name in ("conv", "rates", "decay", "step", "out_norm"))
    return DeltaNet(config.recurrent, conv.squeeze(1), *rest)


def _latent_heads(
    config: ModelConfig, layer: int, plain: dict[str, torch.Tensor], packed: dict[str, Held]
) -> LatentHeads | None:
    """Make what latent attention has inside; None where there is none."""
    if config.latent is None:
        return None
    keys, values = (
        plain[f"{layer}.{name}"].unflatten(0, (config.num_heads, -1)) for name in ("keys", "values")
    )
    return LatentHeads(
        config.latent,
        keys,
        values.transpose(1, 2),
        plain[f"{layer}.latent_norm"],
        plain.get(f"{layer}.query_norm"),
        packed.get(f"{layer}.queries"),
    )


def _head(
    config: ModelConfig,
    embed: torch.Tensor | QuantisedLinear,
    plain: dict[str, torch.Tensor],
    form: str,
    twice: bool,
    where: torch.device | None,
) -> Held:
    """Build lm_head if it was not packed while streaming: from the tied embedding, or from a tensor
    that arrived last. `copy=False` for the latter, because a second copy of it would exceed the
    memory plan. where: the device on which a tied one has memory of its own.
    """
    if not config.tied_embeddings:
        return pack_linear(plain["lm_head"], form=form, copy=False)
    if isinstance(embed, QuantisedLinear):
        return embed
    if where is not None:
        embed = embed.to(where, copy=True)
    return pack_linear(embed, form=form, copy=twice)


def _mixture(
    config: ModelConfig,
    layer: int,
    plain: dict[str, torch.Tensor],
    packed: dict[str, Held],
    stacks: Stacks | None,
) -> Mixture | None:
    """Make a layer's mixture of what has arrived; None where it has none."""
    experts = config.experts_of(layer)
    if experts is None:
        return None
    gate_up, down = (
        [packed[f"{layer}.experts.{number}.{part}"] for number in range(experts.count)]
        for part in ("gate_up", "down")
    )
    bias = plain.get(f"{layer}.router.bias")
    both = None if stacks is None else stacks.of(layer)
    own = plain.get(f"{layer}.router.scale"), plain.get(f"{layer}.router.share")
    return Mixture(experts, plain[f"{layer}.router"], gate_up, down, bias, both, *own)
