"""The host tier's kernels compiled ahead of time: no spills, and every byte of a row moves in
16-byte loads and stores.

Stops: an address whose alignment the compiler cannot see (it then moves 4 bytes at a time), a tile
that spills.
"""

import os
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs a process without TRITON_INTERPRET=1", allow_module_level=True)

from tools.compile_kernels.cases import Case  # noqa: E402
from tools.compile_kernels.compiler import compile_for, examine  # noqa: E402
from tools.compile_kernels.variants import variants  # noqa: E402

LAUNCHES = variants([Case("slots"), Case("fetch"), Case("home"), Case("store")])


def test_the_launches_are_those_meant():
    names = [launch.function.__name__ for launch in LAUNCHES]
    assert names == [
        "probe_kernel",
        "victims_kernel",
        "assign_kernel",
        *["move_kernel"] * 4,
        # into the bank, and into both copies of a ring
        *["store_kernel"] * 2,
    ]


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_no_spills(target):
    for launch in LAUNCHES:
        report = examine(launch, target)
        assert (
            report.fault() == ""
            and report.spill == 0
            and report.error == ""
            and report.registers <= 80
        ), report


@pytest.mark.parametrize(
    "launch",
    [x for x in LAUNCHES if x.function.__name__ == "move_kernel"],
    ids=lambda x: str(x.case),
)
def test_rows_move_in_sixteen_bytes(launch):
    code = compile_for(launch, "sm_90").asm["ptx"]
    wide = {
        kind: len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32", code)) for kind in ("ld", "st")
    }
    # 256 threads x 4 x 16 bytes: 16 KB in flight per program
    assert wide["ld"] >= 4 and wide["st"] >= 4
    assert not re.findall(
        r"st\.global(?:\.\w+)*\.b32", re.sub(r"st\.global[\w.:]*\.v4\.b32", "", code)
    )
