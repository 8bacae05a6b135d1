"""Products with weights of few bits, interpreted: words, the few rows of a decode step with what
follows the product, the tiles of a prompt's chunk.

Stops: a nibble or a scale of another column, a byte that loses its sign or a bit,
padding that is multiplied, cancellation against the 128 that nibbles carry, a kernel that lies and
is used all the same.
"""

from dataclasses import replace

import pytest
import torch

import engine.forward.self_test
from engine import LLM, Full
from engine.forward.layer import FusedLayer
from engine.forward.self_test import matrices, step_layer
from engine.model.tensors import random_stream
from kernels.layer.gemv import multiply_rows_ref
from kernels.quant.gemm import multiply_tiles, tile_config
from kernels.quant.gemv import multiply_few_bits, multiply_few_bits_ref
from kernels.quant.linear import QuantisedLinear, held_bytes
from kernels.quant.matrix import Quantised, packed_nibbles
from kernels.quant.product import multiply_words
from kernels.quant.rounding import to_int4, to_int8
from kernels.quant.words import Words, held_as_words
from tests.builders import random_ids, tiny_config
from tests.kernels.support.kernel_checks import assert_close

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def matrix(kind, outputs, inputs, group=0, seed=0, offsets=True, scales=F32):
    """Random values and scales: what a checkpoint may hold, not only what our rounding gives."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // (group or inputs))
    size = inputs**-0.5 / (73 if kind == "int8" else 5)
    scale = ((0.2 + torch.rand(outputs, groups, generator=generator)) * size).to(scales)
    if kind == "int8":
        values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        return Quantised("int8", values, scale, group or inputs)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    shift = -scale * torch.randint(0, 16, scale.shape, generator=generator) if offsets else None
    return Quantised("int4", packed_nibbles(values), scale, group or inputs, shift)


def dense64(weight):
    """The matrix as it is stored, every product and sum in float64."""
    columns = weight.shape[1]
    scales, offsets = (
        None if t is None else t.double().repeat_interleave(weight.group, 1)[:, :columns]
        for t in (weight.scales, weight.offsets)
    )
    found = weight.numbers(slice(None), torch.float64) * scales
    return found if offsets is None else found + offsets


def rows_of(x, weight, dtype):
    """(exact float64, plain torch in dtype) products with the dequantised matrix."""
    exact = x.double() @ dense64(weight).t()
    return exact, torch.nn.functional.linear(x, weight.dense(dtype))


@pytest.mark.parametrize("kind, inputs, group", [
    ("int8", 37, 0), ("int8", 16, 0), ("int8", 192, 64), ("int8", 96, 32), ("int4", 34, 0),
    ("int4", 96, 32), ("int4", 256, 128), ("int4", 32, 0),
])  # fmt: skip
def test_words_hold_every_value_once(kind, inputs, group):
    weight = matrix(kind, 5, inputs, group)
    words = Words.of(weight)
    assert torch.equal(words.rows(slice(None), torch.float64), weight.dense(torch.float64))
    picked = torch.tensor([4, 0, 4])
    assert torch.equal(words.rows(picked, F32), weight.rows(picked, F32))
    counted = held_bytes(
        kind, weight.shape, weight.group, weight.offsets is not None, "words", scale_bytes=4
    )
    assert counted == words.nbytes
    linear = QuantisedLinear(weight, None, F32, "words")
    assert linear.nbytes == words.nbytes and torch.equal(linear.weight, weight.dense(F32))


def test_words_refuse_what_they_cannot_hold():
    assert not held_as_words("int4", 16, 64) and not held_as_words("int8", 24, 48)
    assert not held_as_words("fp8", 64, 64) and not held_as_words("int8", 64, 64, plain=False)
    with pytest.raises(ValueError, match="int4 in groups of 16"):
        Words.of(matrix("int4", 2, 64, 16))


@pytest.mark.parametrize(
    "kind, rows, outputs, inputs, group, dtype, extras",
    [
        ("int4", 1, 5, 96, 32, BF16, ()),
        ("int4", 1, 37, 1312, 32, BF16, ("bias", "residual")),
        ("int4", 1, 6, 4096, 128, BF16, ()),  # no column outside
        ("int4", 2, 9, 320, 64, F16, ("residual",)),
        ("int4", 3, 11, 160, 32, F32, ("gated", "residual", "bias")),
        ("int4", 8, 7, 256, 128, BF16, ("gated",)),
        ("int4 without offsets", 1, 6, 96, 32, F32, ("wide",)),
        ("int8", 1, 1, 1, 0, F32, ("bias",)),
        ("int8", 1, 9, 37, 0, BF16, ()),
        ("int8", 1, 19, 2048, 64, BF16, ("gated", "bias")),
        ("int8", 4, 18, 300, 0, BF16, ("bias", "wide")),
        ("int8", 5, 6, 384, 32, F16, ("gated", "residual")),
        ("int8", 8, 5, 640, 128, F32, ()),
        ("int4", 16, 17, 1600, 32, BF16, ("bias", "residual")),
        ("int8", 11, 9, 336, 48, BF16, ("gated",)),
    ],
)
def test_few_rows(kind, rows, outputs, inputs, group, dtype, extras):
    """Sizes that fill no tile, every epilogue, every group."""
    stored = outputs * (2 if "gated" in extras else 1)
    weight = matrix(kind[:4], stored, inputs, group, offsets="without" not in kind, scales=dtype)
    generator = torch.Generator().manual_seed(rows)
    x, bias, residual = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, rows, inputs), (stored,), (1, rows, outputs))
    )
    named = dict(
        bias=bias if "bias" in extras else None,
        residual=residual if "residual" in extras else None,
        gated="gated" in extras,
        out_dtype=F32 if "wide" in extras else None,
    )
    words = Words.of(weight)
    found = multiply_few_bits(x, words, **named)
    plain = multiply_few_bits_ref(x, words, **named)
    wide = {n: t.double() if torch.is_tensor(t) else t for n, t in named.items()}
    wide["out_dtype"] = torch.float64
    exact = multiply_rows_ref(x.double(), dense64(weight), **wide)
    assert found.dtype == plain.dtype and found.shape == plain.shape
    assert_close(found, exact, plain, dtype, kind)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_value_is_unpacked_exactly_at_every_place_of_a_word(kind, dtype):
    """All 256 bytes and all 16 nibbles, one column at a time: a row of x is a unit vector."""
    count = 256 if kind == "int8" else 16
    columns, least = 16 if kind == "int8" else 32, -128 if kind == "int8" else 0
    values = (torch.arange(count)[:, None] + 37 * torch.arange(columns)) % count + least
    held = values.to(torch.int8) if kind == "int8" else packed_nibbles(values.to(torch.uint8))
    words = Words.of(Quantised(kind, held, torch.ones(count, 1), columns))
    for first in range(0, columns, 16):
        x = torch.eye(columns, dtype=dtype)[first : first + 16]
        assert torch.equal(multiply_few_bits(x, words).t().long(), values[:, first : first + 16])


@pytest.mark.parametrize(
    "kind, group, gated, dtype",
    [
        ("int4", 32, True, BF16),
        ("int4", 32, False, F32),
        ("int8", 64, False, F32),
        ("int8", 0, True, BF16),
    ],
)
def test_a_rows_bits_do_not_depend_on_its_neighbours(kind, group, gated, dtype):
    """A row alone, at any place and among any number of rows."""
    words = Words.of(matrix(kind, 42, 1152, group, scales=BF16))
    x = torch.randn(16, 1152, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = 0, 1, 2, 4, 7, 8, 11, 15
    alone = {j: multiply_few_bits(x[j : j + 1], words, gated=gated)[0] for j in places}
    for first, count in ((0, 2), (0, 3), (0, 4), (0, 5), (0, 8), (0, 16), (7, 5)):
        found = multiply_few_bits(x[first : first + count], words, gated=gated)
        for j in places:
            if first <= j < first + count:
                assert torch.equal(found[j - first], alone[j]), f"row {j} among {count}"


@pytest.mark.parametrize("kind, group", [("int4", 32), ("int4", 128), ("int8", 64), ("int8", 0)])
@pytest.mark.parametrize("rows", [9, 16, 33])
def test_tiles(kind, group, rows):
    """Rows, outputs and columns beyond whole tiles; with a bias."""
    inputs, outputs = (300 if not group else 5 * max(group, 64)), 45
    weight = matrix(kind, outputs, inputs, group, scales=BF16)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    exact, plain = rows_of(x, weight, BF16)
    found = multiply_tiles(x, Words.of(weight), bias)
    assert_close(found, exact + bias.double(), plain + bias, BF16, kind)


def test_the_tiles_of_a_prompt_are_those_of_few_rows(monkeypatch):
    """More rows than one tile has, in tiles as prefill launches them."""
    assert tile_config(512, 4096, "int4")[:2] == (128, 64)
    assert tile_config(17, 4096, "int8")[:2] == (32, 32)
    # a card of fewer SMs has enough programs of wide tiles
    wide = [tile_config(512, 4096, "int4", sms).outputs for sms in (8, 48, 132)]
    assert wide == [128, 128, 64]
    weight = matrix("int4", 130, 256, 64, scales=BF16)
    x = torch.randn(140, 256, generator=torch.Generator().manual_seed(0)).half()
    exact, plain = rows_of(x, weight, F16)
    assert_close(multiply_tiles(x, Words.of(weight)), exact, plain, F16, "chunk")


HOSTILE = ("zeros", "outlier", "subnormal", "constant")


@pytest.mark.parametrize("which", HOSTILE)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_hostile_values(which, kind, rows):
    """As our own rounding makes them of such weights; nothing becomes NaN or infinite."""
    wide = torch.randn(12, 128, generator=torch.Generator().manual_seed(1)) / 11
    wide[3] = 0
    if which == "zeros":
        wide.zero_()
    if which == "outlier":
        wide[5, 77] = 3e4
    if which == "subnormal":
        wide[4:9] *= 1e-39
    if which == "constant":
        wide[:] = 0.3
    weight = to_int4(wide, 32) if kind == "int4" else to_int8(wide, 64)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(2))
    x[0, 7] = 3e3
    x = x.bfloat16()
    exact, plain = rows_of(x, weight, BF16)
    found = multiply_words(x, Words.of(weight))
    assert torch.isfinite(found).all()
    if which == "zeros":
        assert not found.any()
    assert_close(found, exact, plain, BF16, which)


def test_act_order():
    """Inputs in the order in which the groups hold them, for few rows and for many."""
    order = torch.randperm(192, generator=torch.Generator().manual_seed(5))
    weight = replace(matrix("int4", 20, 192, 64, scales=BF16), permutation=order)
    linear = QuantisedLinear(weight, None, BF16, "words")
    assert torch.equal(linear.weight, weight.dense(BF16))
    for rows in (1, 8, 20):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).bfloat16()
        exact, plain = rows_of(x, weight, BF16)
        assert_close(linear(x), exact, plain, BF16, f"{rows} rows")


def model(word, step="fused", **changes):
    config = tiny_config(layers=2, hidden=64, head_dim=16, **changes)
    stream = lambda *args: random_stream(*args, seed=5)  # noqa: E731
    return LLM.from_stream(
        config, stream, weights=word, backend="triton", step=step, device="cpu",
        max_context=256, method=Full(),
    )  # fmt: skip


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_fused_step_multiplies_words(word):
    """A whole session: the step on our own kernels is the step that dequantises."""
    llm = model(word, attention_bias=True)
    assert llm.model.nbytes == llm.plan().bytes_of("weights")
    note = next(note for name, _, note in llm.plan().items if name == "weights")
    assert "dequantised in registers" in note
    held, answers = matrices(llm.model), []
    assert {m.form for m in held} == {"words"} and len(held) == 9
    for dequantises in (False, True):
        for one in held:
            one.dequantises = dequantises
        with LLM.sharing(llm, step="plain" if dequantises else "fused").session() as session:
            session.prefill(random_ids(70))
            answers.append(session.decode(3))
            assert session.runner.fused != dequantises
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_fails_or_lies_is_not_used(monkeypatch):
    """As on a GPU: a warning that says why, and products that dequantise."""
    monkeypatch.setattr(engine.forward.self_test, "ROWS", 700)
    monkeypatch.setattr(engine.forward.self_test, "is_tested", lambda device: True)
    llm = model("int4", step="auto")
    sizes = llm.model, llm.rotary, llm.load().pieces, "auto", "triton"
    assert isinstance(step_layer(*sizes), FusedLayer)

    def lies(x, weight, bias=None):
        return multiply_words(x, weight, bias) * 1.5

    def fails(*arguments):
        raise RuntimeError("PassManager::run failed")

    for planted, said in ((lies, "1 rows, differs by"), (fails, "RuntimeError: PassManager")):
        with monkeypatch.context() as patch:
            patch.setattr("kernels.quant.linear.multiply_words", planted)
            with pytest.warns(UserWarning, match=f"dequantised for every product.*{said}"):
                found = step_layer(*sizes)
        assert not isinstance(found, FusedLayer)
        for one in matrices(llm.model):
            assert one.dequantises
            one.dequantises = False


def test_torch_compile_takes_a_product_as_one_operator():
    """A layer's half with weights of few bits is one graph, as with floats, and gives the same."""
    linear = QuantisedLinear(matrix("int4", 20, 64, 32), torch.randn(20), F32, "words")
    compiled = torch.compile(lambda x: linear(x) + 1, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 1, 64)
    assert torch.equal(compiled(x), linear(x) + 1)
