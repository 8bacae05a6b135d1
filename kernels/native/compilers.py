"""Compilers that run side by side, as many as there are cores: one of them takes 0.3 GB.

Each is bounded: in time, in what is kept of its words, and with its children it ends where another
fails or the caller is interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

PATIENCE = 300  # seconds that all of them may take: a minute of two cores, more beside other work
HEARD = 1 << 16  # bytes that are kept of what one says
LOOKS = 0.01  # seconds between two looks at those that run


class _Compiler:
    """One compiler that runs, with a thread that reads what it says."""

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self.name = command[0]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
            start_new_session=True,  # so that its children can be ended with it
        )
        self._said = b""
        self._reader = threading.Thread(target=self._hear, args=(self._process.stderr,))
        self._reader.daemon = True
        self._reader.start()

    def _hear(self, stream: IO[bytes] | None) -> None:
        """Keep the beginning of what it says, and read the rest so that it can end."""
        assert stream is not None
        while part := stream.read1(8192):  # type: ignore[attr-defined]
            self._said = (self._said + part)[:HEARD]

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fault(self) -> str:
        """Why it failed, of one that has ended; "" where it did not. Raises OSError for a full
        disk.
        """
        code = self._process.returncode
        if not code:
            return ""
        self._reader.join(1)
        said = self._said.decode(errors="replace").splitlines()
        line = next((line for line in said if "error" in line), "")
        if "No space left" in line:
            raise OSError(errno.ENOSPC, "No space left on device")
        return f"{self.name} failed ({code}): {line[:200]}"

    def end(self) -> None:
        """Kill it and its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(commands: Sequence[Sequence[str]], folder: str) -> str:
    """Run compilers, with `folder` for their own files. Returns "", or why one failed or that they
    took too long. Raises OSError where the disk is full or a compiler cannot be started.
    """
    waiting, running = list(commands), list[_Compiler]()
    until = time.monotonic() + PATIENCE
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                running.append(_Compiler(waiting.pop(0), folder))
            for one in [one for one in running if not one.runs]:
                running.remove(one)
                if why := one.fault():
                    return why
                one.end()  # whatever it left behind
            if time.monotonic() > until:
                return f"{commands[0][0]} took more than {PATIENCE} s"
            time.sleep(LOOKS)
    finally:
        for one in running:
            one.end()
    return ""


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
