"""The kernels of recurrent layers compiled and run on a GPU: the checks of tests/kernels at real
sizes, and a step under a CUDA graph.
"""

import pytest
import torch

from kernels.recurrent.step import net_step
from tests.kernels.support.recurrent_checks import (
    EPS,
    HOSTILE,
    Net,
    Shape,
    ThreeProducts,
    check_chunk,
    check_rows_alone,
    check_step,
)
from tests.kernels.support.ssd_checks import check_convolution, check_ssd_chunk

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QWEN = Shape(16, 2, 128, 128)


@pytest.fixture(autouse=True)
def exact_products():
    """The plain torch beside the kernels must not use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_and_prompts_of_a_delta_net(kind, dtype):
    check_step("cuda", QWEN, dtype, kind)
    check_chunk("cuda", QWEN, dtype, kind, 2200, 8, batch=1, products=ThreeProducts())


def test_a_tokens_bits_do_not_depend_on_its_neighbours():
    check_rows_alone("cuda", QWEN, torch.bfloat16, 25)


def test_a_captured_step_is_the_launched_one():
    """Replayed, it reads the positions and the base of then."""
    net = Net(QWEN, 2, torch.bfloat16, "cuda", "plain", batch=1)
    launched, captured = net.held(0.0), net.held(0.0)
    base = torch.zeros(1, dtype=torch.int64, device="cuda")
    at = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    x, rates = net.x[:, :1].clone(), net.rates[:, :1].clone()
    given = x, rates, net.weights, captured, base, at, EPS, "triton"
    net_step(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = net_step(*given)
    for token in range(2):
        x.copy_(net.x[:, token : token + 1])
        rates.copy_(net.rates[:, token : token + 1])
        at.fill_(token)
        graph.replay()
        where = net.weights, launched, base, at, EPS, "triton"
        assert torch.equal(out, net_step(x, rates, *where))
    for mine, other in zip((captured.inputs, *captured.tail), (launched.inputs, *launched.tail)):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ("plain", "kept", "forgotten", "mixed"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 16, 128, 64), (1, 128, 128, 64), (1, 24, 256, 128)])
def test_prompts_of_mamba_2(shape, dtype, kind):
    """Nemotron-H's, Granite 4 Small's and Falcon-H1's."""
    check_ssd_chunk("cuda", shape, dtype, kind, 2200, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
def test_a_prompts_convolution(biased, dtype):
    for count in (1, 33, 2048):
        check_convolution("cuda", 6144, 4, biased, dtype, count)
