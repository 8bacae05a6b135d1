"""A mixture's kernels compiled and run on a GPU: the checks of tests/kernels at real sizes, and as
a graph that follows what is fed.
"""

import pytest
import torch

from kernels.experts.choose import choose_experts, choose_experts_ref
from kernels.experts.mix import mix_experts
from kernels.experts.open import SILU
from tests.kernels.support.expert_checks import (
    CLAMP,
    GELU,
    RELU2,
    assert_rows_alone,
    assert_same_choice,
    check_mixture,
    mixture,
    noise,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def exact_products():
    """The plain torch beside the kernels must not use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("rows, count, best", [(1, 4, 1), (7, 32, 4), (16, 128, 8), (3, 512, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice(rows, count, best, dtype):
    for normalise in (True, False):
        logits = noise(rows, rows, count, dtype=dtype, device="cuda")
        logits[0, : count // 2] = 0.5  # many are equal
        found = choose_experts(logits, best, normalise)
        wanted = choose_experts_ref(logits, best, normalise)
        assert_same_choice(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["floats", "int8", "int4"])
@pytest.mark.parametrize("rows, count, best", [(1, 32, 4), (2, 4, 1), (7, 16, 8), (16, 32, 4)])
def test_a_mixture(rows, count, best, kind, dtype):
    """gpt-oss-20b's sizes with its activation, Qwen3-30B-A3B's, Gemma 4 26B-A4B's and Nemotron 3
    Nano's."""
    check_mixture("cuda", rows, count, best, 2880, 2880, dtype, True, CLAMP, kind)
    check_mixture("cuda", rows, count, best, 2048, 768, dtype, False, SILU, kind)
    check_mixture("cuda", rows, count, best, 2816, 704, dtype, True, GELU, kind)
    check_mixture("cuda", rows, count, best, 2688, 1856, dtype, True, RELU2, kind)


@pytest.mark.parametrize("kind", ["floats", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind, dtype):
    stacks, _, router = mixture(32, 1536, 768, dtype, kind, True, "cuda")
    x = noise(3, 16, 1536, dtype=dtype, device="cuda")
    assert_rows_alone(stacks, router, x, (2, 3, 4, 8, 9, 16))


@pytest.mark.parametrize("kind", ["floats", "int4"])
def test_a_graph_follows_what_is_fed(kind):
    """Replayed over other rows it gives what eager gives there, bit for bit: other experts, and
    fewer or more of them.
    """
    stacks, _, router = mixture(32, 1536, 768, torch.bfloat16, kind, False, "cuda")
    x = noise(0, 4, 1536, dtype=torch.bfloat16, device="cuda")

    def run():
        return mix_experts(x, (router, None), stacks, 4, True, SILU, x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(1, 4):
        rows = noise(seed, 4, 1536, dtype=torch.bfloat16, device="cuda")
        x.copy_(rows[:1].expand(4, -1) if seed == 2 else rows)
        graph.replay()
        assert torch.equal(found, run()), f"rows {seed}"
