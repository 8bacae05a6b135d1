"""The launches of a decode step around its attention, interpreted: products with what follows them,
norm, rotation and store; and the merge by whichever program ends last.

Stops: an output that a program beside it writes, a residual or a bias added twice or rounded
elsewhere than in the plain form, a row that lands beside its place, a ticket left over.
"""

import dataclasses

import pytest
import torch

import engine.forward.self_test
from engine import Full, OmniKV
from engine.base.errors import SettingError
from engine.forward.layer import FusedLayer, fusable
from engine.forward.self_test import step_layer
from kernels.attention.scratch import make_scratch
from kernels.layer.gemv import multiply_rows, multiply_rows_ref
from kernels.layer.norm import normalize_rows, normalize_rows_ref
from kernels.layer.rotate_store import rotate_store, rotate_store_ref
from tests.builders import random_ids, session_config, tiny_llm
from tests.kernels.support.host_checks import STORES
from tests.kernels.support.kernel_checks import assert_close, check_dense, check_sparse

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def made(seed, *shapes, dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def close(found, run, dtype, *arguments, **named):
    """`found` against the reference in float64, by the rule of
    tests/kernels/support/kernel_checks.py.
    """
    wide = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in arguments]
    also = {n: t.double() if torch.is_tensor(t) else t for n, t in named.items()}
    if also.get("out_dtype"):
        also["out_dtype"] = torch.float64
    exact, plain = run(*wide, **also), run(*arguments, **named)
    assert found.dtype == plain.dtype and found.shape == plain.shape
    assert_close(found, exact, plain, dtype, run.__name__)


@pytest.mark.parametrize(
    "rows, outputs, inputs, dtype, extras",
    [
        (1, 5, 40, F16, ()),
        (1, 1, 1, F32, ("bias",)),
        (1, 37, 1300, BF16, ("bias", "residual")),
        (1, 22, 96, F32, ("residual",)),
        (1, 19, 1024, BF16, ("gated", "bias")),
        (2, 9, 700, F16, ("residual",)),
        (3, 11, 130, BF16, ("gated", "residual", "bias")),
        (8, 18, 300, BF16, ("bias", "wide")),
        (16, 33, 523, BF16, ("residual",)),
        (13, 16, 256, F32, ("gated",)),
    ],
)
def test_products(rows, outputs, inputs, dtype, extras):
    """Outputs and inputs that fill no tile; every epilogue with one row and with several."""
    stored = outputs * (2 if "gated" in extras else 1)
    x, weight, bias, residual = made(
        rows * outputs, (1, rows, inputs), (stored, inputs), (stored,), (1, rows, outputs),
        dtype=dtype,
    )  # fmt: skip
    weight = (weight.float() * inputs**-0.5).to(dtype)
    named = dict(
        bias=bias if "bias" in extras else None,
        residual=residual if "residual" in extras else None,
        gated="gated" in extras,
        out_dtype=F32 if "wide" in extras else None,
    )
    found = multiply_rows(x, weight, **named)
    close(found, multiply_rows_ref, dtype, x, weight, **named)


def test_a_product_refuses_more_rows():
    x, weight = made(0, (17, 16), (16, 16))
    with pytest.raises(ValueError, match="found 17 rows, expected 1 to 16"):
        multiply_rows(x, weight)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("extras", [(), ("gated", "bias"), ("residual",)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype, extras):
    """A row alone, at any place and among any number of rows."""
    outputs, inputs = 21, 1100
    stored = outputs * (2 if "gated" in extras else 1)
    x, weight, bias, residual = made(
        3, (1, 16, inputs), (stored, inputs), (stored,), (1, 16, outputs), dtype=dtype
    )

    def run(rows):
        return multiply_rows(
            x[:, rows].contiguous(),
            weight,
            bias if "bias" in extras else None,
            residual[:, rows].contiguous() if "residual" in extras else None,
            "gated" in extras,
        )

    alone = torch.cat([run(slice(j, j + 1)) for j in range(16)], 1)
    for count in (2, 3, 4, 5, 8, 16):
        assert torch.equal(run(slice(count)), alone[:, :count]), f"{count} rows"
    assert torch.equal(run(slice(7, 12)), alone[:, 7:12])


@pytest.mark.parametrize(
    "rows, size, dtype", [(1, 1, F32), (3, 40, F16), (8, 576, BF16), (1, 5000, F32)]
)
def test_norm(rows, size, dtype):
    x, weight = made(size, (rows, size), (size,), dtype=dtype)
    x[0] *= 30
    close(normalize_rows(x, weight, 1e-5), normalize_rows_ref, dtype, x, weight, 1e-5)


@pytest.mark.parametrize("shape", STORES)
def test_rotation_and_store_are_those_of_the_two_launches(shape):
    """Rows, ring and rotated queries; every other row of the bank and of the ring stays."""
    dtype = shape.get("dtype", F32)
    batch, queries = shape.get("batch", 1), shape.get("queries", 1)
    heads_kv, group = shape.get("kv_heads", 2), shape.get("group", 4)
    dim = shape.get("dim", 64) // 2 * 2
    capacity, slots, twice = shape.get("capacity", 200), shape.get("slots", 128), shape.get("twice")
    heads = heads_kv * group
    qkv, bank, ring, angle = made(
        3, (batch, queries, heads + 2 * heads_kv, dim), (batch, capacity, 2, heads_kv, dim),
        (batch, slots, heads, dim), (batch, queries, dim // 2), dtype=dtype,
    )  # fmt: skip
    cos, sin = angle.float().cos(), angle.float().sin()
    starts = torch.randint(0, capacity - queries + 1, (batch, 1))
    positions = starts + torch.arange(queries)
    banks = [bank.clone(), bank.clone()]
    rings = [ring.clone(), ring.clone()]
    found = [
        run(qkv, cos, sin, *rows.permute(2, 0, 3, 1, 4), one, positions, twice)
        for run, rows, one in zip((rotate_store, rotate_store_ref), banks, rings, strict=True)
    ]
    assert torch.equal(rings[0], rings[1])
    for mine, theirs in ((found[0], found[1]), (banks[0], banks[1])):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 if dtype == F32 else 2**-7 * 4)
        assert (mine == theirs).float().mean() > 0.9  # all but last bits of a rotation
    changed = (banks[0] != bank).any(-1).any(-1).any(-1)
    assert changed.sum() == batch * queries * (1 if twice is None else 2)


@pytest.mark.parametrize(
    "check, arguments, shape",
    [
        (check_dense, ([0, 1, 513],), dict(kind="softmax", head_dim=32)),
        (check_dense, ([2600],), dict(queries=3, kv_heads=1, group=2, head_dim=16)),
        # query tiles of their own tickets
        (check_dense, ([700, 77],), dict(queries=8, group=16, head_dim=32, kv_heads=1)),
        (check_sparse, ([0, 300], [5, 80]), dict(kv_heads=1, head_dim=32, budget=300)),
    ],
)
def test_the_last_program_merges_what_a_launch_merges(check, arguments, shape, monkeypatch):
    """The same bits as from launches of their own, in two levels and in one, and no ticket left."""
    monkeypatch.setattr("kernels.attention.scratch.MERGE_CHUNK", 2)
    monkeypatch.setattr("kernels.attention.dense.MERGE_CHUNK", 2)
    monkeypatch.setattr("kernels.attention.sparse.SPARSE_CHUNK", 2)
    used, results = [], []
    for lasts in (True, False):

        def scratch_made(*given, lasts=lasts):
            scratch = make_scratch(*given)
            if not lasts:
                scratch = dataclasses.replace(scratch, tickets=torch.empty(0, dtype=torch.int32))
            used.append(scratch)
            return scratch

        for module in ("dense", "sparse"):
            monkeypatch.setattr(f"kernels.attention.{module}.make_scratch", scratch_made)
        results.append(check("cpu", "triton", *arguments, **shape))
    assert [scratch.merges_last for scratch in used] == [True, False]
    assert used[0].tickets.numel() and not used[0].tickets.any()
    first, second = (r if isinstance(r, tuple) else (r, None) for r in results)
    assert torch.equal(first[0], second[0])
    assert first[1] is None or torch.equal(first[1], second[1])


def test_a_fused_step_is_the_plain_step():
    """A whole session on our own kernels, against the reference launchers: sparse steps, biases,
    weights of the embedding itself.
    """
    method = OmniKV(filter_layers=(0,), tokens=16, tail=64, dense_below=0)
    config = session_config(layers=2)
    answers = []
    for settings in (dict(backend="triton", step="fused"), dict(backend="reference")):
        llm = tiny_llm(method, config, max_context=256, chunk=128, **settings)
        with llm.session() as session:
            session.prefill(random_ids(150))
            answers.append(torch.stack([session.decode(token) for token in (3, 4)]))
            assert session.stats.sparse_steps == 2
            fused = settings["backend"] == "triton"
            assert session.runner.fused == fused
            assert session.runtime.setup.scratch.merges_last == fused
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_fails_or_lies_leaves_the_plain_form(monkeypatch):
    """As on a GPU, with the self-test's answers planted: it says why, once, and the step is
    torch's. A self-test that agrees gives our own kernels.
    """
    llm = tiny_llm(Full(), session_config(layers=1), max_context=256, backend="triton")
    monkeypatch.setattr(engine.forward.self_test, "ROWS", 700)
    monkeypatch.setattr(engine.forward.self_test, "is_tested", lambda device: True)
    sizes = llm.model, llm.rotary, llm.load().pieces
    assert isinstance(step_layer(*sizes, "auto", "triton"), FusedLayer)
    assert not isinstance(step_layer(*sizes, "plain", "triton"), FusedLayer)

    def lies(x, weight, *arguments, **named):
        return multiply_rows_ref(x, weight, *arguments, **named) * 1.5

    def fails(*arguments, **named):
        raise RuntimeError("PassManager::run failed")

    for planted, said in (
        (lies, "query differs by"),
        (fails, "a kernel fails: RuntimeError: PassManager::run failed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("engine.forward.layer.multiply_rows", planted)
            with pytest.warns(UserWarning, match=f"on torch's operators: .*{said}"):
                found = step_layer(*sizes, "auto", "triton")
        assert not isinstance(found, FusedLayer)
    with pytest.raises(SettingError, match="step: found 'fused', expected 'auto' or 'plain'"):
        step_layer(*sizes, "fused", "cpu")


@pytest.mark.parametrize("family", ["qk_norm", "activation", "residual", "logits"])
def test_a_block_that_is_not_llamas_keeps_torchs_operators(family):
    """A family whose layers do something more must not lose it in silence."""
    llm = tiny_llm(Full(), session_config(layers=1), max_context=256, backend="triton")
    assert fusable(llm.model)
    value = dict(qk_norm="head", activation="gelu_tanh", residual=0.5, logits=0.1)[family]
    block = dataclasses.replace(llm.config.block, **{family: value})
    config = dataclasses.replace(llm.config, block=block)
    assert not fusable(dataclasses.replace(llm.model, config=config))
