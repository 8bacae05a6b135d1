"""The halves of a layer in a decode step on a CPU, by the C++ kernels: norm with q/k/v, rotation
with the store, output projection with the residual, norm with gate, up and SwiGLU, down with the
residual. And those of a prompt's chunk, whose products are whatever is fastest for so many rows,
with norms, rotation and SwiGLU between them.

Five calls a layer beside attention, where torch's operators are 60; latent attention has three
more. Of a step of one token engine/forward/chain/layers.py makes fewer. They round where torch's
operators round; only the order of sums differs. Of a family's own, some stays with torch's
operators between these calls: what an MLP has that is no SwiGLU, factors, experts, streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.bank.base import Step
from engine.forward.layer import LayerForm, TorchLayer, split_rows
from engine.model.heads.latent import EPS, LatentHeads
from engine.model.llama import (
    Layer,
    Llama,
    Matrix,
    activated_mlp,
    attention_out,
    normed_heads,
    post_attention,
    pre_attention,
    through_mlp,
    unit_values,
)
from engine.model.recurrent import Mixed
from engine.model.rope import apply_rope
from engine.model.share.matrix import Joined
from kernels.layer.linear import Linear
from kernels.layer.native_latent import by_head, latent_heads, reads_latent
from kernels.layer.native_step import (
    act_rows,
    normalize_rows,
    rotate_rows,
    rotate_store,
    stores,
    usable,
)
from kernels.quant.linear import QuantisedLinear
from kernels.quant.native import product as multiply_few_bits


def natively(model: Llama) -> bool:
    """Tell whether the C++ kernels run on this machine and read a model's norms. What they do not
    know of a layer, torch's operators do (`NativeLayer`).
    """
    norms = [model.norm, *(norm for layer in model.layers for norm in layer.norms)]
    alike = all(norm.dtype == model.dtype and norm.is_contiguous() for norm in norms)
    return model.device.type == "cpu" and alike and usable()


def _reads(dtype: torch.dtype, latent: LatentHeads | None) -> bool:
    """Tell whether the C++ kernels read what latent attention has of its own."""
    return latent is not None and reads_latent(dtype, *latent.tensors)


class NativeLayer:
    """The C++ kernels. Matrices that they do not read, or not for so many rows, are multiplied by
    torch's operators, with the kernels around them.
    """

    most_rows, backend = TorchLayer.most_rows, "auto"
    parts: tuple[LayerForm, ...] = ()

    def __init__(self, model: Llama) -> None:
        assert natively(model), "norms that the C++ kernels do not read"
        self._plain = TorchLayer(model)
        self.model, self._eps = self._plain.model, model.config.rms_norm_eps
        config = model.config
        self._sizes = [config.sizes_of(layer)[:3] for layer in range(config.num_layers)]
        self._latent = [_reads(model.dtype, layer.latent) for layer in model.layers]
        block = config.block
        # a float32 weight holds the offset since it was loaded
        folded = 0.0 if model.dtype == torch.float32 else block.norm_offset
        self._offset = folded if block.wide_norm else None
        self._own_logits = config.block.logits == 1.0 and not config.block.logit_cap

    @property
    def norms(self) -> tuple[float, float | None]:
        """(eps, offset) of norms, as `multiply` takes them."""
        return self._eps, self._offset

    @property
    def head(self) -> Matrix | None:
        """The matrix whose product with the normed x is the logits; None: more is done."""
        return self.model.lm_head if self._own_logits else None

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        layer, (heads, kv_heads, dim) = self.model.layers[number], self._sizes[number]
        if layer.latent is not None:
            return self._latent_before(number, layer.latent, x, cos, sin, steps)
        qkv = multiply(x, layer.qkv, norm=layer.input_norm, eps=self._eps, offset=self._offset)
        # where layers take k for v, qkv makes no v
        qkv = qkv.view(*x.shape[:2], -1, dim)
        taken = qkv.shape[2] < heads + 2 * kv_heads
        qkv = torch.cat((qkv, qkv[:, :, heads:]), 2) if taken else qkv
        norms = None if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        if norms is not None and layer.block.qk_norm == "width":
            self._norm_whole(layer, qkv[..., : heads + kv_heads, :], heads)
            norms = None
        queries = []
        for step, parts in zip(steps, split_rows(steps, qkv, cos, sin)):
            mine, c, s = (part.contiguous() for part in parts)
            ring, unit = step.query_ring.of(number), layer.block.unit_values
            # a layer that reads another's rows stores none
            k, v, twice = step.bank.step_rows(number) if kv_heads else (None, None, None)
            if k is None or stores(k.dtype, x.dtype, dim):
                given = k, v, ring, step.positions, twice, norms, self._eps, self._offset, unit
                queries.append(rotate_store(mine, c, s, *given))
                continue
            qk, v = mine[:, :, : heads + kv_heads], mine[:, :, heads + kv_heads :]
            v = unit_values(v, self._eps, layer.block) if unit else v
            if norms is not None:
                qk = normed_heads(layer, qk, heads, self._eps)
            turned = apply_rope(qk, c, s)
            q_pre_rope = qk[:, :, :heads]
            step.bank.write_step(number, turned[:, :, heads:], v, q_pre_rope, step)
            queries.append(turned[:, :, :heads])
        return queries

    def before_chunk(
        self,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `pre_attention` of engine/model/llama.py, for a prompt's chunk."""
        block, width = layer.block, layer.block.qk_norm == "width"
        one = layer.q_norm is not None and layer.k_norm is None
        if layer.latent is not None or block.unit_values or one:
            return pre_attention(layer, x, cos, sin, heads, kv_heads, head_dim, eps)
        qkv = multiply(x, layer.qkv, norm=layer.input_norm, eps=eps, offset=self._offset)
        qkv = qkv.view(*x.shape[:2], -1, head_dim)
        v = qkv[:, :, qkv.shape[2] - kv_heads :]
        if qkv.shape[2] < heads + 2 * kv_heads:
            v = v.clone()  # layers take k before its norm for v
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        if norms is not None and width:
            self._norm_whole(layer, qkv[:, :, : heads + kv_heads], heads)
            norms = None
        angles = cos.contiguous(), sin.contiguous()
        turned = rotate_rows(qkv, *angles, heads, kv_heads, norms, eps, self._offset)
        return turned[:, :, :heads], turned[:, :, heads:], v, qkv[:, :, :heads]

    def _latent_before(
        self,
        number: int,
        latent: LatentHeads,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        """`before` of latent attention, whose rows are K and V at once."""
        rows = [step.bank.step_rows(number) for step in steps]
        whole = all(k.dtype == x.dtype and k.data_ptr() == v.data_ptr() for k, v, _ in rows)
        if not (self._latent[number] and whole):
            return self._plain.before(number, x, cos, sin, steps)
        layer, sizes, times = self.model.layers[number], latent.sizes, None
        made = multiply(x, layer.qkv, norm=layer.input_norm, eps=self._eps, offset=self._offset)
        q, row = made.split([made.shape[-1] - sizes.width, sizes.width], dim=-1)
        if latent.query is not None:
            q = multiply(q.contiguous(), latent.query, norm=latent.query_norm, eps=EPS)
        if sizes.stretch is not None:
            cos, times = cos.split([sizes.turned // 2, 1], dim=-1)
        qkv, queries = latent_heads(q, row, latent.key, latent.norm, EPS, times), []
        for step, (k, _, twice), parts in zip(steps, rows, split_rows(steps, qkv, cos, sin)):
            mine, c, s = (part.contiguous() for part in parts)
            ring = step.query_ring.of(number)
            queries.append(rotate_store(mine, c, s, k, None, ring, step.positions, twice))
        return queries

    def _norm_whole(self, layer: Layer, qk: torch.Tensor, heads: int) -> None:
        """Norm the `heads` heads of q at once, and those of k: qk [B, Q, H + Hkv, D], in place."""
        if layer.means is not None:
            qk.copy_(normed_heads(layer, qk, heads, self._eps))
            return
        assert layer.q_norm is not None and layer.k_norm is not None
        for part, norm in ((qk[:, :, :heads], layer.q_norm), (qk[:, :, heads:], layer.k_norm)):
            normed = normalize_rows(part.flatten(2), norm, self._eps, self._offset)
            part.copy_(normed.view_as(part))

    def ahead(
        self, number: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries [B, Q, H, D] of layer number + 1, made of x [B, Q, hidden] as layer
        `number` norms it. cos, sin float32 [B, Q, R/2]: of layer number + 1.
        """
        layer, norm = self.model.layers[number + 1], self.model.layers[number].input_norm
        norm = layer.input_norm if norm is None else norm
        heads, kv_heads, dim = self._sizes[number + 1]
        qkv = multiply(x, layer.qkv, norm=norm, eps=self._eps, offset=self._offset)
        qk = qkv.view(*x.shape[:2], -1, dim)[:, :, : heads + kv_heads]
        if layer.q_norm is not None:
            qk = normed_heads(layer, qk, heads, self._eps)
        return apply_rope(qk[:, :, :heads], cos, sin)

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        layer = self.model.layers[number]
        assert layer.mixer is not None and layer.input_norm is not None
        x = normalize_rows(x, layer.input_norm, self._eps, self._offset)
        return layer.mixer.mixed(x, multiply(x, layer.mixer_in or layer.qkv))

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.model.layers[number]
        if layer.laurel is not None:
            return self._plain.after(number, x, attended)
        if layer.latent is not None and attended.dim() == 4:
            attended = self._values(number, layer.latent, attended).flatten(2)
        return self.after_chunk(layer, x, attended, self._eps)

    def after_chunk(
        self, layer: Layer, x: torch.Tensor, attended: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """As `post_attention` of engine/model/llama.py, for a step's tokens or a prompt's chunk."""
        if layer.laurel is not None:
            return post_attention(layer, x, attended, eps)
        if layer.latent is not None and attended.dim() == 4:
            attended = layer.latent.values(attended)
        attended = attended.flatten(2)
        if layer.gate is not None:
            opened = multiply(
                x, layer.gate, norm=layer.input_norm, eps=self._eps, offset=self._offset
            )
            attended = attended * torch.sigmoid(opened)
        if layer.mixer_out is None:
            x = self._through(layer, attended, layer.o, layer.o_norm, x)
        else:
            x = self._added(layer, attention_out(layer, attended), layer.o_norm, x)
        return self._through_mlp(layer, x)

    def _values(self, number: int, latent: LatentHeads, attended: torch.Tensor) -> torch.Tensor:
        """As LatentHeads.values."""
        if not self._latent[number]:
            return latent.values(attended)
        return by_head(attended[..., latent.sizes.turned :], latent.value)

    def _through_mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """As `through_mlp` of engine/model/llama.py."""
        block, (eps, offset) = layer.block, (self._eps, self._offset)
        if layer.gate_up is None and layer.mixture is not None:
            norm = layer.post_norm
            y = x if norm is None else normalize_rows(x, norm, eps, offset)
            if layer.down_norm is None and block.residual == 1.0:
                return layer.mixture(y, residual=x)
            return self._added(layer, layer.mixture(y), layer.down_norm, x)
        if layer.gate_up is None or layer.down is None or layer.mixture is not None:
            return through_mlp(layer, x, eps)
        plain = block.gate == 1.0 and layer.cut is None
        gated = plain and block.activation == "silu"
        mixed = multiply(x, layer.gate_up, layer.post_norm, eps, gated=gated, offset=offset)
        if not gated:
            mixed = act_rows(mixed, block.activation) if plain else activated_mlp(mixed, layer)
        if block.down == 1.0:
            return self._through(layer, mixed, layer.down, layer.down_norm, x)
        return self._added(layer, multiply(mixed, layer.down) * block.down, layer.down_norm, x)

    def _through(
        self,
        layer: Layer,
        y: torch.Tensor,
        last: Matrix,
        norm: torch.Tensor | None,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply y by the last matrix of a half and add that to the residual x, normed and scaled
        where the block says so.
        """
        if norm is None and layer.block.residual == 1.0:
            return multiply(y, last, residual=x)
        return self._added(layer, multiply(y, last), norm, x)

    def _added(
        self, layer: Layer, part: torch.Tensor, norm: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        if norm is not None:
            part = normalize_rows(part, norm, self._eps, self._offset)
        return x + part if layer.block.residual == 1.0 else x + part * layer.block.residual

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if not self._own_logits:
            return self._plain.logits(x)
        model = self.model
        return multiply(
            x, model.lm_head, norm=model.norm, eps=self._eps, wide=True, offset=self._offset
        )


def multiply(
    x: torch.Tensor,
    matrix: Matrix,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    wide: bool = False,
    offset: float | None = None,
) -> torch.Tensor:
    """A product with what is around it, as kernels.layer.native_product.Product."""
    if isinstance(matrix, Joined):
        x = matrix.whole(x)
        y = matrix.join(multiply(x, matrix.inner, norm, eps, None, gated, wide, offset))
        return y if residual is None else residual + y
    product = matrix.own(x) if isinstance(matrix, Linear) else None
    if product is not None:
        return product(x, norm, eps, residual, gated, wide, offset)
    strips = matrix.strips(x) if isinstance(matrix, Linear) else None
    if norm is not None:
        x = normalize_rows(x, norm, eps, offset)
    if strips is not None:
        y = strips(x, residual, gated)
        return y.float() if wide else y
    if isinstance(matrix, QuantisedLinear) and matrix.native:
        assert matrix.panels is not None
        x, kept = matrix.ordered(x).contiguous(), torch.float32 if wide else None
        return multiply_few_bits(x, matrix.panels, matrix.bias, residual, gated, kept)
    y = matrix(x)
    if gated:
        y = act_rows(y)
    if residual is not None:
        y = residual + y
    return y.float() if wide else y
