"""What a GGUF file says of its model: config.json's fields, and where each tensor lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.load.gguf import hybrids
from engine.load.gguf.vocabulary import Vocabulary
from engine.model.config.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from engine.model.config.fields import Fields
from engine.model.config.rope_config import MAX_POSITIONS, MAX_THETA
from engine.model.share.divide import whole_of
from engine.model.tensors import targets
from weights.gguf.checkpoint import ONE_MORE, GGUFCheckpoint, Place
from weights.gguf.header import GGUF


@dataclass(frozen=True)
class Architecture:
    """name: Hugging Face's. interleaved: rows of q and k are. recurrent: some layers are, and their
    value heads lie "tiled" or "grouped" (engine/load/gguf/hybrids.py); "": none. experts: whether
    it is a mixture.
    """

    name: str
    interleaved: bool = False
    recurrent: str = ""
    experts: bool = False


# by general.architecture
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen35": Architecture("Qwen3_5ForCausalLM", recurrent="tiled"),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", recurrent="tiled", experts=True),
    "qwen3next": Architecture("Qwen3NextForCausalLM", recurrent="grouped", experts=True),
}
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3: the file has the factors but not the numbers that they come from
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


def read_config(
    file: GGUF, vocabulary: Vocabulary, dtype: str, rope: str | None = None
) -> tuple[dict[str, Any], ModelConfig]:
    """config.json of a file, and the same checked as the engine checks any. rope: an override, as
    ModelConfig.from_dict takes it.

    Raises UnsupportedCheckpoint for another architecture, experts, a sliding window or a rope that
    is not read from such files, BadCheckpoint for a field that is missing or senseless.
    """
    fields = Fields(file.keys, str(file.path))
    name = architecture(fields)
    kind, key = ARCHITECTURES[name], name + "."
    heads = fields.integer(key + "attention.head_count", 1, MAX_HEADS)
    hidden = fields.integer(key + "embedding_length", 1, MAX_WIDTH)
    head_dim = fields.integer(key + "attention.key_length", 1, hidden, max(hidden // heads, 1))
    theta = fields.number(key + "rope.freq_base", 1.0, MAX_THETA, default=10000.0)
    config = {
        "architectures": [kind.name],
        "model_type": "" if kind.recurrent else name,
        "vocab_size": vocabulary.size,
        "hidden_size": hidden,
        "intermediate_size": fields.integer(
            key + "feed_forward_length", 1, MAX_WIDTH, *((None,) if kind.experts else ())
        ),
        "num_hidden_layers": fields.integer(key + "block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(key + "attention.head_count_kv", 1, MAX_HEADS, heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer(key + "context_length", 1, MAX_POSITIONS),
        # stored as float32: 1e-5 reads 9.999999747378752e-06
        "rms_norm_eps": float(
            f"{fields.number(key + 'attention.layer_norm_rms_epsilon', 0.0, 0.1):.7g}"
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
    whole = ("attention.value_length", "rope.dimension_count")
    for part in whole[:1] if kind.recurrent else whole:
        if fields.integer(key + part, 1, MAX_HEAD_DIM, head_dim) != head_dim:
            fields.unsupported(key + part, fields.data[key + part], f"{head_dim}, as key_length")
    scaling = _scaling(file, fields, key, theta, head_dim)
    if scaling:
        config["rope_scaling"] = scaling
    if kind.recurrent:
        config |= hybrids.sizes(fields, key, head_dim)
    parsed = ModelConfig.from_dict(config, str(file.path), rope=rope)
    return config, hybrids.apart(parsed) if parsed.recurrent else parsed


def architecture(fields: Fields, known: tuple[str, ...] = tuple(ARCHITECTURES)) -> str:
    """The architecture of a file. Raises UnsupportedCheckpoint for one that is not `known`, for
    experts where it has none, and for a sliding window.
    """
    name = fields.text("general.architecture", "")
    if name not in known:
        fields.unsupported("general.architecture", name or None, " or ".join(known))
    experts = () if ARCHITECTURES[name].experts else ("expert_count",)
    for part in (*experts, "attention.sliding_window"):
        value = fields.data.get(f"{name}.{part}", 0)
        if value != 0:
            fields.unsupported(f"{name}.{part}", value, "0 or nothing")
    return name


def _scaling(
    file: GGUF, fields: Fields, key: str, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """rope_scaling of config.json; None where the rope is not scaled."""
    kind = fields.text(key + "rope.scaling.type", "none")
    if kind == "linear" and FACTORS not in file.tensors:
        factor = fields.number(key + "rope.scaling.factor", 1.0, 1e6, closed=True)
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        fields.unsupported(key + "rope.scaling.type", kind, "none or linear")
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
    """GGUF's name of a tensor of Hugging Face's."""
    if name in OUTER:
        return OUTER[name]
    number, _, part = name.removeprefix("model.layers.").partition(".")
    part, _, kind = part.rpartition(".")
    return f"blk.{number}.{INNER[part]}.{kind}"


def checkpoint(file: GGUF, config: ModelConfig) -> GGUFCheckpoint:
    """The tensors of a file, found complete: raises as GGUFCheckpoint.require."""
    wanted, config = targets(config), whole_of(config)
    architecture = ARCHITECTURES[file.keys["general.architecture"]]
    places = {
        name: _place(file, config, architecture, name)
        for target in wanted
        for name, _ in target.parts
    }
    found = GGUFCheckpoint(file, places, config.family, (FACTORS,))
    if architecture.recurrent:
        found.require(wanted, partial(hybrids.unread, config))
    else:
        found.require(wanted)
    return found


def _place(file: GGUF, config: ModelConfig, kind: Architecture, name: str) -> Place:
    """Where a tensor of Hugging Face's name lies."""
    if kind.recurrent:
        if name == "model.norm.weight":
            return Place(OUTER[name], value=ONE_MORE)
        number, _, part = name.removeprefix("model.layers.").partition(".")
        part, _, last = part.rpartition(".")
        tiled = kind.recurrent == "tiled"
        if name not in OUTER:
            found = hybrids.place(file, config, tiled, number, part or last, last)
            if found is not None:
                return found
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if kind.interleaved else {}
    return Place(stored_name(name), heads.get(name.split(".")[-2], 0))
