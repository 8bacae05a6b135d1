"""What this CPU multiplies fast, and so which form of each product runs: decided here, once.

Every CPU launcher asks this file. An instruction set is one word, least first: "default" (no AVX2),
"avx2", "avx512", "avx512_bf16", "amx"; "other" is a CPU of another make, such as ARM. Emulated
sets count: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA take instructions away, and
FBGEMM_ENABLE_INSTRUCTIONS=AVX2 from the integer products of kernels/quant/torch_forms
(`python -m tools.speed.cpu_forms` measures each choice under each of them, docs/PERFORMANCE.md).
"""

from __future__ import annotations

import functools
import os
import platform

import torch

SETS = ("default", "avx2", "avx512", "avx512_bf16", "amx")
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
    """Name the instruction set that torch and oneDNN use in this process: one of SETS or "other".

    The least of what the processor has, what ATEN_CPU_CAPABILITY leaves to torch's own kernels and
    what ONEDNN_MAX_CPU_ISA leaves to oneDNN.
    """
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


def _hardware() -> str:
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    if torch.cpu._is_avx512_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else "default"


def multiplies(dtype: torch.dtype, found: str | None = None) -> bool:
    """Tell whether products of `dtype` run in it, at no less than float32's rate.

    Where they do not, torch emulates them: a bfloat16 product of attention weights with V took 14
    times its float32 form on AVX2. found: an instruction set, None for this machine's.
    """
    found = isa() if found is None else found
    if dtype == torch.bfloat16:
        return found in ("avx512_bf16", "amx", "other")
    # every CPU with AMX has AVX512-FP16
    return dtype == torch.float32 or found in ("amx", "other")


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
