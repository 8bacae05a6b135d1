"""The C++ sources as a compiler sees them: warnings, sanitizers, and what Python repeats of them.

Stops: a warning that nobody sees, a read or write beside an array, a number or a struct that was
changed on one side alone.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.chain.layers
import kernels.experts.native_rows
import kernels.index.choose
import kernels.index.learn
import kernels.index.step
import kernels.kept.far
import kernels.kept.noisy
import kernels.kept.step
import kernels.kept.stream
import kernels.layer.linear
import kernels.layer.native_latent
import kernels.layer.native_step
import kernels.prefill.dense
import kernels.quant.linear
import kernels.ranks.join
import kernels.recurrent.conv
import kernels.recurrent.delta
import kernels.recurrent.gates
import kernels.recurrent.ssd
import kernels.select.drop
import kernels.select.page_bounds
import kernels.select.topk
import kernels.select.turns
import kernels.select.window.native
import kernels.sketch.agreement
import kernels.sketch.channel_bounds
import kernels.sketch.codes
import kernels.sketch.drawn
import kernels.sketch.guesses
import kernels.sketch.rebuilt
import kernels.sketch.shares  # noqa: F401  every binding is known
from kernels.native import library
from kernels.native.kinds import Kind

ROOT = Path(__file__).resolve().parents[2]
STRICT = "-Wall", "-Wextra", "-Werror", "-fsyntax-only"


@pytest.fixture
def compiler():
    try:
        return library._compiler()[0]
    except library._Missing as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(
    "name", sorted({flags: name for name, flags in library._FLAGS_OF.items()}.values())
)
def test_no_source_has_a_warning(compiler, name, tmp_path):
    """Of another machine's set where its compiler is here too. Most of a source's time goes into
    the compiler's own header of vectors, which is read once.
    """
    assert "-w" not in library.FLAGS
    if name not in library.own_sets():
        compiler = shutil.which("aarch64-linux-gnu-g++" if name in library.ARM_SETS else "")
    if not compiler or not library._knows(compiler, name):
        pytest.skip(f"no compiler for {name}")
    sources = library.SOURCES
    if name == "amx":  # the others see nothing but avx512_bf16
        sources = [n for n in sources if n == "amx.cpp" or n.startswith("tiled_")]
    strict = [compiler, *library.FLAGS, *library._FLAGS_OF[name], *STRICT]
    header = tmp_path / "first.h"
    header.write_text(f'#include "{library.FOLDER / "vector.h"}"\n')
    made = [*strict[:-1], "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(made, check=True)
    commands = [
        [*strict, "-include", str(header), str(library.FOLDER / source)] for source in sources
    ]
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "".join(said)


def test_every_source_is_compiled_and_keeps_its_names_to_itself():
    """Two structs of one name in two sources are one struct to a linker: one is wrong."""
    sources = sorted(library.FOLDER.glob("*.cpp"))
    assert sorted(library.SOURCES) == [path.name for path in sources]
    for path in [*sources, *library.FOLDER.glob("*.h")]:
        inside = False
        for line in path.read_text().splitlines():
            inside = line == "namespace {" or (inside and line != "}  // namespace")
            if re.match(r"(struct|static|template|constexpr|typedef|INLINE|enum) ?", line):
                assert inside, f"{path.name}: {line}"


def test_kinds_are_the_same_in_both_languages():
    said = (library.FOLDER / "kinds.h").read_text()
    assert dict(re.findall(r"(\w+) = (\d+),", said)) == {k.name: str(k.value) for k in Kind}


def test_every_mirrored_struct_has_its_size_compared():
    said = "".join(path.read_text() for path in library.FOLDER.glob("*.cpp"))
    exported = set(re.findall(r"int (omnikv_sizeof_\w+)\(\)", said))
    assert exported == {name for binding in library.BINDINGS for name in binding._sizes}


def test_a_struct_of_another_size_switches_its_binding_off():
    if library.native() is None:
        pytest.skip(library.missing())

    class Short(ctypes.Structure):
        _fields_ = [("weight", ctypes.c_void_p)]

    binding = library.Binding("a matrix", omnikv_sizeof_matrix=Short)
    try:
        assert not binding.usable()
        assert "a matrix: a struct of 32 bytes, 8 in Python" in library.missing()
        assert kernels.layer.native_step.usable()
    finally:
        library.BINDINGS.remove(binding)


def sanitized(compiler, folder, libraries, *sanitizer, **options):
    """Run tests/kernels_cpu/sanitized.py under a sanitizer: what it ended with."""
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in (*libraries, "libstdc++.so.6")
    ]
    paths = [done.stdout.strip() for done in found]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip("no sanitizers")
    state = {
        "XDG_CACHE_HOME": str(folder),
        "LD_PRELOAD": " ".join(paths),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "tests.kernels_cpu.sanitized", *sanitizer]
    if "TSAN_OPTIONS" in options and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # it knows only one layout of the memory
    state.update(options)
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **state}, capture_output=True, text=True
    )


def test_sanitizers_find_nothing(compiler, tmp_path):
    """int8 rows at counts that are no multiple of 16 once read 8 bytes too much."""
    asan = "detect_leaks=0:verify_asan_link_order=0:detect_odr_violation=2"
    done = sanitized(compiler, tmp_path, ["libasan.so", "libubsan.so"], ASAN_OPTIONS=asan)
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]


def test_threads_meet_only_where_they_wait_for_each_other(compiler, tmp_path, request):
    if not request.config.getoption("--whole-grid"):
        pytest.skip("a minute: with --whole-grid")
    # torch's own code was not compiled with it
    tsan = "ignore_noninstrumented_modules=1:report_signal_unsafe=0"
    done = sanitized(compiler, tmp_path, ["libtsan.so"], "thread", TSAN_OPTIONS=tsan)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this system's layout of the memory is not the sanitizer's")
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
