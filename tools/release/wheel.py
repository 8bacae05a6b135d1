"""A wheel that needs no compiler where it is installed.

    python -m tools.release.wheel [--out dist] [--machine aarch64]

It carries the C++ kernels compiled for every instruction set of this kind of processor, of which
each process takes the one that its CPU has (kernels/native/library.py). The wheel's name says which
C library they ask for: pip refuses it on an older system. A wheel of pip's own making carries none
and compiles them when they are first needed.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from engine.base.errors import EngineError
from kernels.native import library
from tools.common.program import guarded, say

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("engine", "kernels", "weights", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
MACHINES = {"x86_64": library.SETS, "aarch64": library.ARM_SETS}
SYMBOL = re.compile(rb"\0GLIBC_2\.(\d+)(?=[\0.])")  # a version of the C library that a file names


def platform_tag(libraries: Iterable[Path], machine: str) -> str:
    """Name the oldest platform that runs these libraries, as PEP 600 does."""
    minor = [int(found) for path in libraries for found in SYMBOL.findall(path.read_bytes())]
    return f"manylinux_2_{max(17, *minor)}_{machine}"


def build(out: Path, carried: Path | None = None, machine: str = platform.machine()) -> Path:
    """Build a wheel of this tree into `out` for one of MACHINES, with the libraries that lie in
    `carried`: None makes them first. Returns its path. Raises EngineError where a compiler or pip
    fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="omnikv-wheel-") as place:
        home = Path(place) / "tree"  # setuptools writes beside the sources
        _copy(home)
        native = home / "kernels" / "native" / "prebuilt"
        if carried is not None:
            shutil.copytree(carried, native)
        else:
            _compile(native, machine)
        name = platform_tag(native.glob("*.so"), machine)
        return _made(home, name, out)


def _compile(folder: Path, machine: str) -> None:
    """Compile the kernels of every instruction set of a machine into a folder."""
    compiler = None  # this machine's
    if machine != platform.machine():
        compiler = shutil.which(f"{machine}-linux-gnu-g++")
        if compiler is None:
            raise EngineError(
                f"a wheel for {machine} wants its compiler here: apt-get install "
                f"g++-{machine.replace('_', '-')}-linux-gnu"
            )
    try:
        library.prebuild(folder, *MACHINES[machine], compiler=compiler)
    except RuntimeError as error:
        raise EngineError(f"the kernels of a wheel cannot be compiled: {error}") from None


def _copy(home: Path) -> None:
    home.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "prebuilt", "*.egg-info")
    for name in PARTS:
        shutil.copytree(ROOT / name, home / name, ignore=leave)
    for name in FILES:
        shutil.copy(ROOT / name, home / name)


def _made(home: Path, tag: str, out: Path) -> Path:
    """The wheel that setuptools makes of a tree."""
    given = ["--no-deps", "-q", "-w", str(home / "made")]
    if _setuptools() >= 77:  # as pyproject.toml asks; else pip fetches one
        given.append("--no-build-isolation")
    given.append(f"--config-settings=--build-option=--plat-name={tag}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", ".", *given]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        raise EngineError(f"pip made no wheel ({done.returncode}): {said[-1][:200]}")
    (made,) = (home / "made").glob("*.whl")
    return Path(shutil.move(made, out / made.name))


def _setuptools() -> int:
    """The first number of this interpreter's setuptools; 0: it has none."""
    try:
        return int(metadata.version("setuptools").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Build a wheel and say where it lies. Exit code 0, 1 where a compiler or pip fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.release.wheel", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder (default dist)")
    parser.add_argument(
        "--machine",
        choices=MACHINES,
        default=platform.machine(),
        help="whose wheel (default this machine's; another's wants its compiler)",
    )
    args = parser.parse_args(argv)

    def work() -> None:
        if args.machine not in MACHINES:
            raise EngineError(f"no kernels for {args.machine}: `pip wheel .` makes a wheel without")
        say(f"compiling the kernels for {', '.join(MACHINES[args.machine])}: a minute or two")
        made = build(args.out, machine=args.machine)
        print(f"{made}  {made.stat().st_size / 1e6:.1f} MB")

    return guarded(work, "stopped: no wheel was made")


if __name__ == "__main__":
    sys.exit(main())
