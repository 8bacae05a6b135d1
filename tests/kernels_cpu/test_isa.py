"""Forms of products by instruction set: what is chosen, and that every launcher obeys it. Sets are
named or injected; nothing is timed.
"""

from functools import partial

import pytest
import torch

import kernels.launch.isa
from engine.model.config.config import ModelConfig
from engine.model.llama import assemble
from engine.model.tensors import random_stream
from kernels.attention.dense import decode_dense
from kernels.attention.sparse import decode_sparse
from kernels.launch.isa import (
    ARM_SETS,
    SETS,
    fuses,
    isa,
    least,
    least_arm,
    multiplies,
    vectorises,
)
from kernels.layer.linear import choose_form, pack_linear
from kernels.prefill.block_sparse import block_mass
from kernels.prefill.dense import prefill_dense
from kernels.select.column_scores import column_scores
from kernels.select.column_sums import column_sums
from tests.kernels.support.kernel_checks import check_dense, ints
from tests.tiny_model import CONFIG

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("torch_form")
PRODUCTS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "mv")
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


class Dtypes(torch.utils._python_dispatch.TorchDispatchMode):
    """Records (kind, dtype) of every product, kind "product" or "fused"."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS or name == FUSED:
            self.seen.add(
                (
                    "fused" if name == FUSED else "product",
                    args[-1].dtype if name in PRODUCTS else args[0].dtype,
                )
            )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "hardware, aten, limit, expected",
    [
        ("amx", "AVX512", "", "amx"),
        ("amx", "AVX2", "", "avx2"),
        ("amx", "DEFAULT", "AVX2", "default"),
        ("amx", "AVX512", "AVX512_CORE", "avx512"),
        ("amx", "AVX512", "avx512_core_bf16", "avx512_bf16"),
        ("avx2", "AVX2", "AVX512_CORE_AMX", "avx2"),
        ("avx512", "AVX512", "ALL", "avx512"),
    ],
)
def test_the_least_of_processor_and_limits_counts(hardware, aten, limit, expected):
    assert least(hardware, aten, {"ONEDNN_MAX_CPU_ISA": limit} if limit else {}) == expected


def test_this_machine_has_a_set_and_the_limit_of_a_process_bites():
    assert isa() in (*SETS, *ARM_SETS, "other")
    assert multiplies(F32) and fuses(F32, 1)


# bits of AT_HWCAP and AT_HWCAP2 that Linux shows on a Cortex-A53, a Neoverse N1 and a Neoverse V1
A53, N1, V1 = (0xFF, 0), (0x119FFF, 0), (0xECFFFFFB, 0x877FFF)


@pytest.mark.parametrize(
    "bits, expected",
    [
        (A53, "neon"),
        (N1, "neon_dot"),
        (V1, "neon_bf16"),
        ((N1[0] & ~(1 << 10), 0), "neon"),  # no float16
        ((V1[0], V1[1] & ~(1 << 13)), "neon_dot"),  # bfloat16 without int8 matrices
        ((A53[0], V1[1]), "neon"),  # a set has all of those before it
    ],
)
def test_linux_tells_an_arms_set_by_bits(bits, expected, monkeypatch):
    class C:
        """The C library."""

        def __init__(self, name):
            self.getauxval = partial({16: bits[0], 26: bits[1]}.get)  # takes restype and argtypes

    monkeypatch.setattr(kernels.launch.isa.ctypes, "CDLL", C)
    monkeypatch.setattr(kernels.launch.isa.platform, "system", lambda: "Linux")
    assert kernels.launch.isa._arm_hardware() == expected


@pytest.mark.parametrize(
    "features, expected",
    [
        ({}, "neon"),
        ({"FEAT_DotProd": 1, "FEAT_FP16": 1, "FEAT_BF16": 0, "FEAT_I8MM": 0}, "neon_dot"),  # M1
        ({"FEAT_DotProd": 1, "FEAT_FP16": 1, "FEAT_BF16": 1, "FEAT_I8MM": 1}, "neon_bf16"),
    ],
)
def test_macos_tells_an_arms_set_by_names(features, expected, monkeypatch):
    class C:
        """The C library."""

        def __init__(self, name):
            pass

        def sysctlbyname(self, key, found, size, new, length):
            name = key.decode().removeprefix("hw.optional.arm.")
            if name not in features:
                return -1
            found._obj.value = features[name]
            return 0

    monkeypatch.setattr(kernels.launch.isa.ctypes, "CDLL", C)
    monkeypatch.setattr(kernels.launch.isa.platform, "system", lambda: "Darwin")
    assert kernels.launch.isa._arm_hardware() == expected


def test_a_system_that_says_nothing_of_an_arm_leaves_the_least(monkeypatch):
    def refuses(name):
        raise OSError("no such library")

    monkeypatch.setattr(kernels.launch.isa.ctypes, "CDLL", refuses)
    assert kernels.launch.isa._arm_hardware() == "neon"


@pytest.mark.parametrize(
    "hardware, limit, expected",
    [
        ("neon_bf16", "", "neon_bf16"),
        ("neon_bf16", "neon", "neon"),
        ("neon_dot", "neon_bf16", "neon_dot"),
        ("neon_dot", "avx2", "neon_dot"),
    ],
)
def test_a_limit_takes_from_an_arm(hardware, limit, expected):
    assert least_arm(hardware, limit) == expected


@pytest.mark.parametrize("found", ARM_SETS)
def test_an_arm_multiplies_what_its_set_has(found):
    assert multiplies(F32, found) and fuses(F32, 512, found)
    assert multiplies(BF16, found) == (found == "neon_bf16")
    assert multiplies(F16, found) == (found != "neon") == fuses(F16, 1, found)
    assert choose_form(torch.zeros(4, 8, dtype=BF16), found=found) == (
        "plain" if found == "neon_bf16" else "widened"
    )


@pytest.mark.parametrize("found", SETS)
def test_sixteen_bits_are_multiplied_only_where_the_cpu_does(found):
    assert multiplies(F32, found) and fuses(F32, 512, found)
    assert multiplies(BF16, found) == (found in ("avx512_bf16", "amx"))
    assert multiplies(F16, found) == (found == "amx") == fuses(F16, 1, found)
    # decode attention keeps bfloat16 everywhere, prefill from AVX2 on
    assert fuses(BF16, 4, found) and fuses(BF16, 512, found) == (found != "default")


@pytest.mark.parametrize(
    "found, bf16, f16",
    [
        ("default", "widened", "widened"),
        ("avx2", "widened", "widened"),
        ("avx512", "widened", "widened"),
        ("avx512_bf16", "packed", "widened"),
        ("amx", "left", "plain"),
        ("other", "plain", "plain"),
    ],
)
def test_weights_are_held_in_the_form_of_the_set(found, bf16, f16):
    assert choose_form(torch.zeros(4, 8, dtype=BF16), found=found) == bf16
    assert choose_form(torch.zeros(4, 8, dtype=F16), found=found) == f16
    assert choose_form(torch.zeros(4, 8), found=found) == "narrow"


@pytest.mark.parametrize(
    "found, bf16",
    [("default", "widened"), ("avx2", "widened"), ("avx512_bf16", "plain"), ("amx", "left")],
)
def test_lm_head_is_held_without_a_copy_in_the_form_of_the_set(found, bf16, monkeypatch):
    """torch.mv reads bfloat16 at a third of F.linear's rate with avx512_bf16 and no AMX."""
    assert choose_form(torch.zeros(4, 8, dtype=BF16), found=found, copy=False) == bf16
    assert choose_form(torch.zeros(4, 8), found=found, copy=False) == "left"
    monkeypatch.setattr("kernels.layer.linear.isa", lambda: found)
    monkeypatch.setattr("kernels.launch.isa.isa", lambda: found)
    for dtype in (F32, BF16, F16):
        weight = torch.randn(6, 8).to(dtype)
        assert pack_linear(weight, copy=False).weight is weight
    if found == "avx512_bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return  # oneDNN does not repack weights where it is held to less
    for tied in (True, False):
        config = ModelConfig.from_dict({**CONFIG, "tie_word_embeddings": tied}, source="test")
        weights = dict(random_stream(config, BF16, "cpu"))
        model = assemble(config, BF16, "cpu", iter(weights.items()))
        assert model.lm_head.form == bf16
        assert model.lm_head.weight is weights["embed" if tied else "lm_head"]
        assert model.nbytes == config.parameters * 2
        assert model.logits(torch.ones(1, 1, 32, dtype=BF16)).shape == (1, 1, 64)


def products(dtype):
    """What every launcher multiplies in, of K, V and weights of `dtype`."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 300, 32).to(dtype).unbind(0)
    q = torch.randn(1, 128, 8, 32).to(dtype)
    one, n, scores = q[:, -1:], ints([300], "cpu"), torch.zeros(1, 300)
    index = torch.arange(40, dtype=torch.int32).view(1, 1, -1)
    long = torch.randn(1, 2, 256, 32).to(dtype)
    calls = {
        "filter": lambda: decode_dense(one, k, v, n, 0.2, scores, "softmax"),
        "dense": lambda: decode_dense(one, k, v, n, 0.2),
        "sparse": lambda: decode_sparse(
            one, k, v, index, ints([40], "cpu"), ints([290], "cpu"), n, 0.2
        ),
        "prefill": lambda: prefill_dense(q, k, v, 172, 0.2),
        "columns": lambda: column_scores(
            q, k, torch.zeros(1, 128, 8), [(172, 300, 100)], 172, 1, 0.2, scores[None]
        ),
        "mass": lambda: block_mass(q, long, 128, 8, 0.2),
        "weights": lambda: pack_linear(torch.randn(16, 32).to(dtype))(q[0, :64].flatten(1)[:, :32]),
        "weights, 8 rows": lambda: pack_linear(torch.randn(16, 32).to(dtype))(k[0, 0, :8]),
    }
    found = {}
    for name, call in calls.items():
        with Dtypes() as dtypes:
            call()
        found[name] = dtypes.seen
    return found


@pytest.mark.parametrize("found", ["default", "avx2", "avx512"])
def test_no_launcher_leaves_a_product_to_emulation(found, monkeypatch):
    monkeypatch.setattr(kernels.launch.isa, "isa", lambda: found)
    monkeypatch.setattr("kernels.layer.linear.isa", lambda: found)
    for dtype in (BF16, F16):
        for name, seen in products(dtype).items():
            assert seen, name
            assert ("product", dtype) not in seen, (name, dtype)
            if dtype == F16 or (found == "default" and name == "prefill"):
                assert ("fused", dtype) not in seen, (name, dtype)


class Strided(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts conversions to float32 of float16 that lies in more than one run of memory."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "copy_":
            into, source = args[:2]
            self.seen += (into.dtype, source.dtype) == (F32, F16) and not source.is_contiguous()
        if function.overloadpacket.__name__ == "_to_copy":
            wanted = (kwargs.get("dtype"), args[0].dtype) == (F32, F16)
            self.seen += wanted and not args[0].is_contiguous()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("found", ["default", "avx2"])
def test_without_avx2_float16_is_converted_one_run_of_memory_at_a_time(found, monkeypatch):
    """Element by element it took 8 times as long: a dense layer 2.9 of float32's time."""
    monkeypatch.setattr(kernels.launch.isa, "isa", lambda: found)
    monkeypatch.setattr("kernels.layer.linear.isa", lambda: found)
    assert vectorises(F16) == (found == "avx2") and vectorises(BF16) and vectorises(F32)
    k, v = torch.randn(2, 1, 2, 300, 32).to(F16).unbind(0)
    q, scores = torch.randn(1, 1, 8, 32).to(F16), torch.zeros(1, 300)
    with Strided() as strided:
        decode_dense(q, k[:, :, :256], v[:, :, :256], ints([256], "cpu"), 0.2)
        decode_dense(q, k[:, :, :256], v[:, :, :256], ints([256], "cpu"), 0.2, scores)
        column_sums(q[0], k[0, :, :256], 255, 0.2)
    assert (strided.seen > 0) == (found == "avx2")
    with Dtypes() as dtypes:
        pack_linear(torch.randn(16, 32).to(F16))(torch.randn(1, 32).to(F16))
    assert (("product", F16) in dtypes.seen) == (found == "avx2")


def test_a_cpu_with_bfloat16_products_uses_them(monkeypatch):
    monkeypatch.setattr(kernels.launch.isa, "isa", lambda: "amx")
    monkeypatch.setattr("kernels.layer.linear.isa", lambda: "amx")
    seen = products(BF16)
    for name in ("filter", "columns", "mass", "weights"):
        assert ("product", BF16) in seen[name], name
    for name in ("dense", "sparse", "prefill"):
        assert seen[name] == {("fused", BF16)}, name


@pytest.mark.parametrize("found", ["default", "amx"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [1, 64, 65, 521])
def test_filter_and_dense_layers_hold_in_every_form(found, dtype, rows, monkeypatch):
    """Chunks of 64 rows: lengths of one, a chunk, a chunk and one, spans of several, primes."""
    monkeypatch.setattr(kernels.launch.isa, "isa", lambda: found)
    monkeypatch.setattr("kernels.attention.cpu.CHUNK", 64 * 64)
    for group, queries in ((1, 1), (4, 1), (8, 3)):
        kind = "softmax" if queries == 1 else None
        check_dense("cpu", "cpu", [rows], 2, group, queries, 32, dtype, "tokens", kind)
