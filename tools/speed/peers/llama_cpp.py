"""llama.cpp as the third side of tools.speed.hybrid: a GGUF file of the same shape with random
weights, its prompts and its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools.bench.llamacpp import VARIANTS, LlamaCpp, Model
from tools.bench.run import Missing

ROPE_SECTIONS = [11, 11, 10, 0]  # of text, height and width; llama.cpp asks for them, text is all


def shapes(data: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name in the file, shape) of every tensor of a Qwen3.5 whose config.json is `data`."""
    hidden, inter, vocabulary = (
        data[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads, width = (
        data[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    values = data["linear_num_value_heads"] * data["linear_value_head_dim"]
    mixed = 2 * data["linear_num_key_heads"] * data["linear_key_head_dim"] + values
    recurrent = {
        "attn_qkv.weight": (mixed, hidden),
        "attn_gate.weight": (values, hidden),
        "ssm_conv1d.weight": (mixed, data["linear_conv_kernel_dim"]),
        "ssm_dt.bias": (data["linear_num_value_heads"],),
        "ssm_a": (data["linear_num_value_heads"],),
        "ssm_beta.weight": (data["linear_num_value_heads"], hidden),
        "ssm_alpha.weight": (data["linear_num_value_heads"], hidden),
        "ssm_norm.weight": (data["linear_value_head_dim"],),
        "ssm_out.weight": (hidden, values),
    }
    attention = {
        "attn_q.weight": (2 * heads * width, hidden),
        "attn_k.weight": (kv_heads * width, hidden),
        "attn_v.weight": (kv_heads * width, hidden),
        "attn_output.weight": (hidden, heads * width),
        "attn_q_norm.weight": (width,),
        "attn_k_norm.weight": (width,),
    }
    around = {
        "attn_norm.weight": (hidden,),
        "post_attention_norm.weight": (hidden,),
        "ffn_gate.weight": (inter, hidden),
        "ffn_up.weight": (inter, hidden),
        "ffn_down.weight": (hidden, inter),
    }
    yield "token_embd.weight", (vocabulary, hidden)
    for layer in range(data["num_hidden_layers"]):
        own = attention if layer % 4 == 3 else recurrent
        for name, shape in (own | around).items():
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (hidden,)


def keys(data: dict[str, Any]) -> dict[str, int | float]:
    """{key behind the architecture: value}, as llama.cpp's converter names them."""
    values = data["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": data["linear_conv_kernel_dim"],
        "ssm.state_size": data["linear_key_head_dim"],
        "ssm.group_count": data["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * data["linear_value_head_dim"],
        "full_attention_interval": 4,
        "context_length": data["max_position_embeddings"],
        "embedding_length": data["hidden_size"],
        "block_count": data["num_hidden_layers"],
        "feed_forward_length": data["intermediate_size"],
        "attention.head_count": data["num_attention_heads"],
        "attention.head_count_kv": data["num_key_value_heads"],
        "attention.key_length": data["head_dim"],
        "attention.value_length": data["head_dim"],
        "attention.layer_norm_rms_epsilon": data["rms_norm_eps"],
        "rope.freq_base": 1e7,
        "rope.dimension_count": data["head_dim"] // 4,
        "vocab_size": data["vocab_size"],
    }


def write(data: dict[str, Any], dtype: torch.dtype, path: Path) -> Path:
    """Write random weights: matrices in bfloat16 or float32, the rest in float32; no vocabulary.

    Raises Missing without the package gguf.
    """
    try:
        import gguf
    except ImportError as error:
        raise Missing("the package gguf is not installed (pip install gguf)") from error
    writer = gguf.GGUFWriter(str(path), "qwen35")
    for name, value in keys(data).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"qwen35.{name}", value)
    writer.add_array("qwen35.rope.dimension_sections", ROPE_SECTIONS)
    writer.add_tokenizer_model("no_vocab")
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes(data):
        values = torch.empty(shape)
        if len(shape) > 1:
            values.normal_(0.0, shape[1] ** -0.5, generator=generator)
        else:
            values.fill_(-0.02 if name.endswith("ssm_a") else 0.0 if "bias" in name else 1.0)
        if len(shape) > 1 and dtype == torch.bfloat16 and "conv1d" not in name:
            held = values.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(name, held, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Llama(LlamaCpp):
    """llama.cpp's prompts and steps, one thread, K and V in float16 with flash attention."""

    def __init__(self, path: Path, context: int, batch: int) -> None:
        self.batch = batch
        super().__init__(Model(path, 1), context, 0, VARIANTS[-1])

    def _fill(self) -> float:
        """Leave the cache empty: a prompt fills it."""
        return 0.0

    def read(self, ids: list[int]) -> None:
        """Read a prompt into an empty cache: logits of its last token."""
        self.prefill(ids)
        self._at = len(ids)

    def steps(self, token: int) -> None:
        """So many steps of one token."""
        for _ in range(self.batch):
            self._decode([token], self._at)
            self._at += 1
