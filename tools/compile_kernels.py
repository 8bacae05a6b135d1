"""`make kernels`: compile every Triton kernel for several GPUs without having one, and say what the
compiler made of it.

    python -m tools.compile_kernels [--targets sm_80,sm_90] [--all] [--kernels dense,topk] [--json
    FILE]

The launchers themselves run, on meta tensors (shapes without memory), and a recorder stands where a
launch would be: what is compiled is what is launched, configuration and specialisation included.
Exit status 1 with one line per fault: a decode kernel that spills at head_dim 64 or 128 with groups
1, 4 or 8, or shared memory beyond the target's. Needs triton, not CUDA.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import torch

from kernels._triton import HAVE_TRITON, triton

# name: (backend, architecture, warp size, bytes of shared memory one program may have)
TARGETS = {
    "sm_80": ("cuda", 80, 32, 166912),
    "sm_89": ("cuda", 89, 32, 101376),
    "sm_90": ("cuda", 90, 32, 232448),
    "sm_100": ("cuda", 100, 32, 232448),
    "gfx942": ("hip", "gfx942", 64, 65536),
}
DEFAULT_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
INSTRUCTIONS = ("HMMA", "HGMMA", "LDGSTS", "LDG", "LDL", "STL")
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
PREFILL_LAUNCHERS = ("columns", "gathered", "blocks")
HOST_LAUNCHERS = ("slots", "fetch", "home", "store")
DECODE_KERNELS = ("dense_kernel", "sparse_kernel", "merge_kernel")
# grids do not enter a kernel: any long bank compiles the same code
CAPACITY, BUDGET = 131072, 2048


@dataclass(frozen=True)
class Case:
    """One shipped configuration: a launcher and the shapes it is called with."""

    # dense | scored | sparse | topk | window | columns | gathered | blocks
    launcher: str
    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 4
    queries: int = 1

    @property
    def bounded(self):
        """Whether a spill here is a fault: decode and prefill at head_dim 64 or 128, groups 1, 4,
        8, one query, 16-bit.
        """
        bounded = self.launcher in ("dense", "scored", "sparse", *PREFILL_LAUNCHERS)
        return (
            bounded
            and self.head_dim in (64, 128)
            and self.group in (1, 4, 8)
            and self.queries == 1
            and self.dtype != "float32"
        )

    def __str__(self):
        if self.launcher in ("topk", *HOST_LAUNCHERS):
            return self.launcher
        many = f" q{self.queries}" if self.queries > 1 else ""
        return f"{self.launcher} {TYPES[self.dtype]} d{self.head_dim} g{self.group}{many}"


@dataclass
class Launch:
    """One recorded launch: the kernel, its signature, constants and options; what makes two
    launches the same variant.
    """

    function: object
    signature: dict
    constants: dict
    aligned: tuple
    options: dict
    case: Case

    @property
    def key(self):
        """Equal for launches that compile to the same code."""
        return (
            self.function.__name__,
            tuple(self.signature.items()),
            tuple(self.constants.items()),
            self.aligned,
            tuple(sorted(self.options.items())),
        )


@dataclass
class Report:
    """What the compiler made of one variant for one target. Sizes in bytes; counts are of
    instructions in the code.
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
    instructions: dict = field(default_factory=dict)
    error: str = ""

    def fault(self):
        """Why this variant may not ship, or ""."""
        limit = TARGETS[self.target][3]
        # AMD is compiled where it can be, and reported
        optional = TARGETS[self.target][0] == "hip"
        if self.error:
            return (
                ""
                if optional
                else f"{self.kernel} ({self.case}) for {self.target} does not compile: {self.error}"
            )
        if self.static_shared + self.dynamic_shared > limit and not optional:
            return (
                f"{self.kernel} ({self.case}) for {self.target} needs {self.static_shared + self.dynamic_shared} bytes of "
                f"shared memory, the limit is {limit}"
            )
        spills = self.spill or self.instructions.get("LDL", 0) or self.instructions.get("STL", 0)
        if self.bounded and spills and not optional:
            return f"{self.kernel} ({self.case}) for {self.target} spills {self.spill} bytes"
        return ""


def shipped(everything=False):
    """The configurations compiled by default, or with `everything` every dtype, head size, group
    and Q that is supported.
    """
    if not everything:
        cases = [
            Case(name, "bfloat16", d, g)
            for name in ("dense", "scored", "sparse")
            for d in (64, 128)
            for g in (1, 4, 8)
        ]
        cases += [Case("window", "bfloat16", d, g) for d, g in ((64, 4), (128, 4), (128, 8))]
        cases += [
            Case(name, dtype, 128, 4)
            for name in ("dense", "sparse")
            for dtype in ("float16", "float32")
        ]
        cases += [
            Case(name, "bfloat16", d, g)
            for name in PREFILL_LAUNCHERS
            for d, g in ((64, 4), (128, 1), (128, 4), (128, 8))
        ]
        return [
            *cases,
            Case("dense", "bfloat16", 128, 4, 8),
            Case("sparse", "bfloat16", 128, 4, 8),
            Case("topk"),
            *(Case(name) for name in HOST_LAUNCHERS),
        ]
    cases = [
        Case(name, dtype, d, g, q)
        for name in ("dense", "scored", "sparse", "window", *PREFILL_LAUNCHERS)
        for dtype in TYPES
        if dtype[0] in "bf"
        for d in (32, 64, 80, 96, 128, 256)
        for g in (1, 4, 8, 16)
        for q in (1, 8)
        if name in ("dense", "scored", "sparse") or q == 1
    ]
    return [*cases, Case("topk"), *(Case(name) for name in HOST_LAUNCHERS)]


def call(case):
    """Run the launcher of a case on meta tensors."""
    from kernels.dense_decode import decode_dense
    from kernels.sparse_decode import decode_sparse
    from kernels.topk import select_topk
    from kernels.window_scores import window_scores

    def meta(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    if case.launcher in HOST_LAUNCHERS:
        call_host(case.launcher, meta)
        return
    dtype, scale = getattr(torch, case.dtype), case.head_dim**-0.5
    heads = 8 * case.group
    queries = 16 if case.launcher == "window" else case.queries
    q = meta(1, queries, heads, case.head_dim, dtype=dtype)
    scores = meta(1, CAPACITY, dtype=torch.float32)
    # gathered layers are token-major, the others head-major
    if case.launcher == "sparse":
        k, v = meta(1, CAPACITY, 2, 8, case.head_dim, dtype=dtype).permute(2, 0, 3, 1, 4)
        decode_sparse(
            q, k, v, meta(1, 1, BUDGET), meta(1), meta(1), meta(1), scale, backend="triton"
        )
        return
    if case.launcher in PREFILL_LAUNCHERS:
        call_prefill(case, meta)
        return
    k, v = meta(2, 1, 8, CAPACITY, case.head_dim, dtype=dtype)
    if case.launcher == "topk":
        select_topk(scores, meta(1), meta(1), meta(1), meta(1, BUDGET), meta(1), backend="triton")
    elif case.launcher == "window":
        for kind in ("softmax", "raw"):
            window_scores(
                q, k, meta(1), scale, meta(16, dtype=torch.float32), kind, scores, backend="triton"
            )
    elif case.launcher == "scored":
        for kind in ("softmax", "raw"):
            decode_dense(q, k, v, meta(1), scale, scores, kind, backend="triton")
    else:
        decode_dense(q, k, v, meta(1), scale, backend="triton")


def call_host(launcher, meta):
    """The host tier's launchers at an 8B's sizes: rows of 4 KB per layer, groups of 12 layers, 2048
    tokens, 8192 slots.
    """
    from kernels.gather import move_rows
    from kernels.slots import make_slots, plan_slots
    from kernels.store import store_step

    if launcher == "store":
        raw, k, v = meta(1, 1, 48, 128, dtype=torch.bfloat16).split([32, 8, 8], dim=2)
        for bank in (
            meta(2, 1, 8, CAPACITY, 128, dtype=torch.bfloat16),
            meta(CAPACITY, 2, 1, 8, 128, dtype=torch.bfloat16).permute(1, 2, 3, 0, 4),
        ):
            store_step(
                k,
                v,
                raw,
                *bank,
                meta(1, 128, 32, 128, dtype=torch.bfloat16),
                meta(1, 1, dtype=torch.int64),
                backend="triton",
            )
        return
    slots = make_slots(CAPACITY, 4 * BUDGET, BUDGET, "meta")
    table, rows = meta(CAPACITY // 64, dtype=torch.int64), meta(4 * BUDGET, 12 * 1024)
    if launcher == "slots":
        plan_slots(meta(BUDGET), meta(1), slots, backend="triton")
    elif launcher == "home":
        move_rows(
            table,
            4096,
            12 * 4096,
            meta(2048, 1024),
            4096,
            0,
            2048,
            None,
            to_host=True,
            backend="triton",
        )
        move_rows(table, 4096, 12 * 4096, meta(65536, 1024), 0, 0, 65536, None, backend="triton")
    else:
        # a group's packed row, and one layer of it
        for part in (rows, rows[:, 1024:2048]):
            move_rows(
                table,
                4096,
                12 * 4096,
                part,
                slots.source,
                slots.target,
                slots.misses,
                None,
                moved=meta(1, dtype=torch.int64),
                backend="triton",
            )


def call_prefill(case, meta):
    """Run a prefill launcher on meta tensors: blocks of 256 (block-sparse: 128) queries of a chunk
    of 4096 at the bank's end.
    """
    from kernels.block_sparse import BLOCK, attend_blocks
    from kernels.column_scores import column_scores
    from kernels.sparse_prefill import prefill_sparse

    dtype, scale, start = getattr(torch, case.dtype), case.head_dim**-0.5, CAPACITY - 4096
    q = meta(1, 4096, 8 * case.group, case.head_dim, dtype=dtype)
    edges = range(start, CAPACITY, 256)
    if case.launcher == "columns":
        k, _ = meta(2, 1, 8, CAPACITY, case.head_dim, dtype=dtype)
        lse, sums = (
            meta(*shape, dtype=torch.float32)
            for shape in ((1, 4096, 8 * case.group), (1, 4, CAPACITY))
        )
        column_scores(
            q,
            k,
            lse,
            [(first, first + 256, first - 256) for first in edges[:4]],
            start,
            16,
            scale,
            sums,
            backend="triton",
        )
        return
    # layers that read everything are head-major
    if case.launcher == "blocks":
        k, v = meta(2, 1, 8, CAPACITY, case.head_dim, dtype=dtype)
        keep = meta(1, 8 * case.group, 4096 // BLOCK, CAPACITY // BLOCK, dtype=torch.bool)
        attend_blocks(q, k, v, keep, start, scale, backend="triton")
        return
    k, v = meta(1, CAPACITY, 2, 8, case.head_dim, dtype=dtype).permute(2, 0, 3, 1, 4)
    blocks = [(first, first + 256, first - 256, 512) for first in edges]
    prefill_sparse(q, k, v, meta(1, len(edges), 512), blocks, start, scale, backend="triton")


def specialise(function, arguments, options, case):
    """A Launch as triton's own launcher would specialise it: 1 is a constant, multiples of 16 and
    aligned pointers are marked.
    """
    signature, constants, aligned = {}, {}, []
    for parameter in function.params:
        name, value = parameter.name, arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif parameter.is_constexpr or (
            isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        ):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    return Launch(function, signature, constants, tuple(aligned), options, case)


@contextlib.contextmanager
def recorded():
    """While open, launching a Triton kernel appends (function, arguments by name, options) to the
    list and runs nothing.
    """
    launches = []

    def record(self, *args, grid, warmup, **named):
        arguments = dict(zip([parameter.name for parameter in self.params], args, strict=False))
        options = {}
        for name, value in named.items():
            (arguments if name in self.arg_names else options)[name] = value
        launches.append((self, arguments, options))

    with mock.patch.object(triton.JITFunction, "run", record):
        yield launches


def variants(cases):
    """Every distinct launch of the cases, in order; a variant that several cases share belongs to
    the first bounded one.
    """
    found = {}
    for case in cases:
        with recorded() as launches:
            call(case)
        for function, arguments, options in launches:
            launch = specialise(function, arguments, options, case)
            found.setdefault(launch.key, launch)
    return list(found.values())


def compile_for(launch, target):
    """The compiled kernel of a variant for a target name (triton's CompiledKernel). Raises what the
    compiler raises.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, names = launch.function, launch.function.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(function, launch.signature, constexprs=launch.constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=launch.options)


def measure(kernel, report):
    """Fill a report from a compiled kernel: cuobjdump for NVIDIA (it comes with triton), the
    assembly's own notes for AMD.
    """
    report.dynamic_shared = kernel.metadata.shared
    if TARGETS[report.target][0] == "hip":
        text = kernel.asm["amdgcn"]
        report.registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        report.spill = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        report.instructions = {"MFMA": len(re.findall(r"\bv_mfma", text))}
        return
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True)
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage.stdout + usage.stderr
    )
    report.registers, report.spill, report.static_shared = (int(found[i]) for i in (1, 2, 3))
    report.instructions = {
        name: len(re.findall(rf"\b{name}[.\s]", code.stdout)) for name in INSTRUCTIONS
    }


def examine(launch, target):
    """Compile one variant for one target and report; a compile error is in the report, not raised."""
    start = time.monotonic()
    report = Report(launch.function.__name__, describe(launch), target, launch.case.bounded)
    try:
        measure(compile_for(launch, target), report)
    # whatever the compiler says is the finding
    except Exception as error:
        report.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    report.seconds = round(time.monotonic() - start, 2)
    return report


def describe(launch):
    """The case, and which of its launches where one kernel is launched in several forms."""
    forms = [
        f"{name.lower()}={launch.constants[name]}"
        for name in ("LEVEL", "LAST", "SOFTMAX", "ADD", "SPARSE")
        if name in launch.constants
    ]
    return " ".join([str(launch.case), *forms])


def table(reports, timed=True):
    """The reports as Markdown; without the compiler's own time it is the same on every machine."""
    columns = (
        "kernel",
        "configuration",
        "target",
        "regs",
        "spill",
        "static",
        "dynamic",
        *INSTRUCTIONS,
        *(["s"] if timed else []),
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in reports:
        counts = [r.instructions.get(name, 0) for name in INSTRUCTIONS]
        cells = (
            r.kernel,
            r.case,
            r.target,
            r.registers,
            r.spill,
            r.static_shared,
            r.dynamic_shared,
            *counts,
            *([r.seconds] if timed else []),
        )
        if r.error:
            cells = (r.kernel, r.case, r.target, r.error[:60], *[""] * (len(columns) - 4))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write_table(path, reports, faults):
    """The table as a document, replaced in one move: a run that is stopped leaves the old one."""
    text = (
        f"# What the compiler makes of the kernels\n\nWritten by `python -m tools.compile_kernels --table FILE` with triton "
        f"{triton.__version__}, no GPU: {len(reports)} variants, {faults} faults. Sizes in bytes; shared memory static and dynamic; "
        f"counts are of instructions in the code. How fast any of it runs is not measured here.\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text + table(reports, timed=False) + "\n")
    fresh.replace(path)


def main(arguments=None):
    """Compile, print the table and the faults; 0 when there is none, 1 when there is, 2 for wrong
    arguments.
    """
    parser = argparse.ArgumentParser(
        prog="compile_kernels", description="Compile the Triton kernels without a GPU."
    )
    parser.add_argument(
        "--targets", default=",".join(DEFAULT_TARGETS), help="of " + ", ".join(TARGETS)
    )
    parser.add_argument(
        "--all", action="store_true", help="every dtype, head size, group and Q (a long run)"
    )
    parser.add_argument(
        "--kernels",
        default="",
        help="only launchers whose name begins so, such as dense,topk,columns",
    )
    parser.add_argument("--json", metavar="FILE", help="write the reports there too")
    parser.add_argument(
        "--table", metavar="FILE", type=Path, help="write the table there too, without times"
    )
    options = parser.parse_args(arguments)
    targets = [name for name in options.targets.split(",") if name]
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        parser.error(f"--targets: found {unknown[0]}, expected some of {', '.join(TARGETS)}")
    if not HAVE_TRITON:
        print("compile_kernels: triton is not installed here, nothing to compile", file=sys.stderr)
        return 2
    wanted = tuple(name for name in options.kernels.split(",") if name)
    launches = variants(
        [case for case in shipped(options.all) if not wanted or case.launcher.startswith(wanted)]
    )
    start = time.monotonic()
    reports = []
    for target in targets:
        for number, launch in enumerate(launches):
            if sys.stderr.isatty():
                print(
                    f"\r{target} {number + 1}/{len(launches)} ", end="", file=sys.stderr, flush=True
                )
            reports.append(examine(launch, target))
    print(table(reports))
    faults = [fault for fault in (report.fault() for report in reports) if fault]
    print(
        f"\n{len(reports)} variants ({len(launches)} x {len(targets)} targets) with triton {triton.__version__} in "
        f"{time.monotonic() - start:.0f} s, {len(faults)} faults"
    )
    for fault in faults:
        print(f"FAULT: {fault}")
    if options.table:
        write_table(options.table, reports, len(faults))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"triton": triton.__version__, "reports": [asdict(report) for report in reports]},
                file,
                indent=1,
            )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
