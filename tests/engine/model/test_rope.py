"""engine/model/rope.py against transformers' own rotary embedding, for every kind, at the lengths
where each kind changes.
"""

import pytest
import torch

from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary, apply_rope, inv_freq

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS = {
    "default": ({}, 4096, 10000.0),
    "default-262k": ({}, 262144, 283461213.0),
    "default-int-theta": ({}, 200000, 5000000),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 16384, 10000.0),
    "linear-fraction": ({"rope_type": "linear", "factor": 1.7}, 16384, 10000.0),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 512, 10000.0),
    "dynamic-fraction": ({"rope_type": "dynamic", "factor": 1.1}, 300, 500000.0),
    "llama3": (LLAMA3, 131072, 500000.0),
    "llama3.2": ({**LLAMA3, "factor": 32.0}, 131072, 500000.0),
    "yarn": (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
        65536,
        10000.0,
    ),
    "yarn-no-truncate": (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        32768,
        150000.0,
    ),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        163840,
        10000.0,
    ),
    "yarn-one-mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
        },
        16384,
        10000.0,
    ),
    "yarn-betas": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 64,
            "beta_slow": 2,
            "attention_factor": 1.25,
        },
        16384,
        1000000.0,
    ),
    "yarn-tiny-original": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
        16,
        10000.0,
    ),
}


def both(name, head_dim=64):
    """(our config, transformers' rotary embedding) of one kind."""
    rope, max_positions, theta = KINDS[name]
    shape = {**SHAPE, "head_dim": head_dim, "max_position_embeddings": max_positions}
    ours = ModelConfig.from_dict({**shape, "rope_theta": theta, "rope_scaling": dict(rope) or None})
    parameters = {"rope_type": "default", **rope, "rope_theta": theta}
    newer = ModelConfig.from_dict({**shape, "rope_parameters": dict(parameters)})
    assert newer.rope == ours.rope
    return ours, LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, rope_parameters=parameters))


def row(table, p):
    cos, sin = table.at(torch.tensor(p))
    return cos, sin


def theirs_at(embedding, positions):
    cos, sin = embedding(torch.zeros(1), torch.tensor(positions)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_are_bitwise_those_of_transformers(name, head_dim):
    ours, theirs = both(name, head_dim)
    found = inv_freq(ours.rope, head_dim)
    assert found.dtype == torch.float32 and found.shape == (head_dim // 2,)
    assert torch.equal(found, theirs.original_inv_freq)
    assert ours.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("total", [1, 2, 299, 300, 511, 512, 513, 1000, 5000])
@pytest.mark.parametrize("name", KINDS)
def test_prefill_rows(name, total):
    ours, theirs = both(name)
    table = Rotary(ours)
    for start, stop in {(0, total), (total // 3, total), (total - 1, total), (total, total)}:
        cos, sin = table.at(torch.arange(start, stop), total)
        expected = theirs_at(theirs, list(range(total)))
        for found, wanted in zip((cos, sin), expected, strict=True):
            assert found.shape == (stop - start, 32) and found.dtype == torch.float32
            torch.testing.assert_close(found, wanted[start:stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["default-262k", "llama3", "yarn"])
def test_far_positions(name):
    """At 200000 a frequency wrong in its last bit shows: the tolerance is that of cos itself."""
    ours, theirs = both(name)
    table = Rotary(ours)
    for p in (65535, 131072, 200000):
        cos, sin = theirs_at(theirs, [p])
        torch.testing.assert_close(row(table, p)[0], cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(row(table, p)[1], sin[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "dynamic-fraction", "yarn", "llama3"])
def test_decode_rows_follow_the_growing_sequence(name):
    """transformers recomputes dynamic frequencies at every step; the table must hold the same rows
    beforehand.

    The table's powers are vectorised and may differ from scalar ones in the last bit: 2**-23 of an
    angle of p rad at most.
    """
    ours, theirs = both(name)
    table = Rotary(ours)
    theirs_at(theirs, list(range(290)))
    for p in range(290, 1030, 1 if "dynamic" in name else 97):
        cos, sin = theirs_at(theirs, [p])
        torch.testing.assert_close(row(table, p)[0], cos[0], rtol=0, atol=2e-6 + p * 2**-22)
        torch.testing.assert_close(row(table, p)[1], sin[0], rtol=0, atol=2e-6 + p * 2**-22)


def test_dynamic_depends_on_the_whole_prompt_only_beyond_the_maximum():
    ours, _ = both("dynamic")
    table = Rotary(ours)
    assert torch.equal(table.at(torch.arange(0, 10), 10)[1], table.at(torch.arange(0, 10), 512)[1])
    assert not torch.allclose(
        table.at(torch.arange(0, 10), 512)[1], table.at(torch.arange(0, 10), 1500)[1]
    )
    assert torch.equal(
        table.at(torch.arange(0, 1500), 1500)[1][700:], table.at(torch.arange(700, 1500), 1500)[1]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 1)])
def test_rotation(dtype, lead):
    ours, _ = both("yarn")
    cos, sin = Rotary(ours).at(torch.arange(7, 50), 50)
    torch.manual_seed(0)
    x = torch.randn(*lead, 43, 5, 64).to(dtype)
    kept = x.clone()
    found = apply_rope(x, cos, sin)
    double = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    wanted, _ = apply_rotary_pos_emb(x.float(), x.float(), *double, unsqueeze_dim=-2)
    assert found.dtype == dtype and torch.equal(x, kept)
    torch.testing.assert_close(
        found, wanted.to(dtype), rtol=0, atol=1e-6 if dtype == torch.float32 else 0
    )


def test_rotation_per_sequence():
    """cos and sin may carry a batch dimension of their own: decode reads different positions per
    sequence.
    """
    table = Rotary(both("default")[0])
    x = torch.randn(3, 1, 4, 64)
    at = torch.tensor([[5], [0], [63]])
    found = apply_rope(x, *table.at(at))
    for b in range(3):
        assert torch.equal(found[b], apply_rope(x[b], *table.at(at[b])))


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_rotate_by_gives_the_rows_of_the_shifted_positions(name):
    """Yarn's attention factor is in the rows already: it must not be applied twice."""
    table = Rotary(both(name)[0])
    x, at = torch.randn(5, 2, 64), torch.tensor([0, 7, 300, 301, 900])
    by = torch.tensor([5, -7, 100, -301, 0])
    found = table.rotate_by(apply_rope(x, *table.at(at)), by)
    torch.testing.assert_close(found, apply_rope(x, *table.at(at + by)), rtol=0, atol=5e-4)


def test_rotate_by_refuses_dynamic_rope():
    with pytest.raises(ValueError, match="rotate_by: dynamic rope"):
        Rotary(both("dynamic")[0]).rotate_by(torch.zeros(1, 1, 64), torch.ones(1))
