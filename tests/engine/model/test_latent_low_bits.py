"""Latent attention with weights in few bits: rounded on the way, and checkpoints that come so,
also those of hybrids, whose parts are rows of stored tensors too.

Stops: the queries' second product left as floats, a head's rows of kv_b_proj taken with another
head's scales, bytes that the plan counts otherwise than they are held.
"""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from engine import LLM, Full, OmniKV
from engine.model.low_bits import OnTheWay
from engine.model.tensors import random_stream, targets
from kernels.quant.linear import QuantisedLinear
from kernels.quant.matrix import Quantised
from tests.builders import HYBRIDS, hybrid_config, latent_config, random_ids
from tests.weights.quantised_files import FORMATS

# rows of 32 and 64: groups of 32 divide them; no layer is a mixture, so no rounding turns a choice
WIDE = dict(hidden_size=64, q_lora_rank=32, intermediate_size=96)
SETTINGS = dict(device="cpu", max_context=256, chunk=64)
SPARSE = OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=0)


def config():
    return latent_config(4, **WIDE)


def logits(llm):
    with llm.session() as session:
        found = [session.prefill(random_ids(150)).clone()]
        return torch.stack([*found, *(session.decode(t).clone() for t in (7, 8))])


def meant(word):
    """The same model with the floats that its few bits stand for."""

    def stream(*args):
        weights = random_stream(*args, seed=5)
        for target, weight in OnTheWay.of(word, config()).stream(weights, tied=False):
            yield target, weight.dense(torch.float32) if isinstance(weight, Quantised) else weight

    return LLM.from_stream(config(), stream, method=Full(), **SETTINGS)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_all_but_the_heads_matrices_are_held_in_few_bits(word):
    stream = partial(random_stream, seed=5)
    found, whole = (
        LLM.from_stream(config(), stream, weights=w, method=Full(), **SETTINGS)
        for w in (word, "float")
    )
    assert found.model.nbytes == found.plan().bytes_of("weights") < 0.8 * whole.model.nbytes
    for layer in found.model.layers:
        assert layer.latent.query is not None
        for matrix in layer.matrices:
            assert isinstance(matrix, QuantisedLinear) and matrix.kind == word
        # a step multiplies them head by head, which no product of few bits does
        assert layer.latent.key.dtype == layer.latent.value.dtype == torch.float32
    wanted, said = logits(meant(word)), logits(found)
    assert float((said - wanted).norm() / wanted.norm()) < 1e-3
    assert float((said - logits(whole)).norm() / wanted.norm()) > 1e-3


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_sparse_steps_over_few_bits_are_sparse(word):
    stream = partial(random_stream, seed=5)
    llm = LLM.from_stream(config(), stream, weights=word, method=SPARSE, **SETTINGS)
    with llm.session() as session:
        session.prefill(random_ids(180))
        for token in random_ids(12, seed=1):
            assert torch.isfinite(session.decode(token)).all()
        assert session.stats.sparse_steps == 12


def fields(model):
    """config.json of a model, but for what its family alone has."""
    return dict(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        max_position_embeddings=model.max_positions,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope.theta,
        torch_dtype="float32",
    )


def latent_fields(model):
    sizes = model.latent
    return fields(model) | dict(
        architectures=["DeepseekV2ForCausalLM"],
        kv_lora_rank=sizes.rank,
        q_lora_rank=sizes.query_rank,
        qk_rope_head_dim=sizes.turned,
        qk_nope_head_dim=sizes.plain,
        v_head_dim=sizes.value,
        first_k_dense_replace=model.num_layers,
    )


def written(folder, name, model, fields):
    """Write a model in a format of FORMATS, and one of the floats that it means; two folders."""
    few, floats = {}, {}
    settings, pack = FORMATS[name]
    shapes = dict(part for target in targets(model) for part in target.stored)
    generator = torch.Generator().manual_seed(3)
    for number, (key, shape) in enumerate(shapes.items()):
        base, weight = key.removesuffix(".weight"), torch.randn(shape, generator=generator)
        weight = 1 + 0.1 * weight if len(shape) == 1 else weight * shape[1] ** -0.5
        floats[key] = weight
        if weight.dim() == 2 and "proj" in base:
            parts, floats[key] = pack(weight, number)
            few |= {base + suffix: tensor for suffix, tensor in parts.items()}
        else:
            few[key] = weight
    for part, tensors, more in (
        ("few", few, {"quantization_config": settings}),
        ("floats", floats, {}),
    ):
        (folder / part).mkdir()
        kept = {key: value.contiguous() for key, value in tensors.items()}
        save_file(kept, folder / part / "model.safetensors")
        (folder / part / "config.json").write_text(json.dumps(fields | more))
    return folder / "few", folder / "floats"


@pytest.mark.parametrize("name", ["deepseek", "deepseek, ragged", "w8a8"])
def test_a_checkpoint_that_comes_quantised_says_what_its_floats_say(tmp_path, name):
    """kv_a_proj_with_mqa and kv_b_proj are read in parts, each row with its scales. The reference
    multiplies what is stored; a CPU holds blocks of FP8 as int8.
    """
    pair = written(tmp_path, name, config(), latent_fields(config()))
    for backend, tolerance in (("reference", 2e-5), ("auto", 0.05)):
        given = dict(method=Full(), dtype="float32", backend=backend, **SETTINGS)
        few, floats = (LLM(part, **given) for part in pair)
        assert few.model.nbytes == few.plan().bytes_of("weights") < floats.model.nbytes
        assert isinstance(few.model.layers[0].latent.query, QuantisedLinear)
        wanted = logits(floats)
        assert float((logits(few) - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("name", ["deepseek", "w8a8"])
def test_so_does_one_with_recurrent_layers_and_gates(tmp_path, name):
    """q_proj holds a head's query and its gate by turns."""
    model = hybrid_config(4, hidden_size=64)
    own = dict(head_dim=model.head_dim, num_key_value_heads=model.num_kv_heads)
    architecture, more = HYBRIDS["qwen3.5"]
    given = fields(model) | own | more | {"architectures": [architecture]}
    few, floats = (
        LLM(part, method=Full(), dtype="float32", backend="reference", **SETTINGS)
        for part in written(tmp_path, name, model, given)
    )
    assert few.config.recurrent_layers == (0, 1, 2)
    assert few.model.nbytes == few.plan().bytes_of("weights") < floats.model.nbytes
    assert isinstance(few.model.layers[3].gate, QuantisedLinear)
    wanted = logits(floats)
    assert float((logits(few) - wanted).norm() / wanted.norm()) < 2e-5
