"""A cap on logits and attention sinks in every launcher, interpreted, against the float64 oracle.

Stops: a launcher that forgets the cap or a sink, a sink that is counted once for each part of the
rows, scores of a selection without them.
"""

import pytest
import torch

from tests.kernels.support.softmax_checks import (
    check_prompts,
    check_steps,
    check_window_scores,
    softmax_of,
)

F32, BF16 = torch.float32, torch.bfloat16


# each alone once, both in either form; tests/kernels_cpu has the whole grid
@pytest.mark.parametrize(
    "cap, sinks, dtype, layout",
    [
        (True, False, F32, "heads"),
        (False, True, BF16, "tokens"),
        (True, True, F32, "heads"),
        (True, True, BF16, "tokens"),
    ],
)
def test_every_launcher(cap, sinks, dtype, layout):
    softmax = softmax_of(cap, sinks)
    check_steps("triton", softmax, dtype, layout)
    check_window_scores("triton", softmax, dtype, layout)
    check_prompts("triton", softmax, dtype, layout)
