"""The core: the files that one answer of the shipped model on one device goes through.

    python -m tools.repo.core [--write]

One short answer on a CPU, OmniKV on the device tier, no server and no chat, runs in a process of
its own that notes each file of engine/, kernels/ and weights/ of which a function runs after its
import. What a reader of the engine must know is this list; everything else is a feature with a door
of its own. tests/core.json keeps the list and its lines; tests/test_core.py compares.

The answer runs on torch's operators, so that every machine finds the same files: C++ and Triton
kernels are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.repo import house

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "core.json"
FOLDERS = ("engine", "kernels", "weights")
OPTIMISED = 1  # flag of a function's code; the bodies of modules and classes lack it


class Watch:
    """Notes the files of functions that run, but for those that an import runs."""

    def __init__(self, root: Path) -> None:
        self.prefixes = tuple(f"{root / folder}/" for folder in FOLDERS)
        self.files: set[str] = set()
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        if not code.co_filename.startswith(self.prefixes) or not code.co_flags & OPTIMISED:
            self._seen.add(code)
        elif not _imports(frame):
            self._seen.add(code)
            self.files.add(code.co_filename)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def answered() -> list[str]:
    """The files that an answer runs, relative to the root, sorted. Call it once in a process: what
    is made once in a process is noted by the first call only.
    """
    watch = Watch(ROOT)
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        from engine import LLM, OmniKV, SamplingParams

        llm = LLM(
            "pocket",
            device="cpu",
            offload="device",
            dtype="float32",
            max_context=1024,
            method=OmniKV(tokens=64, dense_below=0),
        )
        prompt = (ROOT / "weights" / "pocket" / "welcome.txt").read_text(encoding="utf-8")[:1500]
        for _ in llm.stream(prompt, SamplingParams(max_tokens=8, seed=1)):
            pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(Path(name).relative_to(ROOT).as_posix() for name in watch.files)


def measured() -> dict[str, int]:
    """{file: its lines} of an answer in a child process. Raises CalledProcessError."""
    code = "import json, tools.repo.core as core; print(json.dumps(core.answered()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMNIKV_NATIVE": "0"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {name: lines(ROOT / name) for name in json.loads(done.stdout.splitlines()[-1])}


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def whole() -> int:
    """Lines of Python in all of engine/, kernels/ and weights/."""
    return sum(lines(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def packages(files: Iterable[str]) -> dict[str, list[str]]:
    """{package: its files in the core}."""
    found: dict[str, list[str]] = {}
    for name in files:
        found.setdefault(str(Path(name).parent), []).append(name)
    return found


def report(core: dict[str, int]) -> None:
    """Print the packages of the core, their files and lines."""
    for package, names in packages(core).items():
        print(f"{package}/  {len(names)} files, {sum(core[name] for name in names)} lines")
        print("   ", "  ".join(f"{Path(name).name} {core[name]}" for name in names))
    print(f"{len(core)} files, {sum(core.values())} of {whole()} lines")


def main(arguments: list[str] | None = None) -> int:
    """Print the core; `--write` takes it as what tests hold the code to."""
    parser = argparse.ArgumentParser(prog="python -m tools.repo.core", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", help="write tests/core.json and the pages")
    chosen = parser.parse_args(arguments)
    core = measured()
    report(core)
    if chosen.write:
        kept = {"whole": whole(), "files": core}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        house.main(["--picture"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
