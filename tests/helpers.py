"""Helpers that several test files share."""

import json
from pathlib import Path

import pytest

SHARED_MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"


def shared_model(name: str) -> Path:
    """The folder of a development checkpoint beside the project, or a skip where there is none."""
    folder = SHARED_MODELS / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs the development checkpoint {folder}")
    return folder


def word_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer.json of `size` words "w0" .. in a model folder; id 1 begins, id 2 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def tiny_config(**changes):
    """A ModelConfig of a few thousand weights: 8 layers, 4 heads on 2 K/V heads of 16, vocabulary
    96.
    """
    from engine.model.config import ModelConfig

    fields = dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=96,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_theta=1e4,
        hidden_act="silu",
        torch_dtype="float32",
    )
    return ModelConfig.from_dict(fields | changes)


def tiny_llm(method=None, seed=0, sharpness=2.5, config=None, **settings):
    """An LLM with random weights whose attention is peaky, on the CPU."""
    from functools import partial

    from engine import LLM
    from engine.model.llama import random_stream

    settings = dict(max_context=2048, chunk=64) | settings
    stream = partial(random_stream, seed=seed, sharpness=sharpness)
    return LLM.from_stream(config or tiny_config(), stream, device="cpu", method=method, **settings)


def random_ids(count, vocab=96, seed=0):
    """Token ids for tests."""
    import torch

    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
