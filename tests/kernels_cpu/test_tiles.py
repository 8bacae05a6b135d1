"""Kernels that multiply in tiles of AMX, by the tiles of amx.h in plain C++: against float64, and
against the kernels of vectors, whose whole numbers they have.

Stops: an instruction that is used otherwise than Intel says, a tail that reads its neighbours, a
softmax that runs before its products, a build without the instructions, tiles that nobody asked
for.
"""

import contextlib
import ctypes
import math
import os
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kernels.layer.linear
import kernels.layer.many.tiles
import kernels.prefill.native
import kernels.quant.linear
import kernels.quant.native
from engine.load import loaded
from engine.load.options import Options
from kernels.launch import isa
from kernels.launch.softmax import PLAIN, Softmax
from kernels.layer.linear import pack_linear
from kernels.layer.many import strips
from kernels.layer.many.tiles import TiledProduct
from kernels.native import amx, library
from kernels.prefill.native import attend_prompt, attends_prompt
from kernels.quant.native import INTEGER_FOLDS, PARTS, Panels, _fold, product
from kernels.rows.forms import FORMS
from tests.kernels.support.kernel_checks import assert_close, plain
from tests.kernels_cpu.reference_tiles import TILED, compiled
from tests.kernels_cpu.test_native_few_bits import drawn as drawn_weight
from tools.speed import amx as speed

pytestmark = [
    pytest.mark.skipif(bool(library.missing()), reason=library.missing()),
    pytest.mark.skipif(
        not torch.cpu._is_avx512_bf16_supported(), reason="vectors beside tiles are AVX512-BF16's"
    ),
]
FORM = FORMS[torch.int8]
PLACES = kernels.prefill.native, kernels.quant.native, kernels.layer.many.tiles
# of amx.h: odd elements of pairs are left out
WRONG = "tile_bfloat16(a[k] + 2 * i)", "tile_bfloat16(a[k])"


class Beside:
    """The library of the tiles' reference, and that of AVX512-BF16 for all else."""

    def __init__(self, tiled, vectors):
        self.tiled, self.vectors = tiled, vectors

    def __getattr__(self, name):
        return getattr(self.tiled if "tile" in name else self.vectors, name)


@pytest.fixture(scope="module")
def vectors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "isa", lambda: "avx512_bf16")
        return library._loaded()


@pytest.fixture(scope="module")
def made(tmp_path_factory, vectors):
    """Both libraries."""
    return Beside(compiled(tmp_path_factory.mktemp("tiles"), *TILED), vectors)


@contextlib.contextmanager
def in_place(of):
    """Put libraries in place of this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            patch.setattr(place, "loaded", lambda: of)
        patch.setattr(kernels.quant.native, "prefers_integers", lambda made: True)
        yield


@pytest.fixture(scope="module")
def tiles(made):
    with in_place(made):
        yield made


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the instructions

PROBE = """
#include "amx.h"
typedef const unsigned char *Bytes;
static const char *run(Bytes shapes, void *c, Bytes a, Bytes b, int what) {
    TileShapes s;
    memcpy(&s, shapes, sizeof s);
    tile_machine().fault = nullptr;
    tile_configure(s);
    tile_load<0>(c, 64), tile_load<1>(a, 64), tile_load<2>(b, 64);
    if (what == 0) tile_pairs<0, 1, 2>();
    if (what == 1) tile_signed<0, 1, 2>();
    if (what == 2) tile_unsigned<0, 1, 2>();
    if (what == 3) tile_pairs<0, 1, 1>();
    tile_store<0>(c, 64);
    tile_release();
    return tile_fault();
}
extern "C" const char *probe(Bytes s, void *c, Bytes a, Bytes b, int what) {
    return run(s, c, a, b, what);
}
"""
PAIRS, SIGNED, UNSIGNED, ITSELF = range(4)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """(kind of product, c, a, b, shapes) -> what went wrong, "" where nothing did; c changes."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(PROBE)
    run = compiled(folder, "probe.cpp").probe
    run.restype = ctypes.c_char_p

    def call(what, c, a, b, rows=(16, 16, 16), widths=(64, 64, 64), palette=1, start=0):
        shapes = bytearray(64)
        shapes[:2] = palette, start
        for tile in range(3):
            shapes[16 + 2 * tile], shapes[48 + tile] = widths[tile], rows[tile]
        held = (ctypes.c_ubyte * 64)(*shapes)
        said = run(held, *(ctypes.c_void_p(t.data_ptr()) for t in (c, a, b)), what)
        return (said or b"").decode()

    return call


def woven(b, together):
    """[k, n] as a tile of the right factor has it: `together` numbers of a column side by side."""
    return b.unflatten(0, (-1, together)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("m, k, n", [(16, 16, 16), (1, 16, 16), (5, 3, 7), (16, 1, 1)])
def test_a_product_of_bytes_is_exact_and_wraps_around(probe, m, k, n):
    generator = torch.Generator().manual_seed(m + k + n)
    for what, least, most in ((SIGNED, -128, 128), (UNSIGNED, 0, 256)):
        a = torch.randint(least, most, (m, 4 * k), generator=generator)
        a[0] = most - 1
        b = torch.randint(-128, 128, (4 * k, n), generator=generator)
        b[:, 0] = -128
        c = torch.randint(-(2**31), 2**31, (m, n), generator=generator)
        c[0, 0] = -(2**31)
        held = [torch.zeros(16, 64, dtype=torch.uint8) for _ in range(3)]
        held[0][:m, : 4 * n] = c.int().view(torch.uint8)
        held[1][:m, : 4 * k] = a.to(torch.uint8)
        held[2][:k, : 4 * n] = woven(b, 4).to(torch.uint8).view(k, -1)
        assert not probe(what, *held, (m, m, k), (4 * n, 4 * k, 4 * n))
        expected = (c + a @ b + 2**31) % 2**32 - 2**31
        assert torch.equal(held[0][:m, : 4 * n].contiguous().view(torch.int32).long(), expected)
        assert not held[0][m:].any() and not held[0][:, 4 * n :].any()


def of_pairs(probe, a, b, c):
    """c [16, 16] float32 + a [16, 32] b [32, 16], bfloat16."""
    held = c.clone()
    assert not probe(PAIRS, held, a.bfloat16().contiguous(), woven(b.bfloat16(), 2))
    return held


def test_a_product_of_pairs_sums_even_and_odd_elements_apart(probe):
    a, b = (drawn(1, 16, 32) * 16).round() / 16, (drawn(2, 32, 16) * 16).round() / 16
    c = (drawn(3, 16, 16) * 16).round() / 16
    assert torch.equal(of_pairs(probe, a, b, c).double(), c.double() + a.double() @ b.double())
    # 2^24 + 1 is no float32: only an odd sum of its own keeps the 1
    a, b = torch.zeros(16, 32), torch.zeros(32, 16)
    a[:, 0], a[:, 1], a[:, 2] = 2.0**12, 1.0, -(2.0**12)
    b[0], b[1], b[2] = 2.0**12, 1.0, 2.0**12
    assert (of_pairs(probe, a, b, torch.zeros(16, 16)) == 1).all()
    # and c comes last: 2^24 + (1 + 1)
    a[:, 0], a[:, 2] = 1.0, 0.0
    b[0] = 1.0
    assert (of_pairs(probe, a, b, torch.full((16, 16), 2.0**24)) == 2**24 + 2).all()


def test_a_product_of_pairs_has_no_numbers_below_the_least_normal_one(probe):
    a, b, zero = torch.zeros(16, 32), torch.zeros(32, 16), torch.zeros(16, 16)
    a[:, 0], b[0] = 2.0**-130, 2.0**100  # a number that bfloat16 has, and this product takes for 0
    assert a.bfloat16()[0, 0] > 0 and not of_pairs(probe, a, b, zero).any()
    a[:, 0], b[0] = 2.0**-70, 2.0**-70  # a result of that size
    assert not of_pairs(probe, a, b, zero).any()
    assert not of_pairs(probe, zero.repeat(1, 2), b, torch.full((16, 16), 2.0**-130)).any()
    a[0, 0], b[0] = math.inf, 0.0
    found = of_pairs(probe, a, b, zero)
    assert found[0].isnan().all() and not found[1:].any()


def test_what_would_raise_an_exception_is_said(probe):
    held = [torch.zeros(16, 64, dtype=torch.uint8) for _ in range(3)]
    right = dict(rows=(4, 4, 8), widths=(32, 32, 32))
    assert not probe(PAIRS, *held, **right)
    for what, change in (
        ("not configured", dict(palette=0)),
        ("configuration", dict(palette=2)),
        ("configuration", dict(start=1)),
        ("configuration", dict(rows=(17, 4, 8))),
        ("configuration", dict(widths=(32, 65, 32))),
        ("configuration", dict(rows=(0, 4, 8))),
        ("do not meet", dict(rows=(4, 5, 8))),
        ("do not meet", dict(rows=(4, 4, 7))),
        ("do not meet", dict(widths=(28, 32, 32))),
        ("part of 4 bytes", dict(widths=(34, 32, 34))),
    ):
        assert what in probe(PAIRS, *held, **(right | change)), change
    assert "itself" in probe(ITSELF, *held, **right)


# ---- attention


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 15, 16, 17, 31, 33, 61]),
    past=st.sampled_from([0, 1, 15, 225, 241, 255, 256, 257]),  # rows that see one key of 257
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    size=st.sampled_from([1.0, 30.0, 1e-4]),
    seed=st.integers(0, 99),
)
def test_attention_errs_no_more_than_twice_torchs(tiles, chunk, past, group, dim, size, seed):
    n, scale = past + chunk, dim**-0.5
    k, v = drawn(seed, 2, 2, n, dim).bfloat16()
    q = (drawn(seed + 1, chunk, 2 * group, dim) * size).bfloat16()
    visible = list(range(past + 1, n + 1))
    found, lse = attend_prompt(q, k, v, scale, past, tiled=True)
    exact, logits = plain(q, k, v, visible, scale, torch.float64)
    assert_close(found, exact, plain(q, k, v, visible, scale, q.dtype)[0], q.dtype, "attention")
    largest = logits[logits.isfinite()].abs().max().item()
    assert torch.allclose(lse.double(), logits.logsumexp(-1), atol=1e-4 * (1 + largest), rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 15, 16, 17, 31, 33, 61]),
    past=st.sampled_from([0, 1, 15, 225, 241, 255, 256, 257]),  # rows that see one key of 257
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_attention_to_int8_rows_has_the_bits_of_vectors(
    tiles, chunk, past, group, dim, dtype, seed
):
    rows = drawn(seed, 2, 2, past + chunk, dim)
    rows[:, :, -1] *= 20
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = drawn(seed + 1, chunk, 2 * group, dim).to(dtype)
    found = attend_prompt(q, k, v, dim**-0.5, past, tiled=True)
    expected = attend_prompt(q, k, v, dim**-0.5, past, tiled=False)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_caps_windows_and_chosen_rows_see_what_they_should(tiles):
    rows = drawn(1, 2, 2, 700, 64)
    packed = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = (drawn(2, 40, 6, 64) * 4).bfloat16()
    chosen = torch.randperm(600, generator=torch.Generator().manual_seed(3))[:300].sort().values
    index = chosen.int()[None]
    for k, v in (rows.bfloat16(), packed):
        for softmax in (PLAIN, Softmax(cap=5.0)):
            for case in (dict(window=300), dict(index=index, kept=300, start=660), {}):
                some = q, k, v, 0.125, 660
                expected = attend_prompt(*some, softmax=softmax, tiled=False, **case)[0]
                found = attend_prompt(*some, softmax=softmax, tiled=True, **case)[0]
                assert (found - expected).norm() <= 3e-3 * expected.norm()
                whole = attend_prompt(*some[:4], None, softmax=softmax, tiled=True)[0]
                assert (found - whole).norm() > 0.1 * whole.norm() or not case


def test_what_is_not_finite_shows_and_stays(tiles):
    rows = drawn(4, 2, 1, 300, 64)
    q = drawn(5, 9, 2, 64).bfloat16()
    for k, v in (rows.bfloat16(), (FORM.keys.pack(rows[0]), FORM.values.pack(rows[1]))):
        whole = attend_prompt(q, k, v, 0.125, 291, tiled=True)[0]
        for bad in (math.nan, math.inf):
            spoilt = q.clone()
            spoilt[4, 1, 7] = bad
            found = attend_prompt(spoilt, k, v, 0.125, 291, tiled=True)[0]
            assert not found[4, 1].isfinite().any()
            found[4, 1] = whole[4, 1]
            assert torch.equal(found, whole)


# ---- products


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 15, 17, 32, 33, 97, 515]),
    outputs=st.sampled_from([1, 15, 16, 31, 33, 80]),
    inputs=st.sampled_from([1, 2, 31, 33, 255, 256, 257, 600]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_of_bfloat16_errs_no_more_than_twice_torchs(
    tiles, rows, outputs, inputs, bias, seed
):
    weight, x = drawn(seed, outputs, inputs).bfloat16(), drawn(seed + 1, rows, inputs).bfloat16()
    beside = drawn(seed + 2, outputs).bfloat16() if bias else None
    exact = F.linear(x.double(), weight.double(), beside.double() if bias else None)
    found = TiledProduct(weight, beside)(x)
    assert_close(found, exact, F.linear(x, weight, beside), torch.bfloat16, "a product")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["int8", "int4"]),
    outputs=st.sampled_from([1, 15, 17, 33, 70]),
    words=st.sampled_from([1, 3, 32, 70, 141]),
    group=st.sampled_from([32, 48, 64, 80, 96, 112, 128, 0]),
    offsets=st.booleans(),
    scales=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    rows=st.sampled_from([32, 33, 47, 515]),
    seed=st.integers(0, 99),
)
def test_a_product_of_few_bits_has_the_bits_of_vectors(
    tiles, kind, outputs, words, group, offsets, scales, dtype, rows, seed
):
    columns = words * PARTS[kind]
    columns -= 2 if not group and columns > 4 else 0  # a row that ends within a word
    panels = Panels.of(
        drawn_weight(kind, outputs, columns, group or columns, offsets, scales, seed)
    )
    assume(_fold(panels.group, columns, PARTS[kind]) in INTEGER_FOLDS)
    x, bias = drawn(seed, rows, columns).to(dtype), drawn(seed + 1, outputs).to(dtype)
    x[0] *= 1e-20 if dtype == torch.bfloat16 else 1e-4
    x[rows // 2, 0] = math.inf
    found = product(x, panels, bias, tiled=True)
    assert torch.equal(found.nan_to_num(7), product(x, panels, bias, tiled=False).nan_to_num(7))
    exact = x.double() @ panels.rows(slice(None), torch.float64).t() + bias.double()
    near = (found.double() - exact)[exact.isfinite()].norm() / exact[exact.isfinite()].norm()
    assert near <= 2.5 * torch.finfo(dtype).eps


def test_what_is_not_finite_stays_in_its_row_of_a_product(tiles):
    weight, x = drawn(1, 20, 33).bfloat16(), drawn(2, 35, 33).bfloat16()
    whole = TiledProduct(weight)(x)
    x[7, 0] = math.inf  # behind the tail of row 6
    found = TiledProduct(weight)(x)
    assert not found[7].isfinite().any()
    found[7] = whole[7]
    assert torch.equal(found, whole)


def test_results_do_not_depend_on_the_threads(tiles):
    rows = drawn(6, 2, 2, 300, 64).bfloat16()
    q, before, found = drawn(7, 300, 8, 64).bfloat16(), torch.get_num_threads(), []
    x, weight = drawn(8, 600, 300).bfloat16(), drawn(9, 100, 300).bfloat16()
    panels = Panels.of(drawn_weight("int4", 100, 320, 64, False, torch.float16, 3))
    wide = drawn(10, 600, 320).bfloat16()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        attended = attend_prompt(q, *rows, 0.125, 0, tiled=True)[0]
        found.append([attended, TiledProduct(weight)(x), product(wide, panels, tiled=True)])
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found))


# ---- controls


def test_wrong_tiles_are_noticed(vectors, tmp_path):
    """The same checks, by tiles of which two do something else."""
    header = (library.FOLDER / "amx.h").read_text()
    unsigned = "tile_bytes<uint8_t, C, A, B>"
    assert header.count(WRONG[0]) == header.count(unsigned) == 1
    broken = header.replace(*WRONG).replace(unsigned, unsigned.replace("uint8", "int8"))
    made = compiled(tmp_path, *TILED, change=(header, broken))
    with in_place(Beside(made, vectors)):
        for check in (
            test_attention_errs_no_more_than_twice_torchs,
            test_attention_to_int8_rows_has_the_bits_of_vectors,
            test_a_product_of_bfloat16_errs_no_more_than_twice_torchs,
            test_a_product_of_few_bits_has_the_bits_of_vectors,
        ):
            cases = dict(
                chunk=17, past=15, group=4, dim=64, size=1.0, dtype=torch.bfloat16, seed=1,
                rows=33, outputs=17, inputs=257, bias=True, kind="int8", words=32,
                offsets=False, scales=torch.float32,
            )  # fmt: skip
            if "few_bits" in check.__name__:
                cases["group"] = 64
            inner = check.hypothesis.inner_test
            names = inner.__code__.co_varnames[1 : inner.__code__.co_argcount]
            with pytest.raises(AssertionError):
                inner(None, **{name: cases[name] for name in names})


# ---- the build, and who asks for it


@pytest.fixture
def on_amx(made, monkeypatch):
    """A CPU with AMX, as far as Python sees, whose library is the reference."""
    library.native()  # of all other kernels
    monkeypatch.setattr(isa, "isa", lambda: "amx")
    for place in (kernels.prefill.native, kernels.layer.linear, strips, library):
        monkeypatch.setattr(place, "isa", lambda: "amx")
    for place in PLACES:
        monkeypatch.setattr(place, "loaded", lambda: made)
    monkeypatch.setattr(amx, "native", lambda: made)
    monkeypatch.setattr(library, "native", lambda: made)
    monkeypatch.delenv("OMNIKV_AMX", raising=False)
    amx.refused.cache_clear()
    yield monkeypatch
    amx.refused.cache_clear()


def test_tiles_run_only_where_they_are_asked_for(on_amx):
    q, k, v = drawn(1, 2, 8, 16).bfloat16(), *drawn(2, 2, 2, 40, 16).bfloat16()
    int8 = FORM.keys.pack(k.float()), FORM.values.pack(v.float())
    weight = drawn(3, 20, 32).bfloat16()
    assert library._set() == "avx512_bf16" and not amx.wanted() and amx.in_use() == ()
    assert not attends_prompt(q, k, v) and pack_linear(weight).many is None
    on_amx.setattr(kernels.layer.linear, "reads", lambda weight: True)
    on_amx.setenv("OMNIKV_AMX", "1")
    assert library._set() == "amx" and amx.wanted()
    assert attends_prompt(q, k, v) and attends_prompt(q, *int8)
    assert not attends_prompt(q.half(), k.half(), v.half())
    assert not attends_prompt(q.float(), k.float(), v.float())
    assert not attends_prompt(q.float(), *int8)
    linear, x = pack_linear(weight), drawn(4, 40, 32).bfloat16()
    ran = []
    on_amx.setattr(TiledProduct, "__call__", lambda self, x: ran.append(len(x)) or x)
    linear(x)
    linear(x[:31])
    linear.on_torch()(x)
    assert ran == [40]
    # rows that are kept say so
    names = amx.in_use()
    assert "a prompt's attention in tiles" in names and "products in tiles" in names
    on_amx.setattr(loaded, "matrices", lambda model: [])
    given = Options()
    assert loaded._held(given, None).startswith("auto, ") and names[0] in loaded._held(given, None)
    on_amx.delenv("OMNIKV_AMX")
    assert loaded._held(given, None) == "auto"


def test_what_the_self_test_finds_wrong_is_not_used(on_amx):
    on_amx.setenv("OMNIKV_AMX", "1")
    binding, right = kernels.prefill.native._TILED, kernels.prefill.native.attend_prompt
    on_amx.setattr(binding, "_tried", (None, ""))
    on_amx.setattr(
        kernels.prefill.native, "attend_prompt", lambda *a, **b: (right(*a, **b)[0] * 1.1, None)
    )
    assert not binding.usable() and "differs" in binding._tried[1]
    q, k, v = drawn(1, 2, 8, 16).bfloat16(), *drawn(2, 2, 2, 40, 16).bfloat16()
    assert not attends_prompt(q, k, v)


def test_a_system_that_refuses_tiles_is_said_once(on_amx):
    on_amx.setenv("OMNIKV_AMX", "1")

    class Refusing:
        def omnikv_allow_tiles(self):
            return 2

    refusing = Refusing()
    on_amx.setattr(amx, "native", lambda: refusing)
    with pytest.warns(UserWarning, match="OMNIKV_AMX=1 changes nothing here: the system") as said:
        assert not amx.wanted() and not amx.wanted()
    assert len(said) == 1 and amx.in_use() == ()


def test_a_compiler_without_amx_makes_the_set_below(on_amx):
    on_amx.setenv("OMNIKV_AMX", "1")
    on_amx.setattr(library, "_knows", lambda compiler, name: name != "amx")
    assert library._compiler()[1] == (*library.FLAGS, *library.SETS["avx512_bf16"])
    on_amx.undo()
    assert library._knows(library._found_compiler(), "avx2")
    assert not library._knows("false", "amx")


def test_the_build_for_amx_has_its_instructions(tmp_path):
    compiler = library._found_compiler()
    if not library._knows(compiler, "amx") or not shutil.which("objdump"):
        pytest.skip("no compiler that knows AMX, or no objdump")
    amx_flags = library.SETS["amx"][len(library.SETS["avx512_bf16"]) :]
    made = compiled(tmp_path, *TILED, flags=("-w", *amx_flags))
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(tmp_path / "tiles.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    counts = {name: listing.count(f"{name} ") for name in ("tdpbf16ps", "tdpbssd", "tdpbusd")}
    assert all(counts.values()), counts
    for name in ("ldtilecfg", "tileloadd", "tilestored", "tilezero", "tilerelease"):
        assert name in listing
    # the softmax of one tile runs between the products of others
    between = listing[listing.index("tdpbf16ps") :].split("tdpbf16ps")[1:-1]
    assert any("vscalefps" in part or "call" in part for part in between)
    if not torch.cpu._is_amx_tile_supported():
        assert made.omnikv_allow_tiles() == 2  # Linux has none to give here
    (tmp_path / "without").mkdir()
    without = compiled(tmp_path / "without", "amx.cpp", flags=("-w",))
    assert without.omnikv_allow_tiles() == 1


# ---- the trial


def test_the_trial_times_both_forms_and_says_which_is_ahead(on_amx, capsys):
    for place in (kernels.layer.linear, kernels.quant.native, kernels.quant.linear):
        name = "reads" if place is kernels.layer.linear else "usable"
        on_amx.setattr(place, name, lambda *weight: True)
    on_amx.setattr(speed, "native", lambda: amx.native())
    on_amx.setattr(speed, "isa", lambda: "amx")
    on_amx.setattr(kernels.quant.native._TILED, "_tried", (amx.native(), ""))
    small = "--shape 1x2x16 --chunk 20 --past 40 --rows 33 --outputs 20 --inputs 128 --turns 1"
    assert speed.main(small.split()) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "rows" in line and line.startswith("|")]
    assert len(rows) == 5 and "OMNIKV_AMX" in said.splitlines()[-1]
    assert "OMNIKV_AMX" not in os.environ


def test_the_verdict_names_what_is_behind():
    rows = [dict(piece=name, speed=by) for name, by in (("one", 1.5), ("other", 0.8))]
    assert "0.67 to 1.25" in speed.verdict(rows) and "behind in other." in speed.verdict(rows)
    assert speed.verdict(rows[:1]).endswith("OMNIKV_AMX=1 turns them on.")


def test_a_machine_without_amx_has_nothing_to_time(capsys, monkeypatch):
    monkeypatch.setattr(speed, "isa", lambda: "avx512_bf16")
    assert speed.main([]) == 1
    assert "this CPU has no AMX (it runs avx512_bf16)" in capsys.readouterr().err
