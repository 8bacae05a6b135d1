"""GGUF files for tests: tiny Llamas written with the gguf package, and bytes written by hand for
headers that no writer makes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.config.config import ModelConfig
from tests.builders import tiny_config, tiny_weights

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["th", "the", "Ġt", "Ġth", "Ġthe", "in", "ing", "12", "ll", "'ll"]
MERGES = ["t h", "th e", "Ġ t", "Ġt h", "Ġth e", "i n", "in g", "1 2", "l l", "' ll"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_letters() -> list[str]:
    """The letters that byte-level BPE writes for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = SPECIAL + byte_letters() + MERGED


def llama_config(**changes: Any) -> ModelConfig:
    """Two layers; rows of 256, which every type's blocks divide."""
    sizes = dict(layers=2, heads=4, kv_heads=2, hidden=256, vocab_size=len(TOKENS))
    return tiny_config(**{**sizes, "intermediate_size": 256, **changes})


def stored_names(config: ModelConfig) -> dict[str, str]:
    """Hugging Face's name -> GGUF's, of every tensor."""
    found = {}
    for name in tiny_weights(config):
        plain, _, kind = name.rpartition(".")
        if plain.startswith("model.layers."):
            number, _, part = plain.removeprefix("model.layers.").partition(".")
            found[name] = f"blk.{number}.{NAMES[part]}.{kind}"
        else:
            found[name] = f"{NAMES[plain]}.{kind}"
    return found


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter lays q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    width = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, width, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def keys_of(config: ModelConfig) -> dict[str, Any]:
    """The keys of a model's file."""
    return {
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_layers,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_llama(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    kind: str = "F32",
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    kinds: dict[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model as llama.cpp does; matrices of type `kind`, but for those whose stored name
    ends in a key of `kinds`. keys: added or replaced, None takes
    one away. extra: more tensors; without: stored names to leave out. Returns what the stored
    blocks mean, by Hugging Face's name and in its order of rows.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**keys_of(config), **(keys or {})}.items():
        add_key(writer, name.replace("llama.", architecture + "."), value)
    meant, turned = {}, {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    if architecture != "llama":
        turned = {}
    usual = kind
    for name, stored in stored_names(config).items():
        kind = next((k for end, k in (kinds or {}).items() if stored.endswith(end)), usual)
        quant = gguf.GGMLQuantizationType[kind]
        heads = turned.get(name.split(".")[-2])
        weight = weights[name]
        rows = (interleaved(weight, heads) if heads else weight).numpy()
        blocks = rows if rows.ndim == 1 else blocks_of(rows, quant)
        if stored not in without:
            packed = None if rows.ndim == 1 or kind in ("F32", "F16") else quant
            writer.add_tensor(stored, blocks, raw_dtype=packed)
        value = rows if rows.ndim == 1 else gguf.quants.dequantize(blocks.view(np.uint8), quant)
        back = torch.from_numpy(np.array(value))
        if heads:  # the inverse, written as a search, not as the converter writes it
            place = interleaved(torch.arange(len(rows)), heads)
            back = back[torch.argsort(place)]
        meant[name] = back.numpy()
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_key(writer: Any, name: str, value: Any) -> None:
    """Add a key of the type that its value suggests."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)


def blocks_of(rows: np.ndarray, quant: Any) -> np.ndarray:
    """Rows in a type's blocks. The package writes no K-quants: theirs are random bytes with sound
    scales.
    """
    import gguf

    try:
        return gguf.quants.quantize(rows, quant)
    except NotImplementedError:
        block, width = gguf.GGML_QUANT_SIZES[quant]
    generator = np.random.default_rng(rows.shape[0])
    blocks = generator.integers(0, 256, (rows.shape[0], rows.shape[1] // block, width), np.uint8)
    scale = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    if quant.name == "Q6_K":
        blocks[..., -2:] = scale
    else:
        blocks[..., 0:2] = blocks[..., 2:4] = scale
    return blocks.reshape(rows.shape[0], -1)


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def info(
    name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, count: int | None = None
) -> bytes:
    """A tensor's entry; `count` dimensions claimed."""
    claimed = len(dims) if count is None else count
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", claimed) + sizes + struct.pack("<IQ", kind, offset)


def by_hand(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 64,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file: any keys and tensors, `data` zero bytes, and counts that may be lies."""
    claimed = counts or (len(tensors), len(keys))
    head = magic + version + struct.pack("<2Q", *claimed) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)
