"""The shipped model as a folder in Hugging Face layout: written while it trains, read to go on."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.common.program import replace_json
from tools.studies.pocket.model import Pocket, Shape

# attribute of Pocket: name of a layer's tensor
NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def config_json(s: Shape) -> dict:
    """The model's config.json, a plain LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "max_position_embeddings": s.positions,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
    }


@torch.no_grad()
def load(folder: Path) -> Pocket:
    """A folder that export wrote (or another tied Llama without biases), ready to train."""
    from safetensors.torch import load_file

    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        c["vocab_size"],
        c["hidden_size"],
        c["intermediate_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["rope_theta"],
        c["rms_norm_eps"],
        c["max_position_embeddings"],
    )
    model, tensors = Pocket(shape), load_file(folder / "model.safetensors")
    model.embed.copy_(tensors["model.embed_tokens.weight"])
    model.norm.copy_(tensors["model.norm.weight"])
    for short, long in NAMES.items():
        for layer in range(shape.layers):
            getattr(model, short)[layer].copy_(tensors[f"model.layers.{layer}.{long}.weight"])
    return model


def export(model: Pocket, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16, Hugging Face
    names), each beside its place and renamed.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
    }
    for short, long in NAMES.items():
        for layer in range(model.shape.layers):
            stored[f"model.layers.{layer}.{long}.weight"] = getattr(model, short)[layer]
    tensors = {
        name: tensor.detach().bfloat16().contiguous().clone() for name, tensor in stored.items()
    }
    save_file(tensors, str(folder / "model.safetensors.part"), metadata={"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")
    generation = {
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    for name, data in (
        ("config.json", config_json(model.shape)),
        ("generation_config.json", generation),
    ):
        replace_json(folder / name, data)
