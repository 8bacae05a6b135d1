"""A gated delta net's kernels, interpreted, against float64 loops over tokens.

Stops: a decay that passes over the wrong rows, a row written beside its slot, a step that writes S,
gates that overflow, a chunk's system solved in a form that cancels, a last chunk's empty places
that count.
"""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch

import engine.forward.self_test
from engine import Full
from engine.forward.self_test import step_layer
from kernels.recurrent import step
from tests.builders import hybrid_config, random_ids, tiny_llm
from tests.kernels.support.recurrent_checks import (
    HOSTILE,
    Shape,
    check_chunk,
    check_rows_alone,
    check_step,
)

interpreter = pytest.importorskip("triton.runtime.interpreter")

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


@pytest.fixture
def tensor_cores(monkeypatch):
    """Multiply as tensor cores do, which read of a float32 the bits of TF32; three products of its
    parts where the kernel asks for those.
    """
    builder = interpreter.InterpreterBuilder
    plain, seen = builder.create_dot, set()

    def cut(x, rounding=0):
        bits = np.ascontiguousarray(x).view(np.uint32) + np.uint32(rounding)
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)

    def create_dot(self, a, b, d, precision, imprecise):
        if a.data.dtype != np.float32:
            return plain(self, a, b, d, precision, imprecise)
        seen.add(precision.name)
        if precision.name == "TF32x3":  # the compiler rounds the parts (cvt.rna)
            (x, x2), (y, y2) = (
                (part := cut(t.data, 4096), cut(t.data - part, 4096)) for t in (a, b)
            )
            found = np.matmul(x2, y) + np.matmul(x, y2) + np.matmul(x, y)
        else:
            found = np.matmul(cut(a.data), cut(b.data))
        return interpreter.TensorHandle(found + d.data, d.dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    return seen


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_prompt_on_tensor_cores(kind, tensor_cores):
    check_chunk("cpu", Shape(1, 1, 64, 32), BF16, kind, 131, 5, batch=1)
    assert tensor_cores == {"TF32x3", "TF32"}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("shape", [Shape(1, 2, 64, 64), Shape(1, 1, 128, 16)])
def test_a_prompt_of_float32_on_tensor_cores(kind, shape, tensor_cores):
    check_chunk("cpu", shape, F32, kind, 67, 3, batch=1)
    assert tensor_cores == {"TF32x3"}


@pytest.mark.parametrize("count", [1, 2, 7, 8, 61, 62, 63, 64, 65, 127, 128, 129, 195, 333, 700])
def test_prompts_of_every_residue(count):
    for keep in (0, min(count, 8)):
        check_chunk("cpu", Shape(1, 1, 16, 16), F32, "plain", count, keep, batch=1)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        (Shape(2, 4, 128, 64), BF16),
        (Shape(1, 1, 20, 48), F32),
        (Shape(2, 1, 64, 128), F16),
        (Shape(1, 3, 80, 33), BF16),
        (Shape(1, 1, 1, 16), F32),
    ],
)
def test_prompts_of_other_shapes(shape, dtype):
    check_chunk("cpu", shape, dtype, "plain", 70, 8)


def test_a_prompt_longer_than_a_segment(monkeypatch):
    """S goes from one pair of launches to the next."""
    monkeypatch.setattr("kernels.recurrent.chunk.SEGMENT", 1)
    for count, keep in ((64, 0), (72, 8), (129, 1), (200, 66)):
        check_chunk("cpu", Shape(1, 2, 16, 16), F32, "plain", count, keep, batch=1)


@pytest.fixture
def hybrid():
    """A small Qwen3.5 on our own kernels, and the answers of the reference."""

    def made(**settings):
        config = hybrid_config(4, max_positions=256)
        return tiny_llm(Full(), config, max_context=256, chunk=64, **settings)

    return made


def answers(llm):
    with llm.session() as session:
        found = [session.prefill(random_ids(75))]
        found += [session.decode(token) for token in (3, 4, 5)]
        session.truncate(74)
        return torch.stack([*found, session.decode(9)])


def test_a_session_is_the_references(hybrid):
    """Prompts of several chunks, steps, and one after going back."""
    with mock.patch.object(step, "net_step_triton", wraps=step.net_step_triton) as ran:
        found = answers(hybrid(backend="triton"))
    assert ran.call_count
    torch.testing.assert_close(found, answers(hybrid(backend="reference")), rtol=1e-4, atol=1e-4)


def test_kernels_that_lie_leave_torchs_operators(hybrid, monkeypatch):
    """As on a GPU: the self-test's finding is said once, and answers stay right."""
    llm = hybrid(backend="triton")
    monkeypatch.setattr(engine.forward.self_test, "is_tested", lambda device: True)
    sizes = llm.load().model, llm.rotary, llm.load().pieces
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_layer(*sizes, "plain", "triton")
    assert not any(layer.mixer and layer.mixer.refused for layer in llm.model.layers)
    real = step.net_step_triton
    monkeypatch.setattr(step, "net_step_triton", lambda *given: real(*given) * 1.5)
    with pytest.warns(UserWarning, match="recurrent layers run on torch's operators: a step's"):
        step_layer(*sizes, "plain", "triton")
    wanted = answers(hybrid(backend="reference"))
    torch.testing.assert_close(answers(llm), wanted, rtol=1e-4, atol=1e-4)
