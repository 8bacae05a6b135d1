"""Run every Triton kernel in the interpreter, on a CPU: `TRITON_INTERPRET=1 pytest tests/kernels`.

These tests need their own process: TRITON_INTERPRET is read when triton is imported, and tests/aot
needs it unset.
"""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "triton is imported without TRITON_INTERPRET=1: run tests/kernels alone"
    try:
        from tests.kernels import interpreter

        interpreter.install()
    except ImportError:
        reason = "triton is not installed here"
    if reason:
        for item in items:
            if "tests/kernels/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
