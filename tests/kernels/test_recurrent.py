"""A gated delta net's kernels, interpreted, against float64 loops over tokens.

Stops: a decay that passes over the wrong rows, a row written beside its slot, a step that writes S,
gates that overflow, a chunk's system solved in a form that cancels, a last chunk's empty places
that count.
"""

import pytest
import torch

from tests.kernels.support.recurrent_checks import (
    HOSTILE,
    Shape,
    check_rows_alone,
    check_step,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_steps(kind, dtype):
    check_step("cpu", Shape(1, 2, 64, 64), dtype, kind)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (Shape(2, 1, 128, 128), BF16),
        (Shape(1, 4, 128, 64), F16),
        (Shape(2, 2, 64, 128), F32),
        (Shape(1, 3, 20, 48, 3), F32),
        (Shape(1, 1, 1, 16, 1), F32),
        (Shape(3, 1, 33, 80, 5), BF16),
    ],
)
def test_steps_of_other_shapes(shape, dtype):
    check_step("cpu", shape, dtype, "plain", (3, 1, 8))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("first", [0, 3, 25])
def test_a_tokens_bits_do_not_depend_on_its_neighbours(dtype, first):
    check_rows_alone("cpu", Shape(1, 2, 64, 32), dtype, first)
