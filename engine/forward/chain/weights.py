"""What of a layer's weights a chain of layers takes (kernels/chain/layers.py)."""

from __future__ import annotations

from functools import partial

import torch

from engine.model.llama import Layer
from engine.model.llama import Matrix as AnyMatrix
from kernels.chain.layer import ChainedLayer
from kernels.chain.matrix import Matrix
from kernels.layer.linear import Linear
from kernels.layer.native_step import ACTIVATIONS
from kernels.quant.linear import QuantisedLinear


def weights_of(layer: Layer, dtype: torch.dtype) -> partial[ChainedLayer] | None:
    """A layer of a model of a dtype as a chain takes it, but for what a session has of it; None
    where a chain does not know all of it.
    """
    block, mixture = layer.block, None
    qkv, o = taken(layer.qkv, dtype), taken(layer.o, dtype)
    gate_up, down = taken(layer.gate_up, dtype), taken(layer.down, dtype)
    if layer.mixture is not None and layer.gate_up is None:
        mixture = layer.mixture.of_a_row
    own = gate_up is not None and down is not None and layer.mixture is None
    if not _known(layer) or qkv is None or o is None or not (own or mixture):
        return None
    return partial(
        ChainedLayer,
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        mixture=mixture,
        input_norm=layer.input_norm,
        post_norm=layer.post_norm,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o_norm=layer.o_norm,
        down_norm=layer.down_norm,
        activation=block.activation,
        residual=block.residual,
        widths=block.qk_norm == "width",
    )


def taken(matrix: AnyMatrix | None, dtype: torch.dtype) -> Matrix | None:
    """A matrix as a chain takes it, for one row of x of a dtype; None: it takes it not."""
    if not isinstance(matrix, Linear | QuantisedLinear) or matrix.dtype != dtype:
        return None
    return matrix.product if isinstance(matrix, Linear) else matrix.of_a_row


def _known(layer: Layer) -> bool:
    """Whether a chain knows what a layer has beside matrices."""
    others = layer.latent, layer.mixer, layer.mixer_out, layer.gate, layer.laurel
    more = layer.scalar, layer.cut, layer.beside, layer.means
    block = layer.block
    plain = block.down == block.gate == 1.0 and block.activation in ACTIVATIONS
    norms = (layer.q_norm is None) == (layer.k_norm is None)
    apart = layer.q_norm is None or block.qk_norm in ("head", "width")
    return (
        plain
        and norms
        and apart
        and not block.unit_values
        and not any(part is not None for part in (*others, *more))
    )
