"""The quick tests with the oldest packages that pyproject.toml allows: `python -m
tests.programs.lowest [--keep FOLDER] [--torch VERSION]`.

Makes a virtual environment, installs each requirement of the engine and of its extras serve,
grammar and documents at its lower bound, and runs what `make quick` runs, and tests of the extras.
torch is the lowest CPU build that the package index offers, since the usual build of Linux brings
5 GB of CUDA: the versions that ran are printed. The tests' own tools are the newest ones, but there
is no transformers, which asks for newer packages than the engine: what it is the oracle of is
skipped. Exit code: 0, pytest's, or 3 where the index lacks something.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("serve", "grammar", "documents")
TOOLS = (
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "httpx>=0.28",
    "openai>=2.0",
    "setuptools>=77",
)
FILES = (  # beside tests/quick.py: what uses the extras, and a library that is compiled
    "tests/engine/sampling/test_constrained_sampling.py",
    "tests/engine/text/test_papers.py",
    "tests/engine/serve/test_openai_client.py",
    "tests/engine/serve/test_guards.py",
    "tests/engine/asynchronous/test_async_llm.py",
    "tests/kernels_cpu/test_library.py",
)
BOUND = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([\w.]+)\s*(;.*)?$")


def lowest(project: dict, extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """`name==bound` of every requirement of a [project] table and of its extras. Raises ValueError
    for one without a lower bound.
    """
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = []
    for requirement in wanted:
        match = BOUND.match(requirement)
        if match is None:
            raise ValueError(f"{requirement}: expected name>=version")
        found.append(f"{match[1]}=={match[2]}{match[3] or ''}")
    return found


def numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0), to compare by."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def torch_build(bound: str, listed: str, system: str) -> str | None:
    """The lowest build of torch without CUDA, from the bound on, of what `pip index versions`
    printed. None: the index has none. Linux's usual builds bring CUDA, those for ARM too.
    """
    line = re.search(r"Available versions: (.*)", listed)
    versions = line[1].replace(" ", "").split(",") if line else []
    if system == "linux":
        versions = [version for version in versions if version.endswith("+cpu")]
    fits = [version for version in versions if numbers(version) >= numbers(bound)]
    return min(fits, key=numbers, default=None)


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.lowest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--keep", type=Path, help="make the environment here, and leave it")
    parser.add_argument("--torch", metavar="VERSION", help="this version instead of the lowest")
    args = parser.parse_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = lowest(project)
    (bound,) = (pin.partition("==")[2] for pin in pinned if pin.startswith("torch=="))
    build = args.torch or torch_build(bound, versions_of("torch"), sys.platform)
    if build is None:
        print(f"no build of torch >= {bound} without CUDA is to be had here", file=sys.stderr)
        return 3
    print(f"torch {build} for the bound {bound}", flush=True)
    pinned = [f"torch=={build}" if pin.startswith("torch==") else pin for pin in pinned]
    with tempfile.TemporaryDirectory() as folder:
        home = args.keep or Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        python = str(home / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        if subprocess.run([*pip, *pinned, *TOOLS]).returncode:
            return 3
        subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True)
        state = {**os.environ, "OMP_NUM_THREADS": "1"}
        quick = subprocess.run([python, "tests/run.py", "--quick"], cwd=ROOT, env=state)
        extras = subprocess.run([python, "tests/run.py", *FILES], cwd=ROOT, env=state)
        return quick.returncode or extras.returncode


def versions_of(package: str) -> str:
    """What `pip index versions` says of a package."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    return subprocess.run(command, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
