"""`pack_linear`: every form equals the exact product, holds one copy, and passes through
torch.compile.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from kernels.layer.linear import FORMS, pack_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def forms(dtype):
    """The forms that this machine can run in `dtype`."""
    packed = torch.backends.mkldnn.is_available() and (
        dtype == torch.float32
        or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    return [form for form in FORMS if form != "packed" or packed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", (False, True))
def test_every_form_is_within_twice_torchs_own_error(dtype, with_bias):
    torch.manual_seed(0)
    for outs, ins in ((7, 5), (96, 64), (130, 1030), (1030, 1500)):
        weight = torch.randn(outs, ins).to(dtype)
        bias = torch.randn(outs).to(dtype) if with_bias else None
        for rows in ((), (1,), (1, 1), (2,), (1, 3), (4,), (2, 4), (33,), (70,), (0,)):
            x = torch.randn((*rows, ins)).to(dtype)
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            own = F.linear(x, weight, bias).double() - exact
            terms = F.linear(x.double().abs(), weight.double().abs())
            for form in forms(dtype):
                if form == "packed" and not x.numel():
                    continue
                out = pack_linear(weight, bias, form=form)(x)
                assert out.shape == exact.shape and out.dtype == dtype and out.is_contiguous(), (
                    form,
                    rows,
                )
                if x.numel():
                    limit = (
                        2 * own.abs().amax()
                        + torch.finfo(dtype).eps * exact.abs().amax()
                        + 4 * 2**-24 * terms.amax()
                    )
                    assert (out.double() - exact).abs().amax() <= limit, (form, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_copy_is_held(dtype):
    weight = torch.randn(64, 48).to(dtype)
    linear = pack_linear(weight, torch.zeros(64, dtype=dtype))
    assert linear.nbytes == (64 * 48 + 64) * dtype.itemsize and linear.shape == (64, 48)
    if linear.form in ("narrow", "packed"):
        gone = weakref.ref(weight)
        del weight
        gc.collect()
        assert gone() is None


def test_wrong_words_and_shapes_are_refused():
    with pytest.raises(ValueError, match="form: found 'fast'"):
        pack_linear(torch.zeros(2, 2), form="fast")
    with pytest.raises(ValueError, match="expected \\[out, in\\]"):
        pack_linear(torch.zeros(2))


@pytest.mark.parametrize("form", ("plain", "left", "narrow", "widened"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_compiles_without_a_graph_break(form, dtype):
    torch.manual_seed(1)
    torch._dynamo.reset()
    linear = pack_linear(torch.randn(24, 16).to(dtype), form=form)
    step = torch.compile(lambda x: linear(x) + 1, fullgraph=True, backend="aot_eager")
    for rows in (1, 5, 40):
        x = torch.randn(1, rows, 16).to(dtype)
        assert torch.allclose(step(x), linear(x) + 1, rtol=2e-2, atol=2e-2)
