"""What this CPU multiplies fast, and so which form of each product runs: decided here, once.

Every CPU launcher asks this file. An instruction set is one word, least first: "default" (no AVX2),
"avx2", "avx512", "avx512_bf16", "amx" of an x86; "neon", "neon_dot" (products of 8 bits and of
float16), "neon_bf16" (of bfloat16 too) of an ARM; "other" is a CPU of another make. Emulated sets
count: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA take instructions away from an x86, OMNIKV_ARM
from an ARM, and FBGEMM_ENABLE_INSTRUCTIONS=AVX2 from the integer products of
kernels/quant/torch_forms (`python -m tools.speed.cpu_forms` measures each choice of an x86 under
each of them, docs/PERFORMANCE.md; an ARM's were not measured).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

import torch

SETS = ("default", "avx2", "avx512", "avx512_bf16", "amx")
ARM_SETS = ("neon", "neon_dot", "neon_bf16")
# what each of ARM_SETS behind the first needs: bits of Linux' AT_HWCAP and AT_HWCAP2 (asm/hwcap.h:
# FPHP, ASIMDHP, ASIMDDP; I8MM, BF16), and names of macOS' sysctl below hw.optional.arm
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_ARM_BITS = {"neon_dot": (1 << 9 | 1 << 10 | 1 << 20, 0), "neon_bf16": (0, 1 << 13 | 1 << 14)}
_ARM_NAMES = {
    "neon_dot": ("FEAT_DotProd", "FEAT_FP16"),
    "neon_bf16": ("FEAT_BF16", "FEAT_I8MM"),
}
FEW = 64  # queries under one K/V head of a decode step, at most
# ONEDNN_MAX_CPU_ISA's words, as the most that they leave; words not named here leave everything
_ONEDNN = {
    "SSE41": "default",
    "AVX": "default",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX10_1_512": "avx512_bf16",
    "AVX512_CORE_FP16": "avx512_bf16",
}
_ATEN = {"DEFAULT": "default", "NO AVX": "default", "AVX2": "avx2"}


@functools.cache
def isa() -> str:
    """Name the instruction set that this process uses: one of SETS or ARM_SETS, or "other".

    On an x86 the least of what the processor has, what ATEN_CPU_CAPABILITY leaves to torch's own
    kernels and what ONEDNN_MAX_CPU_ISA leaves to oneDNN; on an ARM what OMNIKV_ARM leaves to our
    own kernels, whatever torch takes.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return least_arm(_arm_hardware(), os.environ.get("OMNIKV_ARM", ""))
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return "other"
    return least(_hardware(), torch.backends.cpu.get_cpu_capability(), os.environ)


def least(hardware: str, aten: str, environ: os._Environ[str] | dict[str, str]) -> str:
    """Name the least of a processor's set, torch's word for its own and oneDNN's limit.

    hardware: one of SETS; aten: as `torch.backends.cpu.get_cpu_capability()` says it; environ: the
    process's variables.
    """
    limit = environ.get("ONEDNN_MAX_CPU_ISA", environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    found = (hardware, _ATEN.get(aten, "amx"), _ONEDNN.get(limit, "amx"))
    return min(found, key=SETS.index)


def least_arm(hardware: str, limit: str) -> str:
    """Name the least of a processor's set and a limit, both of ARM_SETS; another word limits
    nothing.
    """
    return min(hardware, limit if limit in ARM_SETS else hardware, key=ARM_SETS.index)


def _arm_hardware() -> str:
    """The most of ARM_SETS that every core has; "neon", which each of 64 bits has, where the system
    does not say.
    """
    has = _darwin_has if platform.system() == "Darwin" else _linux_has
    found = ARM_SETS[0]
    for name in ARM_SETS[1:]:
        try:
            if not has(name):
                break
        except (OSError, AttributeError):  # no C library of that name, or no such function
            break
        found = name
    return found


def _linux_has(name: str) -> bool:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    needed = zip(_ARM_BITS[name], (_AT_HWCAP, _AT_HWCAP2))
    return all(getauxval(kind) & bits == bits for bits, kind in needed)


def _darwin_has(name: str) -> bool:
    ask = ctypes.CDLL(None).sysctlbyname
    for feature in _ARM_NAMES[name]:
        found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        key = f"hw.optional.arm.{feature}".encode()
        if ask(key, ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0)):
            return False
        if not found.value:
            return False
    return True


def _hardware() -> str:
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    if torch.cpu._is_avx512_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else "default"


def wants_tiles() -> bool:
    """Tell whether this CPU has AMX and OMNIKV_AMX=1 lets the C++ kernels multiply in its tiles
    (docs/MACHINES.md).
    """
    return isa() == "amx" and os.environ.get("OMNIKV_AMX", "") == "1"


def has_vnni() -> bool:
    """Tell whether the C++ kernels may use AVX512-VNNI, which some CPUs have without bfloat16's
    products: what ONEDNN_MAX_CPU_ISA leaves of what the processor has.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return limit != "AVX512_CORE" and torch.cpu._is_vnni_supported()


def multiplies(dtype: torch.dtype, found: str | None = None) -> bool:
    """Tell whether products of `dtype` run in it, at no less than float32's rate.

    Where they do not, torch emulates them: a bfloat16 product of attention weights with V took 14
    times its float32 form on AVX2. found: an instruction set, None for this machine's.
    """
    found = isa() if found is None else found
    if dtype == torch.bfloat16:
        return found in ("avx512_bf16", "amx", "neon_bf16", "other")
    # every CPU with AMX has AVX512-FP16
    return dtype == torch.float32 or found in ("amx", "neon_dot", "neon_bf16", "other")


def fuses(dtype: torch.dtype, queries: int, found: str | None = None) -> bool:
    """Tell whether torch's fused attention of so many queries keeps up with its float32 form.

    Its bfloat16 products are MKL's, which AVX2 runs as fast as float32's; its float16 products are
    emulated, at a third of the rate. found: as in `multiplies`.
    """
    found = isa() if found is None else found
    if dtype == torch.bfloat16:
        # without AVX2 its softmax over many queries is 1.3 times float32's
        return found != "default" or queries <= FEW
    return multiplies(dtype, found)


def vectorises(dtype: torch.dtype, found: str | None = None) -> bool:
    """Tell whether torch's loops convert `dtype` by vector instructions.

    float16 without AVX2 only in copies of one contiguous run: other copies and `torch.mv` go
    element by element, 4 to 8 times slower. found: as in `multiplies`.
    """
    return dtype != torch.float16 or (isa() if found is None else found) != "default"
