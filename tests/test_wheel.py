"""The wheel: one top-level package, whole, beside strangers' `kernels`, `tools` and `weights`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernels.native import library
from tools.release.wheel import build, platform_tag

ROOT = Path(__file__).resolve().parents[1]
STRANGERS = ("kernels", "weights", "tools")


def setup_module_of_the_clone():
    """setup.py, without running it."""
    spec = importlib.util.spec_from_file_location("setup_of_the_wheel", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with this machine's own kernels, where it has a compiler, and another's."""
    pytest.importorskip("setuptools", minversion="77")
    home = tmp_path_factory.mktemp("wheel")
    (home / "carried").mkdir()
    (home / "carried" / "none.so").write_bytes(b"a library\0GLIBC_2.91\0")
    if library.native() is not None:
        library.prebuild(home / "carried", library._set())  # a copy of what is in the cache
    return build(home / "made", home / "carried")


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


def run(site, cwd, *arguments, **state):
    """Python in a folder elsewhere, with the wheel as the only engine; runs no C++ unless told."""
    state = {**os.environ, "PYTHONPATH": str(site), "OMNIKV_NATIVE": "0", **state}
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
    assert {"engine/fleet/ray_serve.py", "engine/fleet/dynamo.py"} <= set(names)
    assert not any("studies" in name or "/tests" in name for name in names)


def test_its_name_says_which_c_library_it_asks_for(wheel, tmp_path):
    assert wheel.name.endswith(f"-py3-none-manylinux_2_91_{platform.machine()}.whl")
    (tmp_path / "old.so").write_bytes(b"\0GLIBC_2.3.4\0GLIBC_2.14\0GLIBCXX_3.4\0")
    assert platform_tag([tmp_path / "old.so"], "x86_64") == "manylinux_2_17_x86_64"


KERNELS = """
from engine.kernels.native import library
assert not library.to_compile()
print(library.native()._name, library.missing())
"""


def test_it_runs_its_own_kernels_where_no_compiler_is(site, tmp_path):
    if library.native() is None:
        pytest.skip(library.missing())
    state = {"OMNIKV_NATIVE": "1", "PATH": str(tmp_path)}
    carried = site / "engine" / "kernels" / "native" / "prebuilt" / library._file(library._set())
    done = run(site, tmp_path, "-c", KERNELS, **state)
    assert done.stdout.split() == [str(carried)], done.stderr
    done = run(site, tmp_path, "-m", "engine.chat", "-p", "What is the pass key of Alice?", **state)
    assert done.returncode == 0 and "66160" in done.stdout, done.stderr
    assert "compil" not in done.stderr and not list(tmp_path.glob("cache/omnikv/kernels/*"))


EVERYTHING = """
import importlib, pkgutil, sys, engine
skipped = ("engine.text.sandbox.", "engine.text.papers.worker", "engine.serve.__main__")
skipped += ("engine.integrations.transformers",)  # transformers would import the stranger `kernels`
skipped += ("engine.fleet.ray_serve", "engine.fleet.dynamo")  # need what is no requirement
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
