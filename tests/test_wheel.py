"""The wheel: one top-level package, whole, beside strangers' `kernels`, `tools` and `weights`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = (
    "engine",
    "kernels",
    "weights",
    "tools",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
STRANGERS = ("kernels", "weights", "tools")


def setup_module_of_the_clone():
    """setup.py, without running it."""
    spec = importlib.util.spec_from_file_location("setup_of_the_wheel", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(home: Path, **carried: bytes) -> Path:
    """A wheel of this tree, made of a copy in `home`: setuptools writes beside the sources.
    carried: libraries of kernels by instruction set.
    """
    home.mkdir(exist_ok=True)
    for name in NAMES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, home / name)
    for name, library in carried.items():
        (home / "kernels" / "native" / "prebuilt").mkdir(exist_ok=True)
        (home / "kernels" / "native" / "prebuilt" / f"{name}.so").write_bytes(library)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-q", "-w", str(home / "made")], cwd=home, check=True)
    (made,) = (home / "made").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    return build(tmp_path_factory.mktemp("wheel"), none=b"a library")


@pytest.fixture(scope="module")
def site(wheel):
    """A folder with the wheel's files beside strangers' packages that nobody may import."""
    folder = wheel.parent / "site-packages"
    for name in STRANGERS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('a stranger')")
    with zipfile.ZipFile(wheel) as archive:
        assert not {name for name in archive.namelist() if (folder / name).exists()}
        archive.extractall(folder)
    return folder


def run(site, cwd, *arguments):
    """Python in a folder elsewhere, with the wheel as the only engine; compiles no C++."""
    state = {**os.environ, "PYTHONPATH": str(site), "OMNIKV_NATIVE": "0"}
    state["XDG_CACHE_HOME"] = str(cwd / "cache")
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=state, capture_output=True, text=True
    )


def test_it_has_one_name(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top).split() == [b"engine"]
    assert {name.split("/")[0] for name in names} == {"engine", Path(top).parts[0]}
    suffixes = (".cpp", ".h", ".html", ".css", ".js", ".pyi", ".safetensors", "py.typed")
    assert all(any(name.endswith(suffix) for name in names) for suffix in suffixes)
    assert "engine/kernels/native/prebuilt/none.so" in names
    assert "engine/integrations/transformers.py" in names
    assert not any("studies" in name or "/tests" in name for name in names)


EVERYTHING = """
import importlib, pkgutil, sys, engine
skipped = ("engine.text.sandbox.", "engine.text.papers.worker", "engine.serve.__main__")
skipped += ("engine.integrations.transformers",)  # transformers would import the stranger `kernels`
for found in pkgutil.walk_packages(engine.__path__, "engine."):
    if not found.name.endswith("__main__") and not found.name.startswith(skipped):
        importlib.import_module(found.name)
strangers = [m for m in sys.modules if m.split(".")[0] in ("kernels", "weights", "tools")]
assert not strangers and len(sys.modules) > 300, strangers
print(engine.__file__)
"""


def test_every_module_is_found_under_its_installed_name(site, tmp_path):
    pytest.importorskip("starlette")
    done = run(site, tmp_path, "-c", EVERYTHING)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(site / "engine" / "__init__.py")


HINTS = """
import warnings
warnings.showwarning = lambda message, *rest, **more: print("HINT", message)
from engine import LLM, OmniKV
for method in (None, OmniKV()):
    print(LLM("model", method=method, max_context=1024, load=False).plan().note)
"""


@pytest.mark.parametrize("home", ["clone", "wheel"])
def test_a_hint_names_what_is_there(home, site, tmp_path):
    """`python -m tools.calibrate` is in a clone; in a wheel it is engine.tools.calibrate."""
    shutil.copytree(ROOT / "weights" / "pocket", tmp_path / "model")
    (tmp_path / "model" / "omnikv.json").unlink()
    done = run(site if home == "wheel" else ROOT, tmp_path, "-c", HINTS)
    assert done.returncode == 0, done.stderr
    hints = done.stdout.splitlines()
    program = "python -m tools.calibrate" if home == "clone" else "python -m engine.tools.calibrate"
    assert len(hints) == 2 and all(f"by {program}" in hint for hint in hints), hints
    asked = run(site if home == "wheel" else ROOT, tmp_path, *program.split()[1:], "--help")
    assert asked.returncode == 0 and program in asked.stdout


def test_it_lists_the_programs_that_it_has(site, tmp_path):
    listed = run(site, tmp_path, "-m", "engine.tools").stdout
    names = [line for line in listed.splitlines() if line.startswith("engine.tools.")]
    assert "engine.tools.bench" in names and "engine.tools.convert.quantise" in names
    assert not any("check_gpu" in name or "repo" in name for name in names)


def test_it_answers_anywhere(site, tmp_path):
    done = run(site, tmp_path, "-m", "engine.chat", "-p", "What is the pass key of Alice?")
    assert done.returncode == 0 and "66160" in done.stdout, done.stderr


def test_imports_get_their_installed_names():
    installed = setup_module_of_the_clone().installed
    source = "from kernels.rows import forms\nimport weights\n\ndef f():\n    from tools import a\n"
    text = installed(source + "# kernels; python -m tools.bench\n")
    assert text.splitlines() == [
        "from engine.kernels.rows import forms",
        "from engine import weights",
        "",
        "def f():",
        "    from engine.tools import a",
        "# kernels; python -m engine.tools.bench",
    ]
    assert installed(text) == text
    for form in ("import kernels.rows", "import kernels as k", "import weights, os"):
        with pytest.raises(ValueError, match="line 1: expected `from"):
            installed(form)
