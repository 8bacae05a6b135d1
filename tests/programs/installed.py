"""The quick tests against an installed wheel, in a folder where no clone is: `python -m
tests.programs.installed`.

Builds a wheel, unpacks it beside a copy of tests/ whose imports have the installed names, and runs
there what `make quick` runs. Left out are tests of the clone itself and those whose tools a wheel
does not have; they are named. Exit code: pytest's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.quick import QUICK
from tests.test_wheel import ROOT, build, setup_module_of_the_clone

PATHS = re.compile(r"""(["'])(?=(?:kernels|weights|tools)\.[a-z_]+\.)""")  # of things to patch
NAMED = re.compile(r"^(\s*)import ((?:kernels|weights|tools)[\w.]*) as ", re.MULTILINE)
# a venv that the Makefile made knows the clone, whose kernels/ would stand in for an import that
# the wheel has under the wrong name
ALONE = """import os, sys
sys.path[:] = [path for path in sys.path if os.path.realpath(path or os.getcwd()) != {clone!r}]
"""
CLONES = ("tests/test_house.py",)  # reads the sources


def rewritten(folder: Path) -> None:
    """Give the imports of all tests in `folder` their installed names, as far as they are of a
    form that setup.py knows; the rest fail when they are collected.
    """
    installed = setup_module_of_the_clone().installed
    for path in folder.rglob("*.py"):
        text = NAMED.sub(r"\1import engine.\2 as ", path.read_text(encoding="utf-8"))
        try:
            path.write_text(installed(PATHS.sub(r"\1engine.", text)), encoding="utf-8")
        except ValueError:
            continue


def missing(site: Path, test: Path) -> str:
    """The first module that a test imports and the wheel does not have, or ""."""
    for name in re.findall(r"^from (engine[\w.]*) import", test.read_text("utf-8"), re.MULTILINE):
        path = site / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not path.is_dir():
            return name
    return ""


def main() -> int:
    """Run; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        site = home / "site-packages"
        with zipfile.ZipFile(build(home / "build")) as archive:
            archive.extractall(site)
        unused = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", home / "tests", ignore=unused)
        shutil.copy(ROOT / "pyproject.toml", home)
        (home / "weights").symlink_to(site / "engine" / "weights")  # tests name files in it
        (home / "docs").symlink_to(ROOT / "docs")  # and pages
        rewritten(home / "tests")
        (home / "sitecustomize.py").write_text(ALONE.format(clone=str(ROOT)), encoding="utf-8")
        files = []
        for name in QUICK:
            why = "reads the clone" if name in CLONES else missing(site, home / name)
            if why:
                print(f"left out: {name} ({why})", flush=True)
            else:
                files.append(name)
        command = [sys.executable, "-m", "pytest", "--quick", "-p", "no:cacheprovider", *files]
        state = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{home}", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=home, env=state).returncode


if __name__ == "__main__":
    sys.exit(main())
