"""How the C++ kernels come to be: compiled once, kept, and done without where they cannot be.

Stops: a machine without a compiler that fails, a compiler that is asked twice, a library out of a
folder that others can write to, half a file under the final name.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import dispatch, trial
from kernels.native import library

ROOT = Path(__file__).resolve().parents[2]
GOOD = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing, with one small source and a cache of its own."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text(GOOD)
    for name, value in (("_reason", None), ("_library", None), ("SOURCES", ("one.cpp",))):
        monkeypatch.setattr(library, name, value)
    monkeypatch.setattr(library, "FOLDER", tmp_path / "source")
    monkeypatch.setattr(library, "trial", str)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if library.missing():
        pytest.skip(library.missing())
    return tmp_path


def kept(folder):
    return sorted((folder / "cache" / "omnikv" / "kernels").glob("*"))


def again(monkeypatch):
    monkeypatch.setattr(library, "_reason", None)


def test_it_is_compiled_once_and_anew_when_a_source_changes(fresh, monkeypatch):
    assert library.to_compile() and library.native().answer() == 42
    (first,) = kept(fresh)
    assert not library.to_compile()
    monkeypatch.setattr(library, "_compile", None)
    again(monkeypatch)
    assert not library.to_compile() and library.native().answer() == 42
    (fresh / "source" / "one.cpp").write_text(GOOD.replace("42", "43"))
    again(monkeypatch)
    assert library.to_compile() and first.exists()


@pytest.mark.parametrize(
    "broken, said",
    [
        (dict(PATH=""), "no C++ compiler"),
        (dict(OMNIKV_NATIVE="0"), "OMNIKV_NATIVE=0"),
    ],
)
def test_without_it_torch_runs_and_the_reason_is_said(fresh, monkeypatch, broken, said):
    for name, value in broken.items():
        monkeypatch.setenv(name, value)
    assert said in library.missing() and library.native() is None and not library.to_compile()


def test_a_compiler_that_fails_is_named_and_leaves_nothing(fresh):
    (fresh / "source" / "one.cpp").write_text("no C++\n")
    assert library.missing() == "" and library.native() is None
    assert "failed (1)" in library.missing() and "error" in library.missing()
    assert kept(fresh) == []


def test_on_another_system_nothing_is_tried(fresh, monkeypatch):
    monkeypatch.setattr(library.os, "name", "nt")
    found = library.native(), library.missing()
    monkeypatch.undo()
    assert found[0] is None and "no kernels for" in found[1]


@pytest.mark.parametrize("name", ["attend", "attend_prompt", "Product", "product"])
def test_what_a_compiler_made_wrong_is_not_used(monkeypatch, name):
    if library.native() is None:
        pytest.skip(library.missing())
    assert trial.fault() == "" and dispatch.library.trial is trial.fault
    right = getattr(trial, name)

    def doubled(found):
        return tuple(2 * t for t in found) if isinstance(found, tuple) else 2 * found

    def wrong(*given, **named):
        found = right(*given, **named)
        return (lambda x: 2 * found(x)) if name == "Product" else doubled(found)

    monkeypatch.setattr(trial, name, wrong)
    for field, value in (("_reason", None), ("_library", None)):
        monkeypatch.setattr(library, field, value)
    assert library.native() is None and "is wrong by" in library.missing()


def test_a_compiler_that_never_ends_is_stopped(fresh, monkeypatch):
    slow = fresh / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")
    monkeypatch.setattr(library, "PATIENCE", 0.2)
    assert library.native() is None and "took more than" in library.missing()
    assert kept(fresh) == []


def test_a_cache_that_others_can_write_to_is_not_trusted(fresh):
    folder = fresh / "cache" / "omnikv" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert library.native().answer() == 42 and kept(fresh) == []


def test_a_file_that_is_no_library_is_made_again(fresh):
    path = fresh / "cache" / "omnikv" / "kernels" / library._name(*library._compiler())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"torn")
    assert library.native().answer() == 42
    assert kept(fresh) == [path] and path.stat().st_size > 1000


def compiles(folder, answers):
    library.FOLDER, library.SOURCES = Path(folder) / "source", ("one.cpp",)
    answers.put(library.native().answer())


def test_two_processes_compile_at_the_same_time(fresh):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    pair = [context.Process(target=compiles, args=(fresh, answers)) for _ in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [answers.get(timeout=5) for _ in pair] == [42, 42] and len(kept(fresh)) == 1


def test_it_shares_torchs_openmp():
    """Two of them in a process would be two teams of threads on the same cores."""
    code = (
        "import torch\nfrom kernels.native.library import native\nnative()\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({m for m in maps if 'libgomp' in m or 'libiomp' in m or 'libomp' in m}))"
    )
    if library.missing() or not os.path.exists("/proc/self/maps") or torch.version.cuda:
        pytest.skip("no library, no /proc, or a torch that hides its OpenMP under its own name")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
