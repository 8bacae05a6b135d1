"""Norm, rotation, residual and SwiGLU of a prompt's chunk in our own kernels, interpreted.

Stops: a head, a column or a row that no program computes, an angle of another token or sequence, a
rounding elsewhere than torch's, a chunk that falls back to torch's thirty launches unnoticed.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import engine.forward.self_test
from engine import Full, OmniKV
from engine.forward.layer import FusedLayer
from engine.forward.prompt_layer import FUSED, PLAIN, prompt_pieces
from engine.forward.self_test import step_layer
from kernels.layer.prompt_fused import (
    add_normalize_rows,
    add_normalize_rows_ref,
    rotate_rows,
    rotate_rows_ref,
    swiglu_rows,
    swiglu_rows_ref,
)
from tests.builders import random_ids, session_config, tiny_llm
from tests.kernels.support.kernel_checks import assert_close
from tests.kernels.test_step_kernels import close, made

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
FEW = settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])


@FEW
@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 5),
    heads=st.integers(1, 19),
    others=st.integers(0, 3),
    half=st.integers(1, 33),
    angles=st.booleans(),
    dtype=DTYPES,
)
def test_rotation(batch, length, heads, others, half, angles, dtype):
    """angles: every sequence has its own."""
    (qkv,) = made(heads, (batch, length, heads + others, 2 * half), dtype=dtype)
    (turn,) = made(half, (batch if angles else 1, length, half))
    cos, sin = turn.cos(), turn.sin()
    found = rotate_rows(qkv, cos, sin, heads)
    close(found, rotate_rows_ref, dtype, qkv, cos, sin, heads)


@FEW
@given(rows=st.integers(1, 6), size=st.integers(1, 700), dtype=DTYPES)
def test_residual_and_norm(rows, size, dtype):
    x, part, weight = made(size, (1, rows, size), (1, rows, size), (size,), dtype=dtype)
    part[0, 0] *= 30
    found = add_normalize_rows(x, part, weight, 1e-5)
    wide = add_normalize_rows_ref(x.double(), part.double(), weight.double(), 1e-5)
    plain = add_normalize_rows_ref(x, part, weight, 1e-5)
    assert torch.equal(found[0], plain[0])
    assert_close(found[1], wide[1], plain[1], dtype, "norm")


@FEW
@given(rows=st.integers(1, 4), size=st.integers(1, 2600), dtype=DTYPES)
def test_swiglu(rows, size, dtype):
    (gate_up,) = made(size, (1, rows, 2 * size), dtype=dtype)
    gate_up[..., 0] = -80  # exp(80) overflows half precision, and silu is 0
    close(swiglu_rows(gate_up), swiglu_rows_ref, dtype, gate_up)


class Ops(TorchDispatchMode):
    """Counts torch's operators that touch memory."""

    VIEWS = (
        "view",
        "slice",
        "split",
        "transpose",
        "unsqueeze",
        "t.",
        "empty",
        "detach",
        "_unsafe_view",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, arguments=(), named=None):
        name = str(op).removeprefix("aten.")
        if not name.startswith(self.VIEWS):
            self.names.append(name)
        return op(*arguments, **(named or {}))


def test_a_layer_of_a_chunk_is_four_products_one_sum_and_four_kernels(monkeypatch):
    """Beside attention; torch's operators take more than twice as many."""
    llm = tiny_llm(Full(), session_config(layers=1), max_context=256, backend="triton")
    config, layer = llm.config, llm.model.layers[0]
    x, attended = made(1, (1, 70, config.hidden_size), (1, 70, config.num_heads, config.head_dim))
    cos, sin = llm.rotary.at(torch.arange(70)[None])
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    launched = []
    for name in ("normalize_rows", "rotate_rows", "add_normalize_rows", "swiglu_rows"):
        launch = {
            "normalize_rows": lambda x, *_: torch.empty_like(x),
            "rotate_rows": lambda qkv, c, s, heads: qkv[:, :, :heads],
            "add_normalize_rows": lambda x, *_: (x, x),
            "swiglu_rows": lambda rows: rows.chunk(2, dim=-1)[0].contiguous(),
        }[name]

        def counted(*arguments, name=name, launch=launch):
            launched.append(name)
            return launch(*arguments)

        monkeypatch.setattr(f"engine.forward.prompt_layer.{name}", counted)
    counts = []
    for before, after in (PLAIN, FUSED):
        with Ops() as ops:
            before(layer, x, cos, sin, *sizes)
            after(layer, x, attended, config.rms_norm_eps)
        counts.append([name for name in ops.names if "clone" not in name])
    products = [name for name in counts[1] if name.startswith(("mm", "addmm", "linear", "mkldnn"))]
    assert len(products) == 4 and launched.count("normalize_rows") == 1 and len(launched) == 4
    assert len(counts[1]) <= 6 and len(counts[0]) >= 2 * (len(counts[1]) + len(launched))


def test_a_prompt_on_our_own_kernels_is_a_prompt_on_torchs():
    """A whole session whose steps are fused reads its prompt in the same form: chunks, a last layer
    of one query, sparse steps after it.
    """
    method = OmniKV(filter_layers=(0,), tokens=16, tail=64, dense_below=0)
    config = session_config(layers=2)
    found = []
    for form in (dict(backend="triton", step="fused"), dict(backend="reference")):
        llm = tiny_llm(method, config, max_context=256, chunk=64, **form)
        with llm.session() as session:
            assert session.runner.prompt_pieces is (FUSED if not found else PLAIN)
            found.append(torch.stack([session.prefill(random_ids(90)), session.decode(3)]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_lies_in_a_prompt_leaves_torchs_operators(monkeypatch):
    """The self-test runs a chunk too, and its form follows the step's."""
    llm = tiny_llm(Full(), session_config(layers=1), max_context=256, backend="triton")
    monkeypatch.setattr(engine.forward.self_test, "ROWS", 700)
    monkeypatch.setattr(engine.forward.self_test, "is_tested", lambda device: True)
    sizes = llm.model, llm.rotary, llm.load().pieces
    found = step_layer(*sizes, "auto", "triton")
    assert isinstance(found, FusedLayer) and prompt_pieces(found) is FUSED
    monkeypatch.setattr("engine.forward.prompt_layer.swiglu_rows", lambda g: swiglu_rows_ref(g) * 2)
    with pytest.warns(UserWarning, match="on torch's operators: a prompt's layer differs by"):
        found = step_layer(*sizes, "auto", "triton")
    assert prompt_pieces(found) is PLAIN
