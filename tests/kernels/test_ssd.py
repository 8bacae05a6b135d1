"""Mamba-2's kernels and the causal convolution of a prompt, interpreted, against float64 loops over
tokens.

Stops: a decay that passes over the wrong rows, a difference of large sums that has lost the small
ones, a last chunk's empty places that count, a tap that reads a token of the next sequence.
"""

import pytest
import torch

from engine import Full
from engine.bank.recurrent.state import RecurrentState
from engine.forward.recurrent.self_test import mixers, recurrence_failure
from engine.model.llama import pre_recurrence
from kernels.launch.shapes import Card, imagined
from kernels.recurrent.gpu import ssd_chunk as gpu
from tests.builders import hybrid_config, tiny_llm
from tests.kernels.support.ssd_checks import HOSTILE, check_convolution, check_ssd_chunk

interpreter = pytest.importorskip("triton.runtime.interpreter")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_prompt(kind, dtype):
    check_ssd_chunk("cpu", (1, 2, 64, 32), dtype, kind, 131, 5)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 61, 63, 64, 65, 127, 128, 129, 195, 333])
def test_prompts_of_every_residue(count):
    for keep in (0, min(count, 8)):
        check_ssd_chunk("cpu", (1, 1, 16, 16), F32, "plain", count, keep)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((2, 4, 128, 64), BF16),
        ((1, 1, 20, 48), F32),
        ((1, 2, 256, 16), F16),
        ((2, 3, 33, 80), BF16),
        ((1, 8, 1, 16), F32),
    ],
)
def test_prompts_of_other_shapes(shape, dtype):
    check_ssd_chunk("cpu", shape, dtype, "plain", 70, 8, batch=2)


def test_shorter_chunks_of_cards_with_fewer_registers_to_spare():
    with imagined(Card((12, 0))):
        for count, keep in ((1, 0), (31, 8), (32, 0), (33, 33), (97, 8)):
            check_ssd_chunk("cpu", (1, 2, 128, 16), BF16, "mixed", count, keep)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("channels, taps", [(40, 4), (130, 4), (128, 2), (7, 1)])
def test_a_prompts_convolution(channels, taps, biased, dtype):
    for count in (1, 2, 3, 31, 32, 33, 67):
        check_convolution("cpu", channels, taps, biased, dtype, count)


def test_a_prompt_longer_than_a_segment(monkeypatch):
    """S goes from one pair of launches to the next."""
    monkeypatch.setattr("kernels.recurrent.gpu.ssd_chunk.SEGMENT", 1)
    for count, keep in ((64, 0), (72, 8), (129, 1), (200, 66)):
        check_ssd_chunk("cpu", (1, 2, 16, 16), F32, "plain", count, keep)


FAMILIES = ("granite", "nemotron", "falcon", "bamba")


def model_of(family):
    config = hybrid_config(4, family, max_positions=256)
    return tiny_llm(Full(), config, max_context=256, chunk=64).load().model


def through(model, backend):
    """A prompt of two chunks and three steps through the first layer's state: all that it adds."""
    layer, eps = model.layers[0], model.config.rms_norm_eps
    state = RecurrentState(model.config.recurrent, model.dtype, "cpu")
    draw = torch.Generator().manual_seed(1)
    x, at, found = torch.randn(1, 75, model.config.hidden_size, generator=draw), 0, []
    for width in (64, 6, 1, 3, 1):
        part, first, at = x[:, at : at + width], at, at + width
        mixed = pre_recurrence(layer, part, eps)
        if width >= 6:
            out = state.chunk(0, layer.mixer, mixed, first, True, backend)
        else:
            positions = torch.arange(first, at)[None]
            out = state.step(0, layer.mixer, mixed, positions, backend)
        found.append(layer.mixer.gated(out, mixed.z, eps, backend))
        state.commit(at)
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_the_references(family):
    model = model_of(family)
    with torch.inference_mode():
        found, wanted = (through(model, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_the_self_test_finds_a_kernel_that_lies(monkeypatch):
    """Torch's operators run then: a lie in the kernel is in no answer."""
    model = model_of("granite")
    net, eps = mixers(model)[0], model.config.rms_norm_eps
    assert len(mixers(model)) == 3
    with torch.inference_mode():
        assert recurrence_failure(net, eps) == ""
        real = gpu.ssd_chunk_triton

        def lies(*given):
            out, after = real(*given)
            return out, after * 1.5

        monkeypatch.setattr(gpu, "ssd_chunk_triton", lies)
        assert recurrence_failure(net, eps).startswith("a prompt's state differs by")
        assert net.backend("triton") == "triton"
        net.refuse()
        assert (net.backend("triton"), net.backend("reference")) == ("cpu", "reference")
        assert recurrence_failure(net, eps) == ""
