"""These tests run every Triton kernel in the interpreter, on the CPU: `TRITON_INTERPRET=1 pytest
tests/kernels`.

They need a process of their own: TRITON_INTERPRET is read when triton is imported, and tests/aot
need it unset.
"""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    reason = None
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "triton is imported without TRITON_INTERPRET=1: tests/kernels need a process of their own"
    try:
        from tests.kernels import interpreter

        interpreter.install()
    except ImportError:
        reason = "triton is not installed here"
    if reason:
        for item in items:
            if "tests/kernels/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
