"""Compile every Triton kernel for several GPUs without having one, and say what the
compiler made of it.

    python -m tools.compile_kernels [--targets sm_80,sm_90] [--all] [--kernels dense,topk]

Exit status 1 with one line per fault: a decode kernel that spills at head_dim 64 or 128 with groups
1, 4 or 8, shared memory beyond the target's, loads of one byte, calls, or wgmma products that ptxas
serialises.
Needs triton, not CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kernels.launch.triton import HAVE_TRITON, triton
from tools.common.program import progress, replace_text
from tools.compile_kernels.cases import shipped
from tools.compile_kernels.compiler import (
    COUNTED,
    DEFAULT_TARGETS,
    TARGETS,
    Report,
    depends,
    examine,
)
from tools.compile_kernels.variants import variants


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m tools.compile_kernels",
        description="Compile the Triton kernels without a GPU.",
    )
    p.add_argument("--targets", default=",".join(DEFAULT_TARGETS), help="of " + ", ".join(TARGETS))
    p.add_argument(
        "--all", action="store_true", help="every dtype, head size, group and Q (a long run)"
    )
    p.add_argument(
        "--kernels",
        default="",
        help="only launchers whose name begins so, such as dense,topk,columns",
    )
    p.add_argument(
        "--softmax", action="store_true", help="only shapes with a cap on logits or with sinks"
    )
    p.add_argument("--json", metavar="FILE", help="write the reports there too")
    p.add_argument(
        "--table", metavar="FILE", type=Path, help="write the table there too, without times"
    )
    return p


def table(reports: Sequence[Report], timed: bool = True) -> str:
    """The reports as Markdown; without the compiler's own time it is the same on every machine."""
    columns = (
        "kernel",
        "configuration",
        "target",
        "regs",
        "spill",
        "static",
        "dynamic",
        *COUNTED,
        *(["s"] if timed else []),
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in reports:
        counts = [r.instructions.get(name, 0) for name in COUNTED]
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


def write_table(path: Path, reports: Sequence[Report], faults: int) -> None:
    """The table as a document, replaced in one move: a run that is stopped leaves the old one."""
    text = (
        "# What the compiler makes of the kernels\n\n"
        "Written by `python -m tools.compile_kernels --table FILE` with triton "
        f"{triton.__version__}, no GPU: {len(reports)} variants, {faults} faults. Sizes in bytes; "
        "shared memory static and dynamic; counts are of instructions in the code, and in its "
        "longest loop. "
        "How fast any of it runs is not measured here.\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text + table(reports, timed=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table and the faults. Exit code 0, 1 (a fault) or 2 (usage, no triton)."""
    command = parser()
    options = command.parse_args(argv)
    targets = [name for name in options.targets.split(",") if name]
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        command.error(f"--targets: found {unknown[0]}, expected some of {', '.join(TARGETS)}")
    if not HAVE_TRITON:
        print("compile_kernels: triton is not installed here, nothing to compile", file=sys.stderr)
        return 2
    wanted = tuple(name for name in options.kernels.split(",") if name)
    cases = [
        case
        for case in shipped(options.all)
        if not wanted or case.launcher.startswith(wanted)
        if case.softmax or not options.softmax
    ]
    forms = {form: variants(cases, form) for form in {depends(target) for target in targets}}
    start = time.monotonic()
    reports = []
    for target in targets:
        launches = forms[depends(target)]
        for number, launch in enumerate(launches):
            if sys.stderr.isatty():
                progress(f"{target} {number + 1}/{len(launches)}")
            reports.append(examine(launch, target))
    print(table(reports))
    faults = [fault for fault in (report.fault() for report in reports) if fault]
    print(
        f"\n{len(reports)} variants for {len(targets)} targets with triton "
        f"{triton.__version__} in {time.monotonic() - start:.0f} s, {len(faults)} faults"
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
