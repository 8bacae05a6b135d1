"""Compiles a variant for a GPU and says what the compiler made of it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from kernels.launch.triton import triton
from tools.compile_kernels.variants import Launch

# name: (backend, architecture, warp size, bytes of shared memory one program may have)
TARGETS: dict[str, tuple] = {
    "sm_80": ("cuda", 80, 32, 166912),
    "sm_87": ("cuda", 87, 32, 166912),  # Jetson Orin
    "sm_89": ("cuda", 89, 32, 101376),
    "sm_90": ("cuda", 90, 32, 232448),
    "sm_100": ("cuda", 100, 32, 232448),
    "sm_110": ("cuda", 110, 32, 232448),  # Jetson Thor
    "sm_120": ("cuda", 120, 32, 101376),  # RTX 50
    "sm_121": ("cuda", 121, 32, 101376),  # DGX Spark
    "gfx942": ("hip", "gfx942", 64, 65536),
}
DEFAULT_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# constants that tell one kernel's launches apart
FORMS = (
    "LEVEL", "LAST", "SOFTMAX", "COUNTED", "ADD", "SPARSE", "MERGES", "GATED", "ACTIVATION",
    "RESIDUAL", "BIAS", "SCALED",
)  # fmt: skip
# what is counted in the code of a kernel: instructions by name; "loop": those of the longest loop,
# and "CALL" the functions called there
INSTRUCTIONS = {
    name: re.compile(pattern)
    for name, pattern in {
        "HMMA": r"\bHMMA\b",
        "HGMMA": r"\bHGMMA\b",
        "LDGSTS": r"\bLDGSTS\b",
        "LDG": r"\bLDG\b",
        "LDG.U8": r"\bLDG\.(?:\w+\.)*[US]8\b",
        "LDL": r"\bLDL\b",
        "STL": r"\bSTL\b",
    }.items()
}
COUNTED = (*INSTRUCTIONS, "loop", "CALL")

# loads of one byte that are meant so: a map of booleans, one for a block of the past
BYTEWISE = {"blocks_kernel": 2}


def capability(target: str) -> tuple[int, int]:
    """The capability of a target's GPUs, by which launches differ; that of sm_80 for AMD's."""
    backend, architecture, *_ = TARGETS[target]
    return divmod(architecture, 10) if backend == "cuda" else (8, 0)


@dataclass
class Report:
    """The compiler's result for one variant and target. Sizes in bytes; instructions counts
    those in the code; warnings are ptxas's about serialised wgmma.
    """

    kernel: str
    case: str
    target: str
    bounded: bool
    seconds: float = 0.0
    registers: int = 0
    spill: int = 0
    static_shared: int = 0
    dynamic_shared: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str = ""

    def fault(self) -> str:
        """Why this variant may not ship, or ""."""
        what, limit = f"{self.kernel} ({self.case}) for {self.target}", TARGETS[self.target][3]
        # AMD is compiled where it can be, and reported
        optional = TARGETS[self.target][0] == "hip"
        if self.error:
            return "" if optional else f"{what} does not compile: {self.error}"
        shared = self.static_shared + self.dynamic_shared
        if shared > limit and not optional:
            return f"{what} needs {shared} bytes of shared memory, the limit is {limit}"
        spills = self.spill or self.instructions.get("LDL", 0) or self.instructions.get("STL", 0)
        if self.bounded and spills and not optional:
            return f"{what} spills {self.spill} bytes"
        if self.instructions.get("CALL", 0) and not optional:
            return f"{what} calls a function in its longest loop"
        bytewise = self.instructions.get("LDG.U8", 0)
        if bytewise > BYTEWISE.get(self.kernel, 0):
            return f"{what} has {bytewise} loads of one byte"
        if self.warnings:
            return f"{what}: ptxas warns: {self.warnings[0]}"
        return ""


def known(target: str) -> bool:
    """Whether this triton's assembler knows a target: that of 3.6.0 has no sm_110."""
    backend, architecture, *_ = TARGETS[target]
    if backend == "hip":
        return True
    tool = "ptxas" if architecture < 100 else "ptxas-blackwell"
    empty = ".version 8.0\n.target sm_80\n.address_size 64\n"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(empty)
        file.flush()
        line = [nvidia_tool(tool), f"-arch=sm_{architecture}", "-o", os.devnull, file.name]
        return not subprocess.run(line, capture_output=True).returncode


def possible(launch: Launch, target: str) -> bool:
    """Whether a variant is launched on a target: 8-bit floats are refused before sm_89."""
    backend, architecture, *_ = TARGETS[target]
    eight_bits = any("fp8" in kind for kind in launch.signature.values())
    return not (eight_bits and backend == "cuda" and architecture < 89)


def compile_for(launch: Launch, target: str) -> Any:
    """The compiled kernel of a variant for a target name (triton's CompiledKernel). Raises the
    compiler's errors.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, names = launch.function, launch.function.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(function, launch.signature, constexprs=launch.constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=launch.options)


def measure(kernel: Any, report: Report) -> None:
    """Fill a report from a compiled kernel: cuobjdump for NVIDIA (it comes with triton), the
    assembly's own notes for AMD.
    """
    report.dynamic_shared = kernel.metadata.shared
    if TARGETS[report.target][0] == "hip":
        text = kernel.asm["amdgcn"]
        report.registers = _figure(r"\.vgpr_count:\s+(\d+)", text)
        report.spill = 4 * _figure(r"\.vgpr_spill_count:\s+(\d+)", text)
        report.instructions = {"MFMA": len(re.findall(r"\bv_mfma", text))}
        return
    report.warnings = serialised(kernel.asm["ptx"], TARGETS[report.target][1])
    tool = nvidia_tool("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        line = [tool, "-res-usage", "-sass", file.name]
        ran = subprocess.run(line, capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    report.registers = _figure(r"REG:(\d+)", said)
    report.spill = _figure(r"STACK:(\d+)", said)
    report.static_shared = _figure(r"SHARED:(\d+)", said)
    if "Cannot decode" in said:  # as the tool of triton 3.6.0 says of sm_121
        return
    report.instructions = {
        name: len(pattern.findall(ran.stdout)) for name, pattern in INSTRUCTIONS.items()
    }
    loop = longest_loop(ran.stdout)
    report.instructions["loop"] = len(loop)
    report.instructions["CALL"] = sum(_calls(at, said) for at, said in loop)


def longest_loop(code: str) -> list[tuple[int, str]]:
    """Return places and instructions of the longest loop without another inside in machine code."""
    places, jumps = [], []
    for place, said in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code):
        places.append((int(place, 16), said))
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", said)
        if target and int(target[1], 16) < places[-1][0]:
            jumps.append((int(target[1], 16), places[-1][0]))
    inner = [
        [(at, said) for at, said in places if start <= at <= stop]
        for start, stop in jumps
        if not any(start <= first and last < stop for first, last in jumps)
    ]
    return max(inner, key=len, default=[])


def _calls(place: int, said: str) -> bool:
    """Tell whether an instruction calls a function. ptxas also writes CALL for a jump over the next
    instruction.
    """
    target = re.search(r"\bCALL\b.*?(0x[0-9a-f]+)", said)
    return target is not None and int(target[1], 16) - place != 32


def nvidia_tool(name: str) -> str:
    """Path of one of the NVIDIA programs that come with triton."""
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def serialised(ptx: str, architecture: int) -> list[str]:
    """What ptxas says about wgmma products that wait for one another (C7510 to C7519), as lines.

    Triton drops these lines, so ptxas runs once more. Such a kernel is right and about half as
    fast: a loop's accumulator that another loop or a plain instruction defines is the usual cause.
    """
    if "wgmma" not in ptx:
        return []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [nvidia_tool("ptxas"), f"-arch=sm_{architecture}a", "-v", "-o", os.devnull]
        said = subprocess.run([*command, file.name], capture_output=True, text=True)
    if said.returncode:
        raise ValueError(f"ptxas: {said.stderr.strip().splitlines()[0]}")
    return [line for line in (said.stdout + said.stderr).splitlines() if "(C751" in line]


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"found no {pattern} in what the compiler said")
    return int(found[1])


def examine(launch: Launch, target: str) -> Report:
    """Compile one variant for one target; a compile error is in the report, not raised."""
    start = time.monotonic()
    report = Report(launch.function.__name__, describe(launch), target, launch.case.bounded)
    try:
        measure(compile_for(launch, target), report)
    # whatever the compiler says is the finding
    except Exception as error:
        said = str(error).strip()
        report.error = f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"
    report.seconds = round(time.monotonic() - start, 2)
    return report


def describe(launch: Launch) -> str:
    """The case, and which of its launches where one kernel is launched in several forms."""
    forms = [
        f"{name.lower()}={launch.constants[name]}" for name in FORMS if name in launch.constants
    ]
    return " ".join([str(launch.case), *forms])
