"""A gated delta net's kernels, interpreted, against float64 loops over tokens.

Stops: a decay that passes over the wrong rows, a row written beside its slot, a step that writes S,
gates that overflow, a chunk's system solved in a form that cancels, a last chunk's empty places
that count.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine import Full
from engine.bank.recurrent.state import RecurrentState
from engine.forward.recurrent.self_test import mixers, recurrence_failure
from engine.model.llama import pre_recurrence, rms_norm
from kernels.launch.shapes import Card, imagined
from kernels.recurrent import step
from kernels.recurrent.chunk import chunk_for
from tests.builders import hybrid_config, tiny_llm
from tests.kernels.support.recurrent_checks import (
    HOSTILE,
    Shape,
    ThreeProducts,
    check_chunk,
    check_rows_alone,
    check_step,
    normal,
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
    check_chunk("cpu", Shape(1, 1, 64, 32), BF16, kind, 131, 5, batch=1, products=ThreeProducts())
    assert tensor_cores == {"TF32x3", "TF32"}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("shape", [Shape(1, 2, 64, 64), Shape(1, 1, 128, 16)])
def test_a_prompt_of_float32_on_tensor_cores(kind, shape, tensor_cores):
    check_chunk("cpu", shape, F32, kind, 67, 3, batch=1, products=ThreeProducts())
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


def test_shorter_chunks_of_cards_with_fewer_registers_to_spare():
    with imagined(Card((12, 0))):
        assert chunk_for(torch.device("cpu")) == 32
        for count, keep in ((1, 0), (31, 8), (32, 0), (33, 33), (97, 8)):
            check_chunk("cpu", Shape(1, 2, 128, 16), BF16, "plain", count, keep, batch=1)


@pytest.fixture
def llm():
    return tiny_llm(Full(), hybrid_config(4, max_positions=256), max_context=256, chunk=64)


def through(model, backend):
    """A prompt of two chunks and three steps through the first layer's state: all that it adds."""
    layer, eps = model.layers[0], model.config.rms_norm_eps
    state = RecurrentState(model.config.recurrent, model.dtype, "cpu")
    x, at, found = normal(1, 1, 75, model.config.hidden_size), 0, []
    for width in (64, 6, 1, 3, 1):
        part, first, at = x[:, at : at + width], at, at + width
        if width >= 6:
            mixed = pre_recurrence(layer, part, eps)
            out = state.chunk(0, layer.mixer, mixed, first, True, backend)
            found.append(layer.mixer.gated(out, mixed.z, eps, backend))
        else:
            normed = rms_norm(part, layer.input_norm, eps, layer.block)
            products = layer.qkv(normed), F.linear(normed, layer.mixer.rates)
            positions = torch.arange(first, at)[None]
            found.append(state.whole_step(0, layer.mixer, *products, positions, eps, backend))
        state.commit(at)
    return torch.cat(found, 1)


def test_a_layer_is_the_references(llm):
    model = llm.load().model
    with torch.inference_mode():
        found, wanted = (through(model, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_the_self_test_finds_a_kernel_that_lies(llm, monkeypatch):
    """Torch's operators run then: a lie in the kernel is in no answer."""
    model = llm.load().model
    net, eps = mixers(model)[0], model.config.rms_norm_eps
    assert len(mixers(model)) == 3
    with torch.inference_mode():
        assert recurrence_failure(net, eps) == ""
        real = step.net_step_triton
        monkeypatch.setattr(step, "net_step_triton", lambda *given: real(*given) * 1.5)
        assert recurrence_failure(net, eps).startswith("a step's output differs by")
        assert net.backend("triton") == "triton"
        net.refuse()
        assert (net.backend("triton"), net.backend("reference")) == ("cpu", "reference")
