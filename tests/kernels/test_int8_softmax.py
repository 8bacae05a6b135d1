"""A cap on logits and sinks over packed rows: the launchers of a decode step, interpreted, in plain
torch and by reference, against the float64 oracle of the rounded values.

Stops: a cap that is applied before the scale of a packed row, a sink that a packed path forgets.
"""

import pytest
import torch

from tests.kernels.support import softmax_checks
from tests.kernels.support.packed_rows import over_packed_rows


@pytest.mark.parametrize(
    "backend, cap, sinks",
    [
        ("reference", True, True),
        ("cpu", True, False),
        ("cpu", False, True),
        ("triton", True, True),  # interpreted: a tenth of a minute
    ],
)
def test_every_launcher_of_a_step(monkeypatch, backend, cap, sinks):
    names = "decode_dense", "decode_sparse", "window_scores"
    seen = over_packed_rows(monkeypatch, softmax_checks, *names)
    softmax = softmax_checks.softmax_of(cap, sinks)
    softmax_checks.check_steps(backend, softmax, torch.float32, "tokens")
    softmax_checks.check_window_scores(backend, softmax, torch.float32, "heads")
    # two problems of five launches over K and V, and two over K
    assert seen == [torch.int8] * 22
