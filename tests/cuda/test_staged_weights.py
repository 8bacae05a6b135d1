"""Weights that stream on a GPU: locked memory, a side stream, copies inside a captured step.
Skipped without a GPU; the same body runs on a CPU in tests/engine/session/test_cuda_bodies.py.

Stops: a capture that waits for an event from outside, a replay that reads another layer's weights.
"""

import pytest
import torch

from engine import Full
from tests.cuda.session_checks import check_streamed, made

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_bits_are_those_of_weights_that_stay(weights, backend):
    check_streamed("cuda", weights=weights, backend=backend, dtype="bfloat16")


def test_memory_is_locked_and_steps_are_captured():
    llm = made("cuda", Full(), weights_offload="all")
    assert llm.load().graphs and llm.model.staged.pinned
    before = torch.cuda.memory_allocated()
    planned = llm.plan().bytes_of("weights") + llm.plan().bytes_of("weight buffers")
    assert before <= 1.02 * planned + (64 << 20)  # cuBLAS's workspaces
