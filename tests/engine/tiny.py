"""Tiny random models for the engine's tests: a config, weights under their Hugging Face names, an
LLM over them.
"""

import torch

from engine.llm import LLM
from engine.model.config import ModelConfig
from engine.model.llama import targets


def tiny_config(
    layers=6, heads=4, kv_heads=2, hidden=64, head_dim=None, vocab=97, max_positions=4096, **changes
):
    """A ModelConfig of a few thousand weights, float32."""
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    return ModelConfig.from_dict({**data, **changes})


def tiny_weights(config, seed=0, sharpness=1.5):
    """{Hugging Face name: float32 tensor}: activations and norms near one, q and k scaled so that
    attention is peaky.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for target in targets(config):
        for name, shape in target.parts:
            noise = torch.randn(shape, generator=generator)
            if len(shape) == 1:
                found[name] = (1.0 if "norm" in name else 0.0) + 0.1 * noise
                continue
            scale = 1.0 if "embed" in name else shape[1] ** -0.5
            found[name] = (
                noise
                * scale
                * (sharpness if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0)
            )
    return found


def stream_of(weights):
    """The loader's stream over such a dict: (target name, fused tensor)."""

    def stream(config, dtype, device):
        for target in targets(config):
            yield (
                target.name,
                torch.cat([weights[name] for name, _ in target.parts]).to(device, dtype),
            )

    return stream


def tiny_llm(config, weights, method, **settings):
    """An LLM over these weights on the CPU, by default on the reference launchers."""
    settings = {"device": "cpu", "backend": "reference", **settings}
    return LLM.from_stream(config, stream_of(weights), method=method, **settings)


def random_ids(count, vocab=97, seed=0):
    """`count` token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
