"""A bank of 8 bits under a cap on attention scores and under sinks (Gemma 2, gpt-oss): whole
sessions against a bank of floats that were rounded the same way (the kernels:
tests/kernels/test_int8_softmax.py).

Stops: a packed path of a prompt, of a window or of an offloaded layer that forgets cap or sinks.
"""

import pytest
import torch

from engine import Full, OmniKV
from tests.builders import tiny_config, tiny_llm
from tests.engine.bank.test_packed_banks import course, simulated  # noqa: F401 (a fixture)

SPARSE = OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=0)
SIZES = dict(layers=4, heads=4, kv_heads=2, head_dim=16, sliding_window=40)
GEMMA2 = dict(
    architectures=["Gemma2ForCausalLM"],
    model_type="gemma2",
    hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=3.0,
    query_pre_attn_scalar=16,
)
OSS = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    num_local_experts=3,
    num_experts_per_tok=2,
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
)


@pytest.fixture
def packed():
    """What `simulated` rounds as."""
    return "int8"


@pytest.mark.parametrize("method, offload", [(Full(), "device"), (SPARSE, "host")])
@pytest.mark.parametrize("family", [GEMMA2, OSS], ids=["gemma2", "gpt-oss"])
def test_sessions(simulated, monkeypatch, family, method, offload):  # noqa: F811
    config = tiny_config(**SIZES, **family)
    assert config.block.sinks or config.block.score_cap
    settings = dict(config=config, offload=offload, max_context=512, backend="reference")
    want, _ = course(tiny_llm(method, **settings))
    monkeypatch.undo()
    found, _ = course(tiny_llm(method, bank="int8", **settings))
    # windows are read by tiles, whose sums of packed rows are rounded once more
    assert torch.allclose(found, want, atol=1e-5)
    assert (course(tiny_llm(method, **settings))[0] - want).abs().max() > 1e-3
