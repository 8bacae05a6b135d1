"""Weights of hybrids in few bits: every large matrix is held so, the plan counts the bytes, and the
answer stays near.

Stops: a projection of a recurrent layer left as floats, a gate or a shared expert that the plan
counts otherwise than it is held.
"""

from functools import partial

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import SettingError
from engine.model.low_bits import OnTheWay
from engine.model.tensors import random_stream
from kernels.quant.linear import QuantisedLinear
from kernels.quant.matrix import Quantised
from tests.builders import hybrid_config, random_ids
from tests.no_compiler import no_compiler

# rows of 64: groups of 32 divide them
WIDE = dict(hidden_size=64, intermediate_size=96, linear_key_head_dim=16, linear_value_head_dim=32)
MIXED = dict(
    num_experts=3,
    num_experts_per_tok=3,  # all of them: a rounding turns no token to others
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
)
TOLERANCE = 1e-3
FAMILIES = {
    "qwen3.5": {},
    "qwen3.5-moe": dict(
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", **MIXED
    ),
    "qwen3-next": dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", **MIXED),
}


def model(name, word, method=None, **changes):
    config = hybrid_config(**{**WIDE, **FAMILIES[name], **changes})
    stream = partial(random_stream, seed=5)
    settings = dict(device="cpu", max_context=256, chunk=64, method=method or Full())
    return LLM.from_stream(config, stream, weights=word, **settings)


def meant(name, word, **changes):
    """The same model with the floats that its few bits stand for."""
    config = hybrid_config(**{**WIDE, **FAMILIES[name], **changes})

    def stream(*args):
        weights = random_stream(*args, seed=5)
        for target, weight in OnTheWay.of(word, config).stream(weights, tied=False):
            yield target, weight.dense(torch.float32) if isinstance(weight, Quantised) else weight

    settings = dict(device="cpu", max_context=256, chunk=64, method=Full())
    return LLM.from_stream(config, stream, **settings)


def logits(llm):
    with llm.session() as session:
        found = [session.prefill(random_ids(120)).flatten().clone()]
        return torch.stack([*found, *(session.decode(t).flatten().clone() for t in (7, 8))])


def matrices(llm):
    layers = llm.model.layers
    assert layers[0].mixer is not None and layers[3].gate is not None
    return [matrix for layer in layers for matrix in layer.matrices]


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_is_held_in_few_bits_and_the_answer_stays(name, word):
    whole, rounded = model(name, "auto"), model(name, word)
    assert rounded.model.nbytes == rounded.plan().bytes_of("weights")
    assert rounded.model.nbytes < 0.75 * whole.model.nbytes
    for matrix in matrices(rounded):
        assert isinstance(matrix, QuantisedLinear) and matrix.kind == word
    assert rounded.model.lm_head.kind == "int8"
    # what decides how a state decays stays as it was
    assert torch.equal(rounded.model.layers[0].mixer.rates, whole.model.layers[0].mixer.rates)
    expected, found = logits(meant(name, word)), logits(rounded)
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE
    assert float((found - logits(whole)).norm() / expected.norm()) > TOLERANCE


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_without_a_compiler_torchs_products_run(word):
    with no_compiler():
        expected = logits(meant("qwen3-next", word))
        alone = model("qwen3-next", word)
        assert alone.model.nbytes == alone.plan().bytes_of("weights")
        found = logits(alone)
    assert float((found - expected).norm() / expected.norm()) < 0.03  # products of bfloat16


def test_sparse_steps_over_few_bits_are_sparse():
    method = OmniKV(filter_layers=(3,), tokens=24, tail=64, dense_below=0)
    llm = model("qwen3.5-moe", "int4", method)
    with llm.session() as session:
        session.prefill(random_ids(200))
        for token in random_ids(20, seed=1):
            assert torch.isfinite(session.decode(token)).all()
        assert session.stats.sparse_steps == 20
        length = len(session)
        expected = session.last_logits.clone()
        session.truncate(length - 12)
        for token in random_ids(20, seed=1)[8:]:
            found = session.decode(token)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_groups_that_divide_no_rows_are_refused():
    with pytest.raises(SettingError, match="rows of 12 are no multiple of its groups of 32"):
        model("qwen3.5", "int4", linear_key_head_dim=8, linear_value_head_dim=3)
