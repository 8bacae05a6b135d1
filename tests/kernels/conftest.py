"""These tests run every Triton kernel in the interpreter, on the CPU: `TRITON_INTERPRET=1 pytest tests/kernels`, a
process of its own.

TRITON_INTERPRET is read when triton is imported, so the ahead-of-time tests (tests/aot) cannot share the process.
"""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    mark = pytest.mark.skip(reason="triton is imported without TRITON_INTERPRET=1: tests/kernels need a process of their own")
    for item in items:
        if "tests/kernels" in item.path.as_posix():
            item.add_marker(mark)
