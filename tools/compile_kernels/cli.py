"""Compile every Triton kernel for several GPUs without having one, and say what the
compiler made of it.

    python -m tools.compile_kernels [--targets sm_80,sm_90] [--all] [--kernels dense,topk]
    python -m tools.compile_kernels --targets all --table FILE --store FILE [--triton FOLDER]

The second is a table of every variant that a user can reach, for every known target; it goes on
where it was stopped. --triton compiles with another triton than the installed one:
`pip install --no-deps --target FOLDER triton==3.6.0` puts one there.
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
from time import strftime

from kernels.launch.triton import HAVE_TRITON, triton
from tools.common import page
from tools.common.arguments import command
from tools.common.program import progress, replace_text
from tools.compile_kernels.cases import Case, shipped
from tools.compile_kernels.compiler import (
    COUNTED,
    DEFAULT_TARGETS,
    TARGETS,
    Report,
    capability,
    known,
    possible,
)
from tools.compile_kernels.store import Store
from tools.compile_kernels.variants import variants


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.compile_kernels", "Compile the Triton kernels without a GPU.")
    said = "all, or of " + ", ".join(TARGETS)
    p.add_argument("--targets", default=",".join(DEFAULT_TARGETS), help=said)
    p.add_argument("--triton", metavar="FOLDER", help="the triton in this folder compiles")
    p.add_argument(
        "--store", metavar="FILE", type=Path, help="keep reports there, and compile what is not"
    )
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
    columns = "kernel | configuration | target | regs | spill | static | dynamic".split(" | ")
    columns += [*COUNTED, *["s"] * timed]
    rows = []
    for r in reports:
        cells = [r.kernel, r.case, r.target]
        if r.error:
            cells += [r.error[:60], *[""] * (len(columns) - 4)]
        else:
            cells += [r.registers, r.spill, r.static_shared, r.dynamic_shared]
            cells += [r.instructions.get(name, 0) for name in COUNTED] + [r.seconds] * timed
        rows.append(cells)
    lines = page.table(columns, rows)
    return "\n".join(lines)


def write_table(path: Path, reports: Sequence[Report], faults: int, left: Sequence[str]) -> None:
    """The table as a document, replaced in one move: a run that is stopped leaves the old one.
    left: targets that this triton does not know.
    """
    kernels = {(report.kernel, report.case) for report in reports}
    targets = dict.fromkeys(report.target for report in reports)
    unknown = f" Its assembler does not know {', '.join(left)}." if left else ""
    text = (
        "# What the compiler makes of the kernels\n\n"
        "Written by `python -m tools.compile_kernels --table FILE` with triton "
        f"{triton.__version__}, no GPU, {strftime('%Y-%m-%d')}: {len(reports)} variants "
        f"({len(kernels)} forms of kernels) for {', '.join(targets)}, {faults} faults.{unknown} "
        "Sizes in bytes; "
        "shared memory static and dynamic; counts are of instructions in the code, and in its "
        "longest loop, none where the tools do not read a target's code. "
        "How fast any of it runs is not measured here.\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text + table(reports, timed=False) + "\n")


def compiled(cases: Sequence[Case], targets: Sequence[str], store: Store) -> list[Report]:
    """The reports of all variants of these cases, target by target."""
    forms = {which: variants(cases, which) for which in set(map(capability, targets))}
    reports = []
    for target in targets:
        launches = [launch for launch in forms[capability(target)] if possible(launch, target)]
        for number, launch in enumerate(launches):
            if sys.stderr.isatty():
                progress(f"{target} {number + 1}/{len(launches)}")
            reports.append(store.report(launch, target))
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table and the faults. Exit code 0, 1 (a fault) or 2 (usage, no triton)."""
    command = parser()
    options = command.parse_args(argv)
    asked = ",".join(TARGETS) if options.targets == "all" else options.targets
    targets = [name for name in asked.split(",") if name]
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        command.error(f"--targets: found {unknown[0]}, expected some of {', '.join(TARGETS)}")
    if options.triton and Path(options.triton).resolve() not in Path(triton.__file__).parents:
        command.error(f"--triton: found no triton in {options.triton}")
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
    start = time.monotonic()
    left = [target for target in targets if not known(target)]
    targets = [target for target in targets if target not in left]
    reports = compiled(cases, targets, Store(options.store))
    print(table(reports))
    faults = [fault for fault in (report.fault() for report in reports) if fault]
    print(
        f"\n{len(reports)} variants for {len(targets)} targets with triton "
        f"{triton.__version__} in {time.monotonic() - start:.0f} s, {len(faults)} faults"
    )
    for target in left:
        print(f"{target}: this triton's assembler does not know it, nothing was compiled for it")
    for fault in faults:
        print(f"FAULT: {fault}")
    if options.table:
        write_table(options.table, reports, len(faults), left)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"triton": triton.__version__, "reports": [asdict(report) for report in reports]},
                file,
                indent=1,
            )
    return 1 if faults else 0
