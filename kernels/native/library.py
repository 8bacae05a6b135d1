"""The C++ kernels of this folder, compiled for this machine when they are first needed and kept in
the user's cache.

A GPU's kernels are compiled by Triton, these by the machine's own C++ compiler, in 10 to 40 seconds
and once: the file's name is a digest of sources, flags and compiler. A wheel may carry libraries,
made by `prebuild`, for which no compiler is needed. Where there is neither, or some of what was
compiled computes something else, torch's operators run instead, and `missing()` says why.
OMNIKV_NATIVE=0 forbids them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from kernels.launch.isa import has_vnni, isa, wants_tiles
from kernels.launch.tolerance import differs
from kernels.native import cache, compilers

FOLDER = Path(__file__).parent
PREBUILT = FOLDER / "prebuilt"  # ISA.so: of a wheel; a clone has none
SOURCES = (
    "agree.cpp",
    "amx.cpp",
    "attention.cpp",
    "bounds.cpp",
    "choose.cpp",
    "conv.cpp",
    "drawn.cpp",
    "drop.cpp",
    "expert_rows.cpp",
    "experts.cpp",
    "far.cpp",
    "few_bits.cpp",
    "gates.cpp",
    "integers.cpp",
    "kept.cpp",
    "lanes.cpp",
    "layers.cpp",
    "latent.cpp",
    "learn.cpp",
    "many.cpp",
    "noisy.cpp",
    "packed.cpp",
    "prefill.cpp",
    "product.cpp",
    "ranks.cpp",
    "rebuilt.cpp",
    "recurrent.cpp",
    "recurrent_prompt.cpp",
    "rounded.cpp",
    "rows.cpp",
    "shares.cpp",
    "sketch.cpp",
    "ssd.cpp",
    "step.cpp",
    "team.cpp",
    "tiled_integers.cpp",
    "tiled_product.cpp",
    "tiled_prompt.cpp",
    "topk.cpp",
    "turns.cpp",
    "windows.cpp",
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
    "-pthread",
    "-fPIC",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")))
# GCC stays at 256 bits unless it is told
_WIDE = (*_AVX512, "-mprefer-vector-width=512")
_VNNI = (*_WIDE, "-mavx512vnni")
_PAIRS = (*_VNNI, "-mavx512bf16")
_TILES = (*_PAIRS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
SETS = {
    "avx2": _AVX2,
    "avx512": _WIDE,
    "avx512_vnni": _VNNI,  # "avx512" to all but these kernels
    "avx512_bf16": _PAIRS,
    "amx": _TILES,  # where OMNIKV_AMX asks for them; else what avx512_bf16 has
}
_DOT = "-march=armv8.2-a+fp16+dotprod"
ARM_SETS = {"neon": (), "neon_dot": (_DOT,), "neon_bf16": (f"{_DOT}+i8mm+bf16",)}
_FLAGS_OF = {**SETS, **ARM_SETS}
COMPILING = "compiling this CPU's kernels, once: 10 to 40 seconds"  # 8 cores, 2 cores
LONGEST = ("attention.cpp", "packed.cpp", "lanes.cpp", "far.cpp")  # to compile: they begin first


class _Missing(Exception):
    """Why there is no library, for people."""


_reason: str | None = None  # of the first attempt; None before it
_library: ctypes.CDLL | None = None
_lock = threading.Lock()


def native() -> ctypes.CDLL | None:
    """The library, or None where torch's operators have to do. The first call compiles it, where
    the cache has none: some seconds. Whether its functions are right, `Binding.usable` says.
    """
    global _reason, _library
    if _reason is None:
        with _lock:
            if _reason is None:
                try:
                    _library, _reason = _loaded(), ""
                except _Missing as error:
                    _library, _reason = None, str(error)
    return _library


# (what was computed, found, expected, dtype of the computation), as `differs` compares them
Case = tuple[str, torch.Tensor, torch.Tensor, torch.dtype]


class Binding:
    """Functions of the library that are right or wrong together: they are tried before they run for
    the first time, and only they are switched off where they are not what torch's operators give.

    name: for people. sizes: an exported function that tells the size of a struct, and its mirror in
    ctypes, of another size where one of the two was changed alone.
    """

    def __init__(self, name: str, **sizes: type[ctypes.Structure]) -> None:
        self.name, self._sizes = name, sizes
        self._cases: list[Callable[[], Iterable[Case]]] = []
        self._lock = threading.RLock()
        self._tried: tuple[ctypes.CDLL | None, str] = None, ""
        BINDINGS.append(self)

    def self_test(self, cases: Callable[[], Iterable[Case]]) -> Callable[[], Iterable[Case]]:
        """Register cases that run before the first use, as a decorator."""
        self._cases.append(cases)
        return cases

    def usable(self) -> bool:
        """Whether its functions run on this machine; the first call compiles and tries them."""
        library = native()
        if library is None:
            return False
        if self._tried[0] is not library:
            with self._lock:
                if self._tried[0] is not library:
                    self._tried = library, self._fault(library)
        return not self._tried[1]

    @property
    def fault(self) -> str:
        """What the self-test found wrong with the library in use; "" too where it has not run."""
        return self._tried[1] if self._tried[0] is _library else ""

    def _fault(self, library: ctypes.CDLL) -> str:
        for name, mirror in self._sizes.items():
            found = getattr(library, name)()
            if found != ctypes.sizeof(mirror):
                return f"{self.name}: a struct of {found} bytes, {ctypes.sizeof(mirror)} in Python"
        with torch.inference_mode():
            for cases in self._cases:
                for case in cases():
                    if why := differs(*case):
                        return f"{why} as compiled here"
        return ""


BINDINGS: list[Binding] = []


def try_all() -> None:
    """Compile and try every binding that was imported, so that the first answer waits for none."""
    for binding in BINDINGS:
        binding.usable()


def loaded() -> ctypes.CDLL:
    """The library of a caller that has asked its binding already."""
    assert _library is not None
    return _library


def check(code: int, what: str) -> None:
    """Raise what a kernel's return code means: 1 a kind that this build lacks, 2 no memory."""
    if code == 2:
        raise MemoryError(f"{what}: no memory for the kernel's own buffers")
    if code:
        raise ValueError(f"{what}: found no kernel for these dtypes")


def missing() -> str:
    """Why torch's operators run instead of a C++ kernel: of all of them without a library, else of
    the bindings that failed; "" where there is nothing to say: compiles nothing.
    """
    if _reason is not None:
        return _reason or "; ".join(filter(None, (binding.fault for binding in BINDINGS)))
    try:
        if not _prebuilt():
            _compiler()
    except _Missing as error:
        return str(error)
    return ""


def to_compile() -> bool:
    """Whether the first `native()` of this process will compile."""
    if _reason is not None or missing() or _prebuilt():
        return False
    compiler, flags = _compiler()
    name, stamp = _name(compiler, flags), _stamp(flags)
    return not any(cache.whole(folder / name, stamp) for folder in cache.kept())


def prebuild(folder: Path, *sets: str, compiler: str | None = None) -> list[Path]:
    """Put a library for each of these instruction sets, without any all of this machine's kind,
    into `folder`, which a wheel has as PREBUILT; sets of the same flags share one, and a compiler
    that knows no AMX leaves that out. What is in the cache is copied, all else compiled. compiler:
    one whose programs run on machines of another kind; None for this machine's, whose own CPU does
    not matter. Returns the files. Raises RuntimeError where it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        compiler = compiler or _found_compiler()
        known = [name for name in sets or own_sets() if _knows(compiler, name)]
        made = {_file(name): (*FLAGS, *_FLAGS_OF[name]) for name in known}
        for file, flags in made.items():
            places = (kept / _name(compiler, flags) for kept in cache.kept())
            if ready := next((path for path in places if cache.whole(path, _stamp(flags))), None):
                shutil.copy(ready, folder / file)
            else:
                _compile(compiler, flags, folder / file)
    except _Missing as error:
        raise RuntimeError(str(error)) from None
    return [folder / file for file in made]


def _file(name: str) -> str:
    """Name the file of a wheel for an instruction set: that of the first set of the same flags."""
    return next(f"{first}.so" for first, f in _FLAGS_OF.items() if f == _FLAGS_OF[name])


def own_sets() -> dict[str, tuple[str, ...]]:
    """The flags of each instruction set that this machine's compiler knows, least first."""
    return ARM_SETS if isa() in ARM_SETS else SETS


def _prebuilt() -> Path | None:
    """The library of a wheel for this machine, of these very sources. Raises _Missing where there
    can be none.
    """
    _flags()
    for name in _able():
        path = PREBUILT / _file(name)
        if cache.whole(path, _stamp((*FLAGS, *_FLAGS_OF[name]))):
            return path
    return None


def _flags() -> tuple[str, ...]:
    """The flags of this machine's library. Raises _Missing where it can have none."""
    if os.environ.get("OMNIKV_NATIVE", "1") == "0":
        raise _Missing("OMNIKV_NATIVE=0")
    if os.name != "posix":
        raise _Missing(f"no kernels for {sys.platform}")
    if _set() not in _FLAGS_OF:
        raise _Missing(f"no kernels for instruction set {isa()!r}")
    return *FLAGS, *_FLAGS_OF[_set()]


def _set() -> str:
    """The instruction set of this machine's library: one of _FLAGS_OF, or one that has none."""
    found = isa()
    if found == "amx" and not wants_tiles():
        return "avx512_bf16"
    return "avx512_vnni" if found == "avx512" and has_vnni() else found


def _able() -> tuple[str, ...]:
    """That set, and the one that does where nothing was compiled for it or can be."""
    return (_set(), "avx512_bf16") if _set() == "amx" else (_set(),)


def _compiler() -> tuple[str, tuple[str, ...]]:
    """The compiler and its flags. Raises _Missing."""
    _flags()
    compiler = _found_compiler()
    name = next(name for name in _able() if _knows(compiler, name))
    return compiler, (*FLAGS, *_FLAGS_OF[name])


@functools.cache
def _knows(compiler: str, name: str) -> bool:
    """Whether a compiler knows a set's instructions: of AMX not every one does."""
    if name != "amx":
        return True
    command = [compiler, *_FLAGS_OF[name], "-E", "-x", "c++", os.devnull, "-o", os.devnull]
    return not subprocess.run(command, capture_output=True).returncode


def _found_compiler() -> str:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _Missing(f"no C++ compiler ({', '.join(COMPILERS)})")
    return compiler


def _loaded() -> ctypes.CDLL:
    if ready := _prebuilt():
        with suppress(OSError):  # of another C library: compile one
            return ctypes.CDLL(str(ready))
    compiler, flags = _compiler()
    name, last = _name(compiler, flags), "no folder to compile in"
    for folder in cache.folders():
        path = folder / name
        if cache.whole(path, _stamp(flags)):
            with suppress(OSError):
                os.utime(path)  # used last: `sweep` keeps it
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
    return f"kernels-{_digest(parts).hex()[:24]}.so"


def _stamp(flags: tuple[str, ...]) -> bytes:
    """What a library says it was made of: one of other instructions ends the process by SIGILL,
    wherever it was copied to.
    """
    return b"omnikv sha256 of sources and flags:" + _digest(flags)


def _digest(parts: Iterable[str]) -> bytes:
    """The sha256 of these words and of all sources."""
    found = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(FOLDER.glob("*.h")) + sorted(FOLDER.glob("*.cpp")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.digest()


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile the sources to `path`, side by side, in a folder beside it, and rename: two processes
    may do so at a time. Raises OSError where this folder will not do, _Missing where the compiler
    will not.
    """
    cache.sweep(path.parent)
    if not cache.has_room(path.parent):
        raise OSError(errno.ENOSPC, f"less than {cache.ROOM >> 20} MB free")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=cache.MAKING) as folder:
        names = sorted(SOURCES, key=lambda name: name not in LONGEST)
        objects = [str(Path(folder) / f"{name}.o") for name in names]
        whole = Path(folder) / "whole.so"
        own = [
            [compiler, *flags, "-c", str(FOLDER / name), "-o", made]
            for name, made in zip(names, objects)
        ]
        for commands in own, [[compiler, *flags, "-shared", *objects, "-o", str(whole)]]:
            if why := compilers.run(commands, folder):
                raise _Missing(why)
        os.chmod(whole, 0o700)
        cache.seal(whole, _stamp(flags))
        os.replace(whole, path)
        cache.bring_to_disk(path.parent)
