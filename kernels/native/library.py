"""The C++ kernels of this folder, compiled for this machine when they are first needed and kept in
the user's cache.

A GPU's kernels are compiled by Triton, these by the machine's own C++ compiler, in 10 to 20 seconds
and once: the file's name is a digest of sources, flags and compiler. Where there is no compiler, or
what it made computes something else (kernels/trial.py), torch's operators run instead,
and `missing()` says why. OMNIKV_NATIVE=0 forbids them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels.isa import isa

FOLDER = Path(__file__).parent
SOURCES = (
    "attention.cpp",
    "packed.cpp",
    "few_bits.cpp",
    "prefill.cpp",
    "product.cpp",
    "rows.cpp",
    "step.cpp",
    "topk.cpp",
)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fopenmp",
    "-fPIC",
    "-w",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")))
# GCC stays at 256 bits unless it is told
_WIDE = (*_AVX512, "-mprefer-vector-width=512")
_PAIRS = (*_WIDE, "-mavx512vnni", "-mavx512bf16")
SETS = {"avx2": _AVX2, "avx512": _WIDE, "avx512_bf16": _PAIRS, "amx": _PAIRS}
COMPILING = "compiling this CPU's kernels, once: 10 to 20 seconds"
PATIENCE = 120  # seconds that a compiler may take


class _Missing(Exception):
    """Why there is no library, for people."""


_reason: str | None = None  # of the first attempt; None before it
_library: ctypes.CDLL | None = None
_lock, _counting = threading.Lock(), threading.Lock()
_off = 0
# why what was compiled may not be used, or "": asked once, by `native`; kernels/dispatch.py sets it
trial: Callable[[], str] = str


@contextmanager
def torch_only() -> Iterator[None]:
    """Run torch's operators inside, in every thread: for comparison, and for the reference."""
    global _off
    with _counting:
        _off += 1
    try:
        yield
    finally:
        with _counting:
            _off -= 1


def native() -> ctypes.CDLL | None:
    """The library, or None where torch's operators have to do. The first call compiles it, where
    the cache has none: some seconds.
    """
    global _reason, _library
    if _off:
        return None
    if _reason is None:
        with _lock:
            if _reason is None:
                try:
                    _library, _reason = _loaded(), ""
                    why = trial()
                except _Missing as error:
                    why = str(error)
                if why:
                    _library, _reason = None, why
    return _library


def loaded() -> ctypes.CDLL:
    """The library of a caller that has asked `native` already: `torch_only` of another thread does
    not take it away in mid-step.
    """
    assert _library is not None
    return _library


def missing() -> str:
    """Why there is no library, "" where there is one or will be: compiles nothing."""
    if _reason is not None:
        return _reason
    try:
        _compiler()
    except _Missing as error:
        return str(error)
    return ""


def runs() -> bool:
    """Whether the C++ kernels run where they can: compiles nothing."""
    return not _off and not missing()


def to_compile() -> bool:
    """Whether the first `native()` of this process will compile."""
    if _reason is not None or missing():
        return False
    compiler, flags = _compiler()
    return not any((folder / _name(compiler, flags)).exists() for folder in _kept())


def _compiler() -> tuple[str, tuple[str, ...]]:
    """The compiler and its flags. Raises _Missing."""
    if os.environ.get("OMNIKV_NATIVE", "1") == "0":
        raise _Missing("OMNIKV_NATIVE=0")
    if os.name != "posix":
        raise _Missing(f"no kernels for {sys.platform}")
    if isa() not in SETS:
        raise _Missing(f"no kernels for instruction set {isa()!r}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _Missing(f"no C++ compiler ({', '.join(COMPILERS)})")
    return compiler, (*FLAGS, *SETS[isa()])


def _loaded() -> ctypes.CDLL:
    compiler, flags = _compiler()
    name, last = _name(compiler, flags), "no folder to compile in"
    for folder in _folders():
        path = folder / name
        if path.exists():
            with suppress(OSError):  # torn: made again
                return ctypes.CDLL(str(path))
        try:
            _compile(compiler, flags, path)
            return ctypes.CDLL(str(path))
        except OSError as error:  # read-only, full, or mounted without programs: the next one
            last = f"{path}: {error}"
    raise _Missing(last)


def _name(compiler: str, flags: tuple[str, ...]) -> str:
    """Name the file that a compiler will make."""
    state = os.stat(os.path.realpath(compiler))
    parts = [os.path.realpath(compiler), str(state.st_size), str(state.st_mtime_ns), *flags]
    found = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(FOLDER.glob("*.h")) + sorted(FOLDER.glob("*.cpp")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"kernels-{found.hexdigest()[:24]}.so"


def _kept() -> Iterator[Path]:
    """The folder of the user's cache, if nobody else can write there."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    kept = Path(base) / "omnikv" / "kernels"
    try:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = kept.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022:
            yield kept
    except OSError:
        pass


def _folders() -> Iterator[Path]:
    """Where a library may lie: the user's cache, else a folder of this process."""
    yield from _kept()
    with tempfile.TemporaryDirectory(prefix="omnikv-") as folder:
        yield Path(folder)


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile the sources to `path`, side by side, in a folder beside it, and rename: two processes
    may do so at a time.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        objects = [str(Path(folder) / f"{name}.o") for name in SOURCES]
        _run(
            [
                [compiler, *flags, "-c", str(FOLDER / name), "-o", made]
                for name, made in zip(SOURCES, objects)
            ]
        )
        whole = str(Path(folder) / "whole.so")
        _run([[compiler, *flags, "-shared", *objects, "-o", whole]])
        os.chmod(whole, 0o700)
        os.replace(whole, path)


def _run(commands: list[list[str]]) -> None:
    """Run compilers at the same time. Raises _Missing for one that fails or takes too long."""
    running = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        for command in commands
    ]
    try:
        for command, process in zip(commands, running):
            _, told = process.communicate(timeout=PATIENCE)
            if process.returncode:
                said = next((line for line in told.splitlines() if "error" in line), "")
                raise _Missing(f"{command[0]} failed ({process.returncode}): {said[:200]}")
    except subprocess.TimeoutExpired:
        raise _Missing(f"{commands[0][0]} took more than {PATIENCE} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
