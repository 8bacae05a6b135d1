"""Triton, or a stand-in that lets every kernel file import where Triton is not installed (macOS,
Windows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # A launch takes options that the kernel's signature does not have (num_warps), so a checker
    # sees a kernel as Any; its body is still checked, against triton.language.
    import triton.language as tl

    triton: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:

        class _Absent:
            """Kernels become plain functions that nobody calls, see dispatch.choose."""

            constexpr = None

            @staticmethod
            def jit(function: Callable | None = None, **options: object) -> Callable:
                return function or (lambda later: later)

            @staticmethod
            def constexpr_function(function: Callable) -> Callable:
                return function

        triton = tl = _Absent

HAVE_TRITON = hasattr(triton, "cdiv")
