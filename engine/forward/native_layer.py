"""The halves of a layer in a decode step on a CPU, by the C++ kernels: norm with q/k/v, rotation
with the store, output projection with the residual, norm with gate, up and SwiGLU, down with the
residual.

Five calls a layer beside attention, where torch's operators are 60. They round where torch's
operators round; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.bank.base import Step
from engine.forward.layer import TorchLayer, split_rows
from engine.model.config.block import LLAMA
from engine.model.llama import Llama, Matrix, normed_heads
from engine.model.recurrent import Mixed
from engine.model.rope import apply_rope
from engine.model.share.matrix import Joined
from kernels.layer.linear import Linear
from kernels.layer.native_step import normalize_rows, rotate_store, usable
from kernels.quant.linear import QuantisedLinear
from kernels.quant.native import product as multiply_few_bits


def natively(model: Llama) -> bool:
    """Tell whether the C++ kernels can do what a model's layers do on this machine."""
    config = model.config
    norms = [model.norm, *(norm for layer in model.layers for norm in layer.norms)]
    # what is on the left is done elsewhere, or here
    block = replace(
        config.block,
        qk_norm="none" if config.block.qk_norm == "head" else config.block.qk_norm,
        wide_norm=False,
        norm_offset=0.0,
        gated=False,
        o_bias=True,
        fused=False,
        embedding=1.0,
        logits=1.0,
        logit_cap=0.0,
        score=None,
        score_cap=0.0,
        sinks=False,
    )
    alike = all(norm.dtype == model.dtype and norm.is_contiguous() for norm in norms)
    on_cpu = model.device.type == "cpu" and usable()
    whole = config.experts is None and not config.bare and config.beside is None
    whole = whole and config.latent is None
    return on_cpu and alike and block == LLAMA and whole


class NativeLayer:
    """The C++ kernels. Matrices that they do not read, or not for so many rows, are multiplied by
    torch's operators, with the kernels around them.
    """

    most_rows, backend = TorchLayer.most_rows, "auto"

    def __init__(self, model: Llama) -> None:
        assert natively(model), "a block that the C++ kernels do not know"
        self.model, self._eps = model, model.config.rms_norm_eps
        self._plain = TorchLayer(model)
        config = model.config
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._per_row = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        block = config.block
        # a float32 weight holds the offset since it was loaded
        folded = 0.0 if model.dtype == torch.float32 else block.norm_offset
        self._offset = folded if block.wide_norm else None
        self._own_logits = config.block.logits == 1.0 and not config.block.logit_cap

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        layer = self.model.layers[number]
        qkv = multiply(x, layer.qkv, norm=layer.input_norm, eps=self._eps, offset=self._offset)
        qkv = qkv.view(*x.shape[:2], *self._per_row)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        queries = []
        for step, parts in zip(steps, split_rows(steps, qkv, cos, sin)):
            mine, c, s = (part.contiguous() for part in parts)
            k, v, twice = step.bank.step_rows(number)
            ring = step.query_ring.of(number)
            if k.dtype == x.dtype:
                given = k, v, ring, step.positions, twice, norms, self._eps, self._offset
                queries.append(rotate_store(mine, c, s, *given))
                continue
            qk, v = mine[:, :, : -self._kv_heads], mine[:, :, -self._kv_heads :]
            if norms is not None:
                qk = normed_heads(layer, qk, self._heads, self._eps)
            turned = apply_rope(qk, c, s)
            q_pre_rope = qk[:, :, : self._heads]
            step.bank.write_step(number, turned[:, :, self._heads :], v, q_pre_rope, step)
            queries.append(turned[:, :, : self._heads])
        return queries

    def ahead(
        self, number: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries [B, Q, H, D] of layer number + 1, made of x [B, Q, hidden] as layer
        `number` norms it. cos, sin float32 [B, Q, R/2]: of layer number + 1.
        """
        layer, norm = self.model.layers[number + 1], self.model.layers[number].input_norm
        norm = layer.input_norm if norm is None else norm
        qkv = multiply(x, layer.qkv, norm=norm, eps=self._eps, offset=self._offset)
        qk = qkv.view(*x.shape[:2], *self._per_row)[:, :, : -self._kv_heads]
        if layer.q_norm is not None:
            qk = normed_heads(layer, qk, self._heads, self._eps)
        return apply_rope(qk[:, :, : self._heads], cos, sin)

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        layer = self.model.layers[number]
        assert layer.mixer is not None and layer.input_norm is not None
        x = normalize_rows(x, layer.input_norm, self._eps, self._offset)
        return layer.mixer.mixed(x, multiply(x, layer.mixer_in or layer.qkv))

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.model.layers[number]
        assert layer.gate_up is not None and layer.down is not None
        attended = attended.flatten(2)
        if layer.gate is not None:
            opened = multiply(
                x, layer.gate, norm=layer.input_norm, eps=self._eps, offset=self._offset
            )
            attended = attended * torch.sigmoid(opened)
        x = multiply(attended, layer.o, residual=x)
        mixed = multiply(
            x, layer.gate_up, norm=layer.post_norm, eps=self._eps, gated=True, offset=self._offset
        )
        return multiply(mixed, layer.down, residual=x)

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
        y = matrix.join(multiply(x, matrix.inner, norm, eps, None, gated, wide, offset))
        return y if residual is None else residual + y
    product = matrix.own(x) if isinstance(matrix, Linear) else None
    if product is not None:
        return product(x, norm, eps, residual, gated, wide, offset)
    if norm is not None:
        x = normalize_rows(x, norm, eps, offset)
    if isinstance(matrix, QuantisedLinear) and matrix.native:
        assert matrix.panels is not None
        x, kept = matrix.ordered(x).contiguous(), torch.float32 if wide else None
        return multiply_few_bits(x, matrix.panels, matrix.bias, residual, gated, kept)
    y = matrix(x)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = residual + y
    return y.float() if wide else y
