"""The processes that compile a first answer's kernels while its weights are read.

Triton compiles a kernel when it is first launched, one after the other: 25 to 45 of them before a
first answer, 0.5 to 2 s each. Its cache on disk is shared, so other processes can fill it. Threads
would not do: building a kernel's first form is Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.base.cores.free_cores import free_cores
from engine.base.version import VERSION
from engine.load.ahead.launches import FirstAnswer
from engine.plan.free_memory import available_bytes
from kernels.launch.triton import HAVE_TRITON, triton

SWITCH = "OMNIKV_COMPILE_AHEAD"  # 0 leaves kernels to their first launch
ROOT = Path(__file__).resolve().parents[3]
MOST = 12  # processes: each has two to four kernels then
EACH = 1 << 30  # bytes of a process (0.5 GB measured), of half of what is free
PATIENCE = 60.0  # seconds that a load waits for them after its last weight
SOURCES = ("kernels", "engine")


@contextlib.contextmanager
def compiled_meanwhile(answer: Callable[[], FirstAnswer | None]) -> Iterator[None]:
    """Compile what `answer` will launch while the body runs; then wait for the rest of it, which
    the first launch would do one after the other. answer: None for nothing to compile.

    Nothing here fails a load: what cannot be compiled or started is left to the first launch. The
    processes end with this block, however it is left, and with this process.
    """
    processes: list[subprocess.Popen[bytes]] = []
    mark: Path | None = None
    try:
        with contextlib.suppress(Exception):
            wanted = answer() if possible() else None
            if wanted is not None:
                mark = mark_of(wanted)
                count = 0 if mark.exists() else number()
                for part in range(count):
                    processes.append(start(wanted, part, count))
        yield
        until = time.monotonic() + PATIENCE
        if processes and mark is not None and all([ended(p, until) for p in processes]):
            with contextlib.suppress(OSError):
                mark.touch()
    finally:
        for process in processes:
            end(process)


def possible() -> bool:
    """Whether processes can compile for this one: Triton is there and not interpreted, nobody
    switched it off, and there is a Python to start.
    """
    interpreted = HAVE_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
    off = os.environ.get(SWITCH, "1") == "0" or interpreted
    whole = os.name == "posix" and bool(sys.executable) and torch.version.hip is None
    return HAVE_TRITON and whole and not off


def number() -> int:
    """How many processes: no more than free cores beside this process's own, and than free memory
    holds.
    """
    memory = available_bytes(torch.device("cpu"))[0] // 2 // EACH
    return max(0, min(MOST, free_cores() - 1, memory))


def mark_of(answer: FirstAnswer) -> Path:
    """The file in Triton's cache that says that all of this was compiled before: by this Triton and
    these sources. It goes where the cache goes.
    """
    said = hashlib.sha256(repr((VERSION, triton.__version__, torch.__version__, answer)).encode())
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            facts = path.stat()
            said.update(f"\n{path} {facts.st_size} {facts.st_mtime_ns}".encode())
    return cache_folder() / f"omnikv-{said.hexdigest()[:32]}"


def cache_folder() -> Path:
    """Triton's cache, made where it is not there."""
    folder = Path(triton.knobs.cache.dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def start(answer: FirstAnswer, part: int, parts: int) -> subprocess.Popen[bytes]:
    """Start the process of one part, in a group of its own: Ctrl-C reaches it through `end`."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "TRITON_CACHE_DIR": str(cache_folder()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __package__, str(part), str(parts)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(pickle.dumps(answer))
        process.stdin.flush()
    return process


def ended(process: subprocess.Popen[bytes], until: float) -> bool:
    """Wait for a process until a time of the clock; whether it has done its part."""
    try:
        return process.wait(max(0.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the assembler that it runs."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
