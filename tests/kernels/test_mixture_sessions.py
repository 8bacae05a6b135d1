"""Whole sessions of mixtures whose experts the device chooses, interpreted, and the self-test that
leaves the choice to the host.

Stops: experts of another layer, a second copy of them, a chunk and a step that read other weights,
a kernel that lies and is used all the same.
"""

import pytest
import torch

import engine.forward.self_test as self_test
from engine import LLM, Full, OmniKV
from engine.forward.layer import TorchLayer
from engine.model.mixture import Stacks
from engine.model.tensors import random_stream
from kernels.experts.sum import sum_experts
from tests.builders import random_ids, session_config, tiny_llm

QWEN = dict(
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    mlp_only_layers=[2],
)
OSS = dict(
    architectures=["GptOssForCausalLM"],
    intermediate_size=32,
    num_local_experts=5,
    num_experts_per_tok=2,
    swiglu_limit=0.7,
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    sliding_window=60,
)
# latent attention, and a choice by torch's operators on the device
DEEPSEEK = dict(
    architectures=["DeepseekV3ForCausalLM"],
    heads=4,
    kv_heads=4,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=0,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
)
# a mixture beside the MLP, whose router has an input and scales of its own
GEMMA = dict(
    architectures=["Gemma4ForCausalLM"],
    hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=60,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
    global_head_dim=16,
    enable_moe_block=True,
    num_experts=6,
    top_k_experts=2,
    moe_intermediate_size=32,
)
# experts without a gate, between layers of a recurrence and layers that attend
NEMOTRON = dict(
    architectures=["NemotronHForCausalLM"],
    num_hidden_layers=8,
    hybrid_override_pattern="ME*EME*E",
    mlp_hidden_act="relu2",
    layer_norm_epsilon=1e-5,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32,
    routed_scaling_factor=2.5,
)
FAMILIES = {
    "qwen3-moe": QWEN,
    "gpt-oss": OSS,
    "deepseek-v3": DEEPSEEK,
    "gemma4": GEMMA,
    "nemotron-3": NEMOTRON,
}
SPARSE = OmniKV(filter_layers=(1,), tokens=16, tail=64, dense_below=0)


def model(name, method=None, **settings):
    config = session_config(layers=4, hidden=32, head_dim=16, **FAMILIES[name])
    given = dict(max_context=256, chunk=64) | settings
    return tiny_llm(method or Full(), config, **given)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_that_chooses_on_the_device_is_the_references(name):
    """Sparse steps after a prompt whose chunks the host chooses for; one session, and two that
    share a step.
    """
    answers = []
    for backend in ("triton", "reference"):
        llm = model(name, SPARSE, backend=backend, step="auto")
        with llm.session() as session:
            session.prefill(random_ids(100))
            answers.append(torch.stack([session.decode(token) for token in (3, 4)]))
            assert session.stats.sparse_steps == 2
            assert session.runner.model.capturable == (backend == "triton")
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)
    llm, alone = model(name, backend="triton"), []
    for seed in range(2):
        with llm.session() as session:
            session.prefill(random_ids(20, seed=seed))
            alone.append(session.decode(seed))
    with llm.batch() as batch:
        sessions = [batch.session() for _ in range(2)]
        for seed, session in enumerate(sessions):
            session.prefill(random_ids(20, seed=seed))
            batch.feed(session, seed)
        found = batch.step()
        for session, wanted in zip(sessions, alone, strict=True):
            torch.testing.assert_close(found[session], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", ["float", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_lie_once_in_memory_and_the_plan_counts_them(name, word):
    """An expert's matrix is a view of its layer's, whatever its weights are held in; a prompt's
    rows and a step's read the same.
    """
    config = session_config(layers=4, hidden=64, head_dim=16, **FAMILIES[name])
    stream = lambda *given: random_stream(*given, seed=5)  # noqa: E731
    llm = LLM.from_stream(
        config, stream, weights=word, backend="triton", device="cpu", max_context=256, method=Full()
    )
    assert llm.model.nbytes == llm.plan().bytes_of("weights")
    mixture = llm.model.layers[0].mixture
    for stack, held in zip(mixture.stacks, (mixture.gate_up, mixture.down), strict=True):
        whole = stack.weight if word == "float" else stack.weight.values
        for number, matrix in enumerate(held):
            own = matrix.weight if word == "float" else matrix.words.values
            assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            rows = slice(number * stack.outputs, (number + 1) * stack.outputs)
            assert own.data_ptr() == whole[rows].data_ptr() and torch.equal(own, whole[rows])
            assert (matrix.bias is None) == (name != "gpt-oss")
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixture(x), mixture.on_host()(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixture(x, residual=x), mixture(x) + x, rtol=1e-5, atol=1e-5)


def test_experts_of_another_form_stay_apart_and_the_host_chooses():
    """A checkpoint may hold one expert otherwise than its neighbours."""
    experts = session_config(**QWEN).experts
    for stray in (False, True):
        stacks = Stacks(experts, 64, torch.float32)
        for number in range(experts.count):
            for part, shape in (("gate_up", (64, 64)), ("down", (64, 32))):
                dtype = torch.float16 if stray and number == 3 else torch.float32
                weight = torch.full(shape, float(number), dtype=dtype)
                name = f"7.experts.{number}.{part}"
                matrix = stacks.take(name, weight, None, "plain", "words")
                assert torch.equal(matrix.weight, weight)
        assert (stacks.of(7) is None) == stray


def test_the_self_test_finds_a_kernel_that_fails_or_lies(monkeypatch):
    """As on a GPU: a warning that says why, the host chooses, and no step is captured."""
    monkeypatch.setattr(self_test, "is_tested", lambda device: True)
    monkeypatch.setattr(self_test, "STEP_ROWS", (1, 3))

    def lies(*given):
        return sum_experts(*given) * 1.5

    def fails(*given):
        raise RuntimeError("PassManager::run failed")

    def drops(*given):
        found = self_test.choose_experts_ref(*given)
        found.members[0] ^= 1
        return found

    for name, planted, said in (
        ("sum_experts", sum_experts, ""),
        ("sum_experts", lies, "sum of experts differs by"),
        ("open_experts", fails, "a kernel fails: RuntimeError: PassManager"),
        ("choose_experts", drops, r"choice of members differs \(1 rows\)"),
    ):
        llm = model("qwen3-moe", backend="triton")
        sizes = llm.model, llm.rotary, llm.load().pieces, "auto", "triton"
        with monkeypatch.context() as patch:
            patch.setattr(self_test, name, planted)
            if not said:
                assert isinstance(self_test.step_layer(*sizes), TorchLayer)
                assert llm.model.capturable
                continue
            with pytest.warns(UserWarning, match=f"no step is captured: .*{said}"):
                halves = self_test.step_layer(*sizes)
        assert not halves.model.capturable
        found = llm.model.layers[0].mixture(torch.ones(1, 1, 32))
        assert torch.isfinite(found).all()
