"""A random model in a folder whose attention is peaky, so that selections differ from rank to
rank.
"""

import json
from pathlib import Path

import torch

from tests import tiny_model

CONFIG = dict(
    tiny_model.CONFIG,
    num_hidden_layers=7,
    hidden_size=48,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=2048,
    vocab_size=97,
)
SETTINGS = dict(max_context=512, chunk=64, dtype="float32", device="cpu", threads=1)


def model_folder(path: Path, **changes) -> Path:
    """Write it. changes: to its configuration."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = {**CONFIG, **changes}
    weights = tiny_model.tensors(config)
    peaky = {
        name: weight * (3 if "q_proj" in name or "k_proj" in name else 1)
        for name, weight in weights.items()
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: w.contiguous() for name, w in peaky.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def ids_of(count, seed=5):
    """Token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()
