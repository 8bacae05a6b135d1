"""A GGUF file of the architecture `llama` as a Hugging Face model: config.json, and for every
tensor of it the stored one and how its rows lie.

llama.cpp stores the rows of q and k with the two halves of each head interleaved, because its
rotary embedding turns neighbours; Hugging Face turns halves. Undoing it moves whole rows, so it
works on packed blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.model.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from engine.model.fields import Fields
from engine.model.llama import targets
from engine.model.rope_config import MAX_POSITIONS, MAX_THETA
from tools.gguf.header import GGUF, StoredTensor
from tools.gguf.vocabulary import Vocabulary
from weights.jsonfile import shown

KEY = "llama."
# Hugging Face's name -> GGUF's, without "model.layers.N." and "blk.N."
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3: the file has the factors but not the numbers that they come from
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


@dataclass(frozen=True)
class Wanted:
    """One tensor of the folder: its name, the stored one, and heads if its rows are interleaved."""

    name: str
    stored: StoredTensor
    heads: int = 0


def read_config(
    file: GGUF, vocabulary: Vocabulary, dtype: str
) -> tuple[dict[str, Any], ModelConfig]:
    """config.json of a file, and the same checked as the engine checks any.

    Raises UnsupportedCheckpoint for another architecture, experts, a sliding window or a rope that
    this converter does not write, BadCheckpoint for a field that is missing or senseless.
    """
    fields = Fields(file.keys, str(file.path))
    require_llama(fields)
    heads = fields.integer(KEY + "attention.head_count", 1, MAX_HEADS)
    hidden = fields.integer(KEY + "embedding_length", 1, MAX_WIDTH)
    head_dim = fields.integer(KEY + "attention.key_length", 1, hidden, max(hidden // heads, 1))
    theta = fields.number(KEY + "rope.freq_base", 1.0, MAX_THETA, default=10000.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary.size,
        "hidden_size": hidden,
        "intermediate_size": fields.integer(KEY + "feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": fields.integer(KEY + "block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(KEY + "attention.head_count_kv", 1, MAX_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer(KEY + "context_length", 1, MAX_POSITIONS),
        # stored as float32: 1e-5 reads 9.999999747378752e-06
        "rms_norm_eps": float(
            f"{fields.number(KEY + 'attention.layer_norm_rms_epsilon', 0.0, 0.1):.7g}"
        ),
        "rope_theta": theta,
        "tie_word_embeddings": OUTER["lm_head.weight"] not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "torch_dtype": dtype,
    }
    for name, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if fields.integer(KEY + name, 1, hidden, head_dim) != value:
            fields.unsupported(KEY + name, fields.data[KEY + name], f"{value}, as key_length")
    scaling = _scaling(file, fields, theta, head_dim)
    if scaling:
        config["rope_scaling"] = scaling
    return config, ModelConfig.from_dict(config, str(file.path))


def require_llama(fields: Fields) -> None:
    """Raise UnsupportedCheckpoint unless the file is a plain Llama."""
    architecture = fields.text("general.architecture", "")
    if architecture != "llama":
        fields.unsupported("general.architecture", architecture or None, "llama")
    for name in ("expert_count", "attention.sliding_window"):
        value = fields.data.get(KEY + name, 0)
        if value != 0:
            fields.unsupported(KEY + name, value, "0 or nothing")


def _scaling(file: GGUF, fields: Fields, theta: float, head_dim: int) -> dict[str, Any] | None:
    """rope_scaling of config.json; None where the rope is not scaled."""
    kind = fields.text(KEY + "rope.scaling.type", "none")
    if kind == "linear" and FACTORS not in file.tensors:
        factor = fields.number(KEY + "rope.scaling.factor", 1.0, 1e6, closed=True)
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        fields.unsupported(KEY + "rope.scaling.type", kind, "none or linear")
    return _llama3(file, theta, head_dim) if FACTORS in file.tensors else None


def _llama3(file: GGUF, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling whose factors are the stored ones; any others are refused."""
    stored = file.tensors[FACTORS]
    if stored.kind != "F32" or stored.shape != (head_dim // 2,):
        raise BadCheckpoint(
            f"{file.path}: tensor {FACTORS}: found {stored.kind} {list(stored.shape)}, "
            f"expected F32 [{head_dim // 2}]"
        )
    found = memoryview(file.raw(stored)).cast("f").tolist()
    factor = max(found)
    low, high, original = LLAMA3.values()
    expected = []
    for number in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * number / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / factor + smooth) if factor > 0 else math.nan)
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected)):
        raise UnsupportedCheckpoint(
            f"{file.path}: tensor {FACTORS}: found factors up to {factor:g} that are not those of "
            f"Llama 3.1 to 3.3 (low 1, high 4, original length {original}; not supported)"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def stored_name(name: str) -> str:
    """GGUF's name of a tensor of Hugging Face's Llama."""
    if name in OUTER:
        return OUTER[name]
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{INNER[part.removesuffix('.weight')]}.weight"


def wanted_tensors(file: GGUF, config: ModelConfig) -> list[Wanted]:
    """Every tensor of the folder, in file order; what the file has beyond them is refused.

    Raises BadCheckpoint for a missing tensor or another shape, UnsupportedCheckpoint for a tensor
    that a plain Llama does not have (a bias, an expert).
    """
    found = []
    for name, shape in (part for target in targets(config) for part in target.parts):
        stored = file.tensors.get(stored_name(name))
        if stored is None or stored.shape != shape:
            what = "nothing" if stored is None else f"shape {list(stored.shape)}"
            raise BadCheckpoint(
                f"{file.path}: tensor {stored_name(name)}: found {what}, expected {list(shape)}"
            )
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        found.append(Wanted(name, stored, heads.get(name.split(".")[-2], 0)))
    extra = file.tensors.keys() - {wanted.stored.name for wanted in found} - {FACTORS}
    if extra:
        raise UnsupportedCheckpoint(
            f"{file.path}: tensor {shown(min(extra))}: found, but a plain Llama has none "
            "(not supported)"
        )
    return found
