"""The emulated machine: a folder with Debian's Python for ARM, torch's wheel for it, and a command
that runs them.

Nothing is installed on the machine that emulates: apt works in a folder of its own, as for a
machine of another architecture. A step that is done leaves a file that says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.base.errors import EngineError
from tools.common.program import say
from weights.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
PACKAGES = ("python3", "libstdc++6", "libgomp1", "zlib1g")
WHEELS = ("torch", "numpy", "safetensors", "jinja2", "tokenizers", "pytest", "hypothesis")
OLDEST, NEWEST = 17, 39  # of glibc 2.x, of which wheels for ARM are
CORES = 2
# of a Neoverse V1, which has every set of ARM_SETS; a library that torch asks reads it from files
# that the emulator does not make, and ends the process where there are none
PROCESSOR = """processor\t: {core}
BogoMIPS\t: 100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm \
asimddp i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

"""
IDENTITY = "0x00000000411fd401\n"


def place() -> Path:
    """The folder without --folder: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "omnikv" / "arm"


def require_programs() -> None:
    """Raise UsageError where a program is missing that no folder can hold."""
    lacking = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if lacking:
        raise UsageError(f"the emulated ARM needs {', '.join(lacking)}: apt-get install them")


def make(folder: Path) -> Path:
    """Make what is not there yet and return the machine's Python. Raises EngineError."""
    folder.mkdir(parents=True, exist_ok=True)
    _once(folder, "system", lambda: _system(folder))
    _once(folder, "processor", lambda: _processor(folder / "root"))
    python = _python(folder)
    _once(folder, "wheels", lambda: _wheels(folder, python))
    return _command(folder, python)


def _once(folder: Path, step: str, work) -> None:
    done = folder / f".{step}-done"
    if not done.exists():
        say(f"making the emulated ARM: {step}")
        work()
        done.touch()


def _run(words: Sequence[str], what: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1][:200] if said else "no word of why"
        raise EngineError(f"{what} failed ({done.returncode}): {last}")


def _system(folder: Path) -> None:
    """Unpack Python and what it needs, by this machine's sources of packages."""
    apt = folder / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Debug::NoLocking": "1",
    }
    get = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run([*get, "update"], "apt-get update for arm64")
    wanted = ["--download-only", "-y", "--no-install-recommends", *PACKAGES]
    _run([*get, "install", *wanted], "apt-get for arm64")
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(folder / "root")], package.name)


def _processor(root: Path) -> None:
    """Write what the kernel of such a machine says of its processor."""
    (root / "proc").mkdir(exist_ok=True)
    said = "".join(PROCESSOR.format(core=core) for core in range(CORES))
    (root / "proc" / "cpuinfo").write_text(said, encoding="utf-8")
    for core in range(CORES):
        identity = root / f"sys/devices/system/cpu/cpu{core}/regs/identification/midr_el1"
        identity.parent.mkdir(parents=True, exist_ok=True)
        identity.write_text(IDENTITY, encoding="utf-8")


def _python(folder: Path) -> str:
    """The name of its Python: python3.11, say."""
    names = [path.name for path in (folder / "root" / "usr" / "bin").glob("python3.*")]
    found = [name for name in names if re.fullmatch(r"python3\.\d+", name)]
    if not found:
        raise EngineError(f"{folder / 'root'}: no Python there; delete {folder} and begin again")
    return found[0]


def _wheels(folder: Path, python: str) -> None:
    """Install torch and what tests need, of the versions of requirements-dev.txt."""
    platforms = ["manylinux2014_aarch64"]
    platforms += [f"manylinux_2_{minor}_aarch64" for minor in range(OLDEST, NEWEST + 1)]
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    words += ["--only-binary=:all:", "--python-version", python.removeprefix("python")]
    words += [f"--platform={platform}" for platform in platforms]
    words += ["--target", str(folder / "site"), "--upgrade", "-c", str(ROOT / "requirements.txt")]
    _run([*words, *WHEELS], "pip for ARM")


def _command(folder: Path, python: str) -> Path:
    """Write the command that starts its Python, and hands itself to what starts another one. A
    compiler needs no emulation: this machine's makes programs for the other.
    """
    programs, site = folder / "bin", folder / "site"
    programs.mkdir(exist_ok=True)
    compiler, command = programs / "c++", programs / "python"
    if not compiler.is_symlink():
        compiler.symlink_to(str(shutil.which("aarch64-linux-gnu-g++")))
    beside = "${PYTHONPATH:+:$PYTHONPATH}"
    command.write_text(
        f"#!/bin/sh\nexport QEMU_LD_PREFIX='{folder / 'root'}' PYTHONPATH='{site}'{beside}\n"
        f"exec nice -n 19 qemu-aarch64-static -cpu max '{folder}/root/usr/bin/{python}' \"$@\"\n",
        encoding="utf-8",
    )
    command.chmod(0o755)
    say_who = f"import sys\n\nsys.executable = {str(command)!r}\n"
    (site / "sitecustomize.py").write_text(say_who, encoding="utf-8")
    return command
