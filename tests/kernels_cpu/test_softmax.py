"""A cap on logits and attention sinks in every launcher, in plain torch, against the oracle.

Stops: a launcher that forgets the cap or a sink, a sink that is counted once for each part of the
rows, scores of a selection without them.
"""

import pytest
import torch

from tests.kernels.support.softmax_checks import (
    CASES,
    check_prompts,
    check_steps,
    check_window_scores,
    softmax_of,
)

FORMS = [(torch.float32, "heads"), (torch.bfloat16, "tokens")]
pytestmark = pytest.mark.usefixtures("form")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype, layout", FORMS)
@pytest.mark.parametrize("cap, sinks", CASES)
def test_every_launcher(backend, dtype, layout, cap, sinks):
    softmax = softmax_of(cap, sinks)
    check_steps(backend, softmax, dtype, layout)
    check_window_scores(backend, softmax, dtype, layout)
    check_prompts(backend, softmax, dtype, layout)


@pytest.mark.parametrize("sinks", [False, True])
def test_capped_float32_rows_in_several_runs(sinks, monkeypatch):
    """700 rows in runs of 640, which are merged: fewer would be one product."""
    monkeypatch.setattr("kernels.attention.cpu.CHUNK", 64 * 64)
    check_steps("auto", softmax_of(True, sinks), torch.float32, "heads")
