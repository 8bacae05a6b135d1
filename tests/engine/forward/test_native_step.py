"""A session whose steps run on the C++ kernels, against the same on torch's operators: the same
tokens in float32, logits within rounding. Which models they serve.
"""

import pytest
import torch

from engine import Full, OmniKV, SamplingParams
from engine.forward.layer import TorchLayer
from engine.forward.native_layer import NativeLayer
from engine.methods.exact import Exact
from kernels.native.library import missing
from tests.builders import hybrid_config, random_ids, session_config, tiny_llm

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True)
PHI3 = dict(architectures=["Phi3ForCausalLM"], model_type="phi3", partial_rotary_factor=0.5)
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=40)
GRANITE = dict(
    architectures=["GraniteForCausalLM"],
    model_type="granite",
    residual_multiplier=0.5,
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    logits_scaling=4.0,
)
OLMO2 = dict(architectures=["Olmo2ForCausalLM"], model_type="olmo2")
GEMMA2 = dict(
    architectures=["Gemma2ForCausalLM"],
    model_type="gemma2",
    attn_logit_softcapping=20.0,
    sliding_window=40,
    hidden_activation="gelu_pytorch_tanh",
)
GEMMA3 = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    sliding_window=40,
    sliding_window_pattern=2,
    hidden_activation="gelu_pytorch_tanh",
)
MIXTURE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    num_local_experts=6,
    num_experts_per_tok=3,
    sliding_window=40,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
CASES = {
    "full": (Full(), {}, {}),
    "sparse": (SPARSE, {}, {}),
    "sparse, host": (SPARSE, {}, {"offload": "host"}),
    "exact": (Exact(SPARSE), {}, {}),
    "int8 rows": (SPARSE, {}, {"bank": "int8"}),
    "biases, a tied head": (SPARSE, QWEN2, {}),
    "norms of heads": (SPARSE, QWEN3, {}),
    "norms of heads, int8 rows": (SPARSE, QWEN3, {"bank": "int8"}),
    "a part rotates": (SPARSE, PHI3, {}),
    "windows": (Full(), MISTRAL, {}),
    "factors": (SPARSE, GRANITE, {}),
    "norms after, of all heads": (SPARSE, OLMO2, {}),
    "norms after, int8 rows": (SPARSE, OLMO2, {"bank": "int8"}),
    "norms on both sides, GELU, caps": (Full(), GEMMA2, {}),
    "norms of heads that add one": (Full(), GEMMA3, {}),
    "experts": (SPARSE, MIXTURE, {}),
    "experts with biases, sinks": (Full(), GPT_OSS, {}),
}
FAMILIES = [GRANITE, OLMO2, GEMMA2, GEMMA3, MIXTURE, GPT_OSS]


@pytest.mark.parametrize("case", CASES)
def test_a_session_says_what_it_says_on_torchs_operators(case):
    """Greedy answers, and logits of a step that follows them."""
    method, fields, settings = CASES[case]
    llm = tiny_llm(method, session_config(**fields), **settings)
    session = llm.session()
    assert type(session.runner.halves) is NativeLayer and not session.runner.fused
    session.prefill(random_ids(90))
    told, twin = [], session.fork()
    twin.set_backend("cpu")
    assert type(twin.runner.halves) is TorchLayer
    for one in (session, twin):
        pieces = one.generate([], SamplingParams(max_tokens=24, ignore_eos=True))
        told.append([piece.token_id for piece in pieces])
    assert told[0] == told[1] and len(told[0]) == 24
    if method is SPARSE:
        assert session.selections and session.stats.sparse_steps
    torch.testing.assert_close(session.decode(7), twin.decode(7), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bank", ["auto", "int8"])
def test_gates_wide_norms_and_recurrent_layers_say_what_they_say_on_torchs_operators(dtype, bank):
    """In bfloat16 to a share of the largest logit: both round, at other places of long sums."""
    method = OmniKV(filter_layers=(3,), tokens=24, dense_below=0)
    llm = tiny_llm(method, hybrid_config(), dtype=dtype, bank=bank)
    session = llm.session()
    assert type(session.runner.halves) is NativeLayer
    session.prefill(random_ids(90))
    twin = session.fork()
    twin.set_backend("cpu")
    assert type(twin.runner.halves) is TorchLayer
    found, wanted = session.decode(7), twin.decode(7)
    assert session.selections and session.stats.sparse_steps
    limit = (2e-4 if dtype == "float32" else 3e-2) * wanted.abs().max()
    assert (found - wanted).abs().max() <= limit


@pytest.mark.parametrize("fields", FAMILIES, ids=lambda fields: fields["model_type"])
def test_families_say_in_16_bits_what_they_say_on_torchs_operators(fields):
    """To a share of the largest logit: both round, at other places of long sums."""
    if "num_experts_per_tok" in fields:  # all of them: scores that nearly tie choose either way
        fields = {**fields, "num_experts_per_tok": 6}
    llm = tiny_llm(Full(), session_config(**fields), dtype="bfloat16")
    session = llm.session()
    assert type(session.runner.halves) is NativeLayer
    session.prefill(random_ids(90))
    twin = session.fork()
    twin.set_backend("cpu")
    assert type(twin.runner.halves) is TorchLayer
    for token in (7, 8, 9):
        found, wanted = session.decode(token), twin.decode(token)
        assert (found - wanted).abs().max() <= 5e-2 * wanted.abs().max()


def test_sessions_of_a_batch_say_what_they_say_alone():
    llm = tiny_llm(SPARSE, max_context=256)
    batch, alone, steps = llm.batch(slots=3), [], []
    for number in range(3):
        ids = random_ids(70 + 9 * number, seed=number)
        alone.append(llm.session())
        mine = batch.session()
        for one in (alone[-1], mine):
            one.prefill(ids)
        steps.append(mine)
    for token in (5, 6):
        for mine in steps:
            batch.feed(mine, token)
        found = batch.step()
        for mine, one in zip(steps, alone):
            torch.testing.assert_close(found[mine], one.decode(token), rtol=2e-4, atol=2e-4)


def test_who_runs_on_the_kernels():
    """Every block on a CPU, unless something else is asked for."""
    config = session_config()
    assert type(tiny_llm(config=config).session().runner.halves) is NativeLayer
    plain = {
        "step": tiny_llm(config=config, step="plain"),
        "compile": tiny_llm(config=config, compile=True),
        "reference": tiny_llm(config=config, backend="reference"),
        "torch": tiny_llm(config=config, backend="cpu"),
    }
    for name, llm in plain.items():
        assert type(llm.session().runner.halves) is TorchLayer, name
