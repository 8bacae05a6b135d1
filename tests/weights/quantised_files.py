"""Quantised checkpoints for tests: tiny models whose matrices are written in each format by packers
of their own, element by element, beside the weights that they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.config.config import ModelConfig
from tests.builders import tiny_config, tiny_weights

Tensors = dict[str, torch.Tensor]
# (the tensors of a matrix by what follows its name, the matrix that they mean)
Packed = tuple[Tensors, torch.Tensor]
SIZES = dict(layers=1, heads=4, kv_heads=2, hidden=128, head_dim=32, intermediate_size=128)


def config_of(**changes: Any) -> ModelConfig:
    """A model whose widths every format divides."""
    return tiny_config(**{**SIZES, "vocab_size": 96, **changes})


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of small numbers as int32 words, low bits first; order: which of a word's values each
    place holds.
    """
    per = 32 // bits
    out = torch.zeros(values.shape[0], -(-values.shape[1] // per), dtype=torch.int64)
    for column in range(values.shape[1]):
        word, place = divmod(column, per)
        if order is not None:
            place = order.index(place)
        out[:, word] |= values[:, column].long() << (bits * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def drawn(shape: tuple[int, int], bits: int, group: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(values, scales [O, G], zeros [O, G]) at random, float16 scales."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    values = torch.randint(0, 1 << bits, shape, generator=generator)
    groups = columns // group
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / (6 * (1 << bits))
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=generator)
    return values, scales.half(), zeros


def meant(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """(q - z) * scale."""
    group = values.shape[1] // scales.shape[1]
    wide = values.double() - zeros.double().repeat_interleave(group, 1)
    return (wide * scales.double().repeat_interleave(group, 1)).float()


def gptq(bits: int = 4, group: int = 32, sym: bool = False, act: bool = False, v2: bool = False):
    """GPTQ; the config and a packer."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        rows, columns = weight.shape
        size = columns if group == -1 else group
        values, scales, zeros = drawn((rows, columns), bits, size, seed)
        if sym:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        index = torch.arange(columns) // size
        if act:  # q, k and v see the same inputs, so their order is the same
            index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(9))]
        full = torch.empty(rows, columns, dtype=torch.float64)
        for column in range(columns):
            g = int(index[column])
            full[:, column] = (values[:, column] - zeros[:, g]).double() * scales[:, g].double()
        stored = {
            ".qweight": words(values, bits).t().contiguous(),
            ".qzeros": words((zeros - (0 if v2 else 1)).t(), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": index.to(torch.int32),
        }
        return stored, full.float()

    settings = dict(quant_method="gptq", bits=bits, group_size=group, sym=sym, desc_act=act)
    return settings | (dict(checkpoint_format="gptq_v2") if v2 else {}), pack


def awq(group: int = 32):
    """AWQ."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        values, scales, zeros = drawn(tuple(weight.shape), 4, group, seed)
        order = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble holds
        stored = {
            ".qweight": words(values.t(), 4, order),
            ".qzeros": words(zeros.t(), 4, order),
            ".scales": scales.t().contiguous(),
        }
        return stored, meant(values, scales, zeros)

    settings = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    return settings, pack


def compressed(bits: int, format: str, strategy: str, group: int = 32, sym: bool = True, **more):
    """compressed-tensors, int."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        rows, columns = weight.shape
        size = group if strategy == "group" else columns
        values, scales, zeros = drawn((rows, columns), bits, size, seed)
        if sym:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        stored = {".weight_scale": scales}
        if strategy == "tensor":
            scales = scales[:1].expand(rows, 1).contiguous()
            stored = {".weight_scale": scales[0].clone()}
        if format == "pack-quantized":
            stored[".weight_packed"] = words(values, bits)
            stored[".weight_shape"] = torch.tensor([rows, columns])
            if not sym:
                stored[".weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        else:
            stored[".weight"] = (values - (1 << (bits - 1))).to(torch.int8)
        return stored, meant(values, scales, zeros)

    weights = dict(num_bits=bits, type="int", symmetric=sym, strategy=strategy)
    weights |= dict(group_size=group) if strategy == "group" else {}
    scheme = {"targets": ["Linear"], "weights": weights | more}
    config_groups = {"group_0": scheme}
    return dict(quant_method="compressed-tensors", format=format, config_groups=config_groups), pack


def fp8(strategy: str, rows: int = 64, columns: int = 32, deepseek: bool = False):
    """FP8: DeepSeek's blocks, or compressed-tensors' tensor, channel and block."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
        shape = {
            "tensor": (1, 1),
            "channel": (weight.shape[0], 1),
            "block": (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)),
        }[strategy]
        scales = (torch.rand(shape, generator=generator) + 0.5) / 10
        full = torch.empty(weight.shape)
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                at = {"tensor": (0, 0), "channel": (row, 0)}.get(
                    strategy, (row // rows, column // columns)
                )
                full[row, column] = values[row, column].float() * scales[at]
        name = ".weight_scale_inv" if deepseek else ".weight_scale"
        return {".weight": values, name: scales.flatten() if strategy == "tensor" else scales}, full

    if deepseek:
        return dict(quant_method="fp8", fmt="e4m3", weight_block_size=[rows, columns]), pack
    weights = dict(num_bits=8, type="float", strategy=strategy, symmetric=True)
    weights |= dict(block_structure=[rows, columns]) if strategy == "block" else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = dict(quant_method="compressed-tensors", format="float-quantized")
    return settings | dict(config_groups=groups), pack


def bnb_nf4(nested: bool):
    """bitsandbytes nf4."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        generator = torch.Generator().manual_seed(seed)
        rows, columns = weight.shape
        table = torch.linspace(-1, 1, 16) ** 3
        values = torch.randint(0, 16, (rows * columns,), generator=generator)
        scales = torch.rand(rows * columns // 64, generator=generator) / 8 + 0.05
        state: dict[str, Any] = dict(quant_type="nf4", blocksize=64, shape=[rows, columns])
        stored = {".weight.absmax": scales}
        if nested:
            outer = torch.linspace(0.1, 0.2, -(-len(scales) // 256))
            codes = torch.rand(256, generator=generator)
            picked = torch.randint(0, 256, (len(scales),), generator=generator)
            scales = codes[picked] * outer[torch.arange(len(picked)) // 256] + 0.25
            state |= dict(nested_blocksize=256, nested_offset=0.25)
            stored = {
                ".weight.absmax": picked.to(torch.uint8),
                ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": codes,
            }
        stored[".weight"] = ((values[0::2] << 4) | values[1::2]).to(torch.uint8)[:, None]
        stored[".weight.quant_map"] = table
        text = json.dumps(state).encode()
        stored[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        full = table[values] * scales.repeat_interleave(64)
        return stored, full.view(rows, columns)

    settings = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return settings | dict(bnb_4bit_use_double_quant=nested), pack


def bnb_int8():
    """bitsandbytes int8."""

    def pack(weight: torch.Tensor, seed: int) -> Packed:
        scale = weight.abs().amax(1)
        values = (weight / scale[:, None] * 127).round().to(torch.int8)
        stored = {".weight": values, ".SCB": scale, ".weight_format": torch.tensor(0).byte()}
        return stored, values.float() * scale[:, None] / 127

    return dict(quant_method="bitsandbytes", load_in_8bit=True), pack


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, int], Packed]]] = {
    "gptq": gptq(),
    "gptq, symmetric": gptq(sym=True),
    "gptq, whole columns": gptq(group=-1),
    "gptq, 8 bits": gptq(bits=8, group=64),
    "gptq, 8 bits, symmetric": gptq(bits=8, sym=True),
    "gptq, act-order": gptq(act=True),
    "gptq, version 2": gptq(v2=True, group=64),
    "awq": awq(),
    "awq, groups of 64": awq(64),
    "w4a16": compressed(4, "pack-quantized", "group"),
    "w4a16, asymmetric": compressed(4, "pack-quantized", "group", 64, sym=False),
    "w4a16, channels": compressed(4, "pack-quantized", "channel"),
    "w8a16": compressed(8, "pack-quantized", "channel"),
    "w8a16, asymmetric groups": compressed(8, "pack-quantized", "group", sym=False),
    "w8a8": compressed(8, "int-quantized", "channel"),
    "w8a8, one scale": compressed(8, "int-quantized", "tensor"),
    "fp8, one scale": fp8("tensor"),
    "fp8, channels": fp8("channel"),
    "fp8, blocks": fp8("block"),
    "deepseek": fp8("block", deepseek=True),
    "deepseek, ragged": fp8("block", rows=48, columns=48, deepseek=True),
    "nf4": bnb_nf4(False),
    "nf4, nested": bnb_nf4(True),
    "bitsandbytes int8": bnb_int8(),
}


def write(
    folder: Path,
    name: str,
    change: Callable[[Tensors], object] | None = None,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[ModelConfig, Tensors]:
    """Write a model in a format of FORMATS, lm_head and embedding as floats; returns its
    configuration and the weights that it means. change: edits the stored tensors; settings: fields
    of quantization_config that replace the format's (None takes one away).
    """
    config, weights = config_of(**changes), {}
    found, pack = FORMATS[name]
    stored: Tensors = {}
    for number, (key, weight) in enumerate(tiny_weights(config).items()):
        base = key.removesuffix(".weight")
        if weight.dim() == 2 and "proj" in base:
            parts, weights[key] = pack(weight, number)
            stored |= {base + suffix: tensor for suffix, tensor in parts.items()}
        else:
            stored[key] = weights[key] = weight
    if change:
        change(stored)
    folder.mkdir(exist_ok=True)
    save_file(
        {key: value.contiguous() for key, value in stored.items()}, folder / "model.safetensors"
    )
    quantisation = {k: v for k, v in (found | (settings or {})).items() if v is not None}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "torch_dtype": "float32",
        "quantization_config": quantisation,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return config, weights
