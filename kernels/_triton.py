"""Triton where it is installed, and a stand-in that lets every kernel file import where it is not
(macOS, Windows).
"""

try:
    import triton
    import triton.language as tl
# kernels then are plain functions that nobody calls, see dispatch.choose
except ImportError:

    class _Absent:
        constexpr = None

        @staticmethod
        def jit(function=None, **options):
            return function or (lambda later: later)

    triton = tl = _Absent

HAVE_TRITON = hasattr(triton, "cdiv")
