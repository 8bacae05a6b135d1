"""The kernels compiled ahead of time for every NVIDIA architecture that is known here, without a
GPU: no spills in decode, shared memory in bounds.

Compiling needs a process without TRITON_INTERPRET. `make kernels` compiles every shipped
configuration; this is a part.
"""

import os
import re
from unittest import mock

import pytest

pytest.importorskip("triton", reason="triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from kernels.launch.shapes import Config
from tools.compile_kernels import cli, compiler  # noqa: E402
from tools.compile_kernels.cases import Case  # noqa: E402
from tools.compile_kernels.compiler import TARGETS, examine  # noqa: E402
from tools.compile_kernels.variants import variants  # noqa: E402

NVIDIA = [name for name in TARGETS if name.startswith("sm_")]
LARGE = ("sm_80", "sm_89", "sm_100")  # the boards have a kernel each
MOST = 88  # variants of this file: a minute and a half on one core


def cases(target):
    """List all bounded shapes for sm_90, and a corner of each kernel for the other targets."""
    if target == "sm_90":
        # a cap on logits or sinks are the same kernel with more to do
        particular = {(64, 8): "sinks", (128, 4): "cap"}
        decode = [
            Case(name, head_dim=d, group=g, softmax=particular.get((d, g), ""))
            for name in ("dense", "scored", "sparse")
            for d, g in ((64, 8), (128, 4))
            if name != "scored" or g == 8
        ]
        prefill = [Case("columns"), Case("gathered"), Case("blocks")]
        step = [Case("product"), Case("few_bits", queries=3), Case("norm"), Case("rotate")]
        step += [Case("tiles"), Case("experts", packed="int4")]
        # a window is sampled on sm_89, whose shared memory is the least
        others = [Case("dense", dtype="float32"), Case("topk"), Case("apart"), Case("ragged")]
        others.append(Case("lists", group=4))
        return [*decode, *prefill, *step, *others]
    least = [Case("sparse", group=4)]
    others = {
        "sm_80": [Case("dense", head_dim=64, group=4), Case("gathered", softmax="cap")],
        # the least shared memory
        "sm_89": [
            Case("window", group=8, softmax="cap"),
            Case("gathered"),
            Case("blocks"),
            Case("tiles"),
        ],
        "sm_100": [Case("columns"), Case("dense", head_dim=64, group=4)],
        # boards: Jetson, RTX 50, DGX Spark
        "sm_87": [Case("sparse", group=4)],
        "sm_110": [Case("blocks")],
        "sm_120": [Case("gathered"), Case("few_bits", packed="int8")],
        "sm_121": [Case("parts"), Case("ssd")],
    }
    return [*(least if target in LARGE else ()), *others[target]]


PLAN = [
    (target, launch)
    for target in NVIDIA
    for launch in variants(cases(target), compiler.capability(target))
]


def test_the_plan_is_small_enough():
    assert 40 <= len(PLAN) <= MOST


@pytest.mark.parametrize("part", range(4))
def test_no_spills_and_shared_memory_in_bounds(part):
    """Every fourth of the plan, of all targets: parts that take about as long."""
    reports = [examine(launch, target) for target, launch in PLAN[part::4]]
    assert [report.fault() for report in reports if report.fault()] == []
    assert [f"{r.kernel} {r.case}: {r.spill}" for r in reports if r.spill] == []
    for report in reports:
        assert 0 < report.registers <= 255
        # loads are pipelined through shared memory
        if report.kernel in ("dense_kernel", "sparse_kernel"):
            assert report.instructions["LDGSTS"] >= 16, report


def test_packed_rows_are_loaded_by_words_and_k_is_multiplied_by_whole_numbers():
    """A layout or a stride whose alignment the compiler cannot see is loaded a byte at a time."""
    cases = [Case("dense", packed=form) for form in ("int8", "int4", "fp8")]
    cases += [Case("sparse", packed="int8"), Case("dense", head_dim=64, packed="int8")]
    for launch in variants(cases, (9, 0)):
        name = launch.function.__name__, launch.case
        if name[0] == "query_kernel":
            continue
        report = examine(launch, "sm_90")
        assert report.fault() == "" and report.spill == 0
        code = compiler.compile_for(launch, "sm_90").asm["ptx"]
        assert not re.findall(r"ld\.global(?:\.\w+)*\.[bsu]8\b", code), name
        width = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)[,;]", code)
        assert width and set(width) <= {"0x4", "0x8", "0x10"}, (name, set(width))
        assert ("0x8" in width) == (launch.case.packed != "int4"), name
        assert ("mma.sync.aligned.m16n8k32" in code) == (launch.case.packed != "fp8"), name


def test_the_recorder_sees_what_a_launcher_launches():
    names = [launch.function.__name__ for launch in variants([Case("topk")])]
    assert names == ["digit_kernel"] * 3 + ["count_kernel", "emit_kernel"]
    late, early = (variants([Case("norm")], which)[0] for which in ((8, 0), (9, 0)))
    assert early.constants["DEPENDENT"] and early.options["launch_pdl"]
    assert not late.constants["DEPENDENT"] and "launch_pdl" not in late.options
    launch = variants([Case("dense", group=4)])[0]
    assert launch.signature["k"] == "*bf16" and launch.signature["queries"] == "constexpr"
    assert {"k", "skt", "skh", "lengths"} <= set(launch.aligned) and launch.constants["G"] == 4


@pytest.mark.parametrize(
    "config, said",
    [
        (
            Config(block=128, rows=16, dim=128, warps=4, stages=8, queries=1),
            "shared memory, the limit is 232448",
        ),
        (Config(block=32, rows=64, dim=128, warps=1, stages=2, queries=1), "spills"),
    ],
)
def test_a_broken_kernel_fails_the_tool(config, said, capsys, tmp_path):
    """The tool's own exit status and last line, with a configuration that asks too much."""
    with (
        mock.patch("kernels.attention.dense.dense_config", lambda *_: config),
        mock.patch.object(cli, "shipped", lambda everything: [Case("dense")]),
    ):
        status = cli.main(
            [
                "--targets",
                "sm_90",
                "--json",
                str(tmp_path / "kernels.json"),
                "--table",
                str(tmp_path / "k.md"),
            ]
        )
    output = capsys.readouterr().out
    assert (
        status == 1
        and "FAULT: dense_kernel (dense bf16 d128 g4 merges=2) for sm_90" in output
        and said in output
    )
    assert (tmp_path / "kernels.json").stat().st_size > 100
    lines = (tmp_path / "k.md").read_text().splitlines()
    assert (
        "1 faults" in lines[2]
        and len(lines) == output.count("\n| ") + 6
        and not lines[4].endswith("| s |")
    )


def test_a_dependent_kernel_waits_before_it_reads():
    """On sm_90 every kernel of a step waits for the one before it; nothing but weights is loaded
    before that, and on older cards nothing waits.
    """
    for case, early in (
        ("product", True),
        ("few_bits", True),
        ("norm", True),
        ("rotate", False),
        ("topk", False),
    ):
        for launch in variants([Case(case)], (9, 0))[:1]:
            code = compiler.compile_for(launch, "sm_90").asm["ptx"]
            body = code[code.index(".entry") :]
            before, _, after = body.partition("griddepcontrol.wait")
            assert after.count("griddepcontrol.launch_dependents") >= 1, case
            loads = [line for line in before.splitlines() if "ld.global" in line]
            assert bool(loads) == early and "st.global" not in before, (case, loads)
    launch = variants([Case("norm")])[0]
    assert "griddepcontrol" not in compiler.compile_for(launch, "sm_80").asm["ptx"]


def test_loads_of_one_byte_and_functions_are_faults():
    """Two for a map of booleans are meant so."""
    report = compiler.Report("dense_kernel", "a case", "sm_90", True)
    for name, said in (
        ("LDG.U8", "has 3 loads of one byte"),
        ("CALL", "calls a function in its longest loop"),
    ):
        report.instructions = {name: 0}
        assert report.fault() == ""
        report.instructions = {name: 3}
        assert report.fault() == f"dense_kernel (a case) for sm_90 {said}"
    report = compiler.Report("blocks_kernel", "a case", "sm_90", True, instructions={"LDG.U8": 2})
    assert report.fault() == ""
    lines = "LDG.E.EF.U8.CONSTANT R2, [R2]", "LDG.E.128 R2, [R2]"
    assert [bool(compiler.INSTRUCTIONS["LDG.U8"].search(line)) for line in lines] == [True, False]


def test_the_longest_loop_is_one_without_another_inside():
    """Machine code with a loop of two instructions and one of three inside one of seven."""
    jumps = {0x20: 0x10, 0x60: 0x40, 0x70: 0x10}
    code = "".join(
        f"/*{at:04x}*/  {f'@P0 BRA {jumps[at]:#x}' if at in jumps else 'FADD R1, R1, R1'} ;\n"
        for at in range(0, 0x80, 16)
    )
    assert len(compiler.longest_loop(code)) == 3


def test_wrong_target_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--targets", "sm_70"])
    assert stop.value.code == 2 and "found sm_70, expected some of" in capsys.readouterr().err


def test_products_that_wait_for_one_another_are_a_fault(tmp_path):
    """A ptxas that says C7515 about every kernel (the real one said it about blocks_kernel while
    two loops carried its accumulator).
    """
    said = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async is serialized"
    loud = tmp_path / "ptxas"
    loud.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    loud.chmod(0o755)
    real = compiler.nvidia_tool
    with mock.patch.object(
        compiler, "nvidia_tool", lambda name: str(loud) if name == "ptxas" else real(name)
    ):
        (launch,) = variants([Case("blocks")])
        report = examine(launch, "sm_90")
        assert report.instructions["HGMMA"] > 0  # otherwise nothing was asked
        assert report.fault().endswith(f"ptxas warns: {said}")
        assert examine(variants([Case("dense")])[0], "sm_80").fault() == ""
