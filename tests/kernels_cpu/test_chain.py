"""Layers in one call of C++ against the same kernels called one by one from Python, to the bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.chain.calls import by_calls
from kernels.chain.layer import Now, Reading
from kernels.chain.layers import BINDING, Chain, chains, some_layers
from kernels.experts.native_experts import NativeExperts
from kernels.launch.softmax import Softmax
from kernels.layer.native_product import Product
from kernels.layer.native_step import normalize_rows
from kernels.native.library import missing
from kernels.quant import native as quant
from kernels.quant.native import product as few_bits
from kernels.rows.forms import FORMS, as_bytes

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
BOUND = 1100  # rows: more than a thread takes at a time
ROOM = 40  # places of an index


def run(
    dtype, weights, bank, family, chained, n, tail, budget, kind, window, cap, offset, cut, threads
):
    """A chain of four layers, or its calls: (x, and all that it leaves)."""
    generator = torch.Generator().manual_seed(n + budget)
    index, counts = torch.full((1, 1, ROOM), -1, dtype=torch.int32), torch.zeros(1).int()
    scores = torch.zeros(1, BOUND)
    readings = [
        Reading(),
        Reading(index, counts, kind, scores),
        Reading(index, counts),
        Reading(),
    ]
    layers = some_layers(dtype, BOUND, generator, readings, weights, bank)
    layers = [replace(layer, softmax=Softmax(cap)) for layer in layers]
    norm = layers[0].post_norm
    layers = [styled(layer, family, generator) for layer in layers]
    size = BOUND // 2
    layers[3] = replace(layers[3], window=window, size=size if window else 0, q_norm=None)
    layers[3] = replace(layers[3], k_norm=None, angles=1)
    angles = [(torch.rand(1, 1, p, generator=generator),) * 2 for p in (16, 6)]
    now = Now(n, tail, budget, torch.tensor([[n - 1]]), angles)
    x = torch.randn(1, 1, 48, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if chained:
            shape = ScratchShape(1, 1, 4, 2, 32, BOUND, scored=True, dtype=dtype)
            scratch = make_scratch(shape, torch.device("cpu"))
            head = layers[0].qkv, norm
            chain = Chain(layers, dtype, 1e-5, offset, head, BOUND, scratch)
            x = chain(chain(x, 0, cut, now), cut, 4, now) if cut else chain(x, 0, 4, now)
        else:
            x = by_calls(layers, x, now, 1e-5, offset)
            x = logits(layers[0].qkv, x, norm, offset)
    finally:
        torch.set_num_threads(before)
    left = [as_bytes(part) for layer in layers for part in (layer.k, layer.v, layer.ring)]
    return [x, counts, index[..., : int(counts)], scores[:, :n], *left]


def styled(layer, family, generator):
    """A layer with what a family has beside Llama's."""

    def draw(*size):
        return torch.randn(*size, generator=generator).to(layer.q_norm.dtype)

    if family == "gemma":
        norms = dict(o_norm=draw(48), down_norm=draw(48))
        return replace(layer, activation="gelu_tanh", **norms)
    if family == "olmo":
        norms = dict(input_norm=None, post_norm=None, o_norm=draw(48), down_norm=draw(48))
        return replace(layer, widths=True, q_norm=draw(128), k_norm=draw(64), **norms)
    if family == "granite":
        return replace(layer, residual=0.22)
    if family == "nemotron":
        return replace(layer, activation="relu2", gate_up=Product(draw(80, 48)))
    if family.startswith("experts"):
        firsts, lasts = (
            [Product(draw(*size) / 8) for _ in range(5)] for size in ((64, 48), (48, 32))
        )
        experts = NativeExperts(draw(5, 48), firsts, lasts, 2, True)
        norms = dict(down_norm=draw(48)) if family == "experts, normed" else {}
        return replace(layer, gate_up=None, down=None, mixture=experts, **norms)
    return layer


def logits(matrix, x, norm, offset):
    """A head's, float32."""
    if isinstance(matrix, Product):
        return matrix(x, norm, 1e-5, wide=True, offset=offset)
    x = normalize_rows(x, norm, 1e-5, offset)
    return few_bits(x, matrix.weight, matrix.bias, out_dtype=torch.float32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    weights=st.sampled_from(["", "int8", "int4"]),
    bank=st.sampled_from(["", "int8", "int4", "fp8"]),
    family=st.sampled_from(
        ["", "gemma", "olmo", "granite", "nemotron", "experts", "experts, normed"]
    ),
    n=st.sampled_from([1, 2, 63, 64, 65, 127, 511, 512, 513, 1021, 1024, 1025, 1100]),
    tail=st.sampled_from([1, 64, 500]),
    budget=st.sampled_from([0, 1, 7, ROOM, 90]),
    kind=st.sampled_from(["softmax", "raw"]),
    window=st.sampled_from([0, 1, 37, 500]),
    cap=st.sampled_from([0.0, 3.0]),
    offset=st.sampled_from([None, 1.0]),
    cut=st.sampled_from([0, 1, 3]),
    threads=st.sampled_from([1, 2]),
)
def test_a_chain_leaves_the_bits_of_its_calls(
    dtype, weights, bank, family, n, tail, budget, kind, window, cap, offset, cut, threads
):
    assert BINDING.usable() and quant.usable()
    given = n, max(0, n - tail), budget, kind, window, cap, offset, cut
    found = run(dtype, weights, bank, family, True, *given, threads)
    expected = run(dtype, weights, bank, family, False, *given, 1)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[1] == min(budget, ROOM, max(0, n - tail))


def test_what_a_chain_takes():
    """Rows of its own dtype or in few bits under whole vectors, and no sinks."""
    rows, of = torch.zeros(2, 8, 32), (torch.float32, 32)
    assert chains(rows, rows, Softmax(3.0), *of)
    assert not chains(rows, rows, Softmax(0.0, torch.zeros(4)), *of)
    assert not chains(rows, rows, Softmax(), torch.bfloat16, 32)
    for form in FORMS.values():
        sides = form.keys.pack(rows), form.values.pack(rows)
        assert chains(*sides, Softmax(), *of) and chains(*sides, Softmax(), torch.bfloat16, 32)
    assert not chains(rows[..., :20], rows[..., :20], Softmax(), torch.float32, 20)
    small = FORMS[torch.int8].keys.pack(rows[..., :24])
    assert not chains(small, small, Softmax(), torch.float32, 24)
