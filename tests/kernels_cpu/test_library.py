"""How the C++ kernels come to be: compiled once, kept, and done without where they cannot be.

Stops: a machine without a compiler that fails, a compiler that is asked twice, a library out of a
folder that others can write to, half a file under the final name.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from kernels.attention import native as attention
from kernels.layer import native_latent, native_product, native_step
from kernels.layer.many import strips
from kernels.native import cache, compilers, library
from kernels.native.amx import TILES
from kernels.prefill import native as prefill
from kernels.prefill.native import attend_prompt
from kernels.quant import native as quant
from kernels.rows import fp8, hadamard, int4, int8
from kernels.rows import native as rows
from kernels.select import native as select
from kernels.select import topk

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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
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


WRONG = [
    (attention, "attend", attention._FLOATS),
    (attention, "attend", attention._PACKED),
    (attention, "head_most", attention._FLOATS),
    (prefill, "attend_prompt", prefill._BINDING),
    (native_product.Product, "__call__", native_product._BINDING),
    (strips.StripProduct, "__call__", strips._BINDING),
    (native_latent, "by_head", native_latent._BINDING),
    (native_step, "normalize_rows", native_step._BINDING),
    (native_step, "rotate_store", native_step._BINDING),
    (quant, "product", quant._BINDING),
    (rows, "pack", rows.INT8),
    (rows, "pack", rows.INT4),
    (rows, "pack", rows.FP8),
    (hadamard, "transform", rows.TRANSFORM),
    (select, "select", select.BINDING),
]


@pytest.mark.parametrize("place, name, binding", WRONG)
def test_what_a_compiler_made_wrong_is_not_used_and_all_else_is(monkeypatch, place, name, binding):
    if library.native() is None:
        pytest.skip(library.missing())
    assert {int8, int4, fp8, topk}  # they register what they compare with
    library.try_all()
    assert library.missing() == ""
    right = getattr(place, name)

    def wrong(*given, **named):
        found = right(*given, **named)
        for tensor in found if isinstance(found, tuple) else (found,):
            if tensor is not None:
                tensor.view(torch.uint8).add_(1)
        if found is None:
            given[-1].add_(1)
        return found

    monkeypatch.setattr(place, name, wrong)
    others = [one for one in library.BINDINGS if one is not binding and one not in TILES]
    monkeypatch.setattr(binding, "_tried", (None, ""))
    assert not binding.usable() and all(one.usable() for one in others)
    said = library.missing()
    assert "differs" in said and said.endswith("as compiled here")


def test_a_compiler_that_never_ends_is_stopped(fresh, monkeypatch):
    slow = fresh / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")
    monkeypatch.setattr(compilers, "PATIENCE", 0.2)
    assert library.native() is None and "took more than" in library.missing()
    assert kept(fresh) == []


def test_a_cache_that_others_can_write_to_is_not_trusted(fresh):
    folder = fresh / "cache" / "omnikv" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert library.native().answer() == 42 and kept(fresh) == []


@pytest.mark.parametrize("kept_bytes", [0, 4, 4000, -600, -1])
def test_a_file_that_was_cut_short_is_made_again(fresh, monkeypatch, kept_bytes):
    """The loader would touch a page that the file no longer has: SIGBUS, at every start."""
    assert library.native().answer() == 42
    (path,) = kept(fresh)
    data = path.read_bytes()
    path.unlink()  # this process has the old one mapped
    path.write_bytes(data[:kept_bytes])
    again(monkeypatch)
    assert library.to_compile() and library.native().answer() == 42
    assert kept(fresh) == [path] and len(path.read_bytes()) == len(data)


def test_a_library_of_other_instructions_in_a_shared_cache_is_not_taken(fresh, monkeypatch):
    """Of another machine's, copied under this one's name: it ended the process by SIGILL."""
    assert library.native().answer() == 42
    (path,) = kept(fresh)
    path.unlink()
    path.write_bytes(b"of another CPU")
    cache.seal(path, library._stamp((*library.FLAGS, "-mother")))
    assert cache.whole(path)
    again(monkeypatch)
    assert library.to_compile() and library.native().answer() == 42


def test_a_changed_byte_is_noticed(fresh):
    assert library.native().answer() == 42
    (path,) = kept(fresh)
    data = bytearray(path.read_bytes())
    assert cache.whole(path)
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert not cache.whole(path)


def test_a_full_disk_moves_on_to_the_next_folder(fresh, monkeypatch):
    """And what was compiled there is found again by the next process."""
    full = fresh / "cache"

    def has_room(place):
        return full not in place.parents

    monkeypatch.setattr(cache, "has_room", has_room)
    assert library.native().answer() == 42 and kept(fresh) == []
    again(monkeypatch)
    assert not library.to_compile() and library.native().answer() == 42


def compiler(fresh, monkeypatch, body):
    """Put a script before the machine's compiler, which it may run as "$REAL"."""
    monkeypatch.setenv("REAL", library._compiler()[0])
    script = fresh / "c++"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")


def test_a_disk_that_fills_while_compiling_moves_on_to_the_next_folder(fresh, monkeypatch):
    body = 'case "$*" in *"/cache/"*) echo "error: No space left on device" >&2; exit 1;; esac'
    compiler(fresh, monkeypatch, body + '\nexec "$REAL" "$@"')
    assert library.native().answer() == 42 and kept(fresh) == []


def test_a_folder_without_programs_is_passed_over_at_once(fresh, monkeypatch):
    monkeypatch.setattr(cache, "_runs_programs", lambda place: "cache" not in place.parts)
    assert library.native().answer() == 42 and kept(fresh) == []


def test_a_relative_cache_is_ignored(fresh, monkeypatch):
    monkeypatch.chdir(fresh)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(fresh / "home"))
    assert library.native().answer() == 42
    assert not (fresh / "relative").exists()
    assert list((fresh / "home" / ".cache" / "omnikv" / "kernels").glob("*.so"))


def test_a_folder_under_one_that_others_can_change_is_not_trusted(fresh):
    folder = fresh / "cache" / "omnikv" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)
    assert folder not in list(cache.kept())
    folder.parent.chmod(0o700)
    assert folder in list(cache.kept())


def test_children_of_a_compiler_that_is_stopped_end_with_it(fresh, monkeypatch):
    compiler(fresh, monkeypatch, f"sh -c 'echo $$ > {fresh}/child; exec sleep 60' & wait")
    monkeypatch.setattr(compilers, "PATIENCE", 2)
    assert library.native() is None
    child = int((fresh / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"the compiler's child {child} still runs")


def test_a_compiler_that_talks_without_end_is_not_kept_in_memory(fresh, monkeypatch):
    compiler(fresh, monkeypatch, "head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 1")
    sizes, hear = [], compilers._Compiler._hear

    def heard(compiler, stream):
        hear(compiler, stream)
        sizes.append(len(compiler._said))

    monkeypatch.setattr(compilers._Compiler, "_hear", heard)
    assert library.native() is None and "failed (1)" in library.missing()
    assert sizes == [compilers.HEARD]


def test_no_more_compilers_run_than_there_are_cores(fresh, monkeypatch):
    """Thirty at a time were 9 GB of memory on any machine."""
    names = tuple(f"{i}.cpp" for i in range(5))
    for name in names:
        (fresh / "source" / name).write_text("")
    monkeypatch.setattr(library, "SOURCES", ("one.cpp", *names))
    monkeypatch.setattr(compilers, "_cores", lambda: 2)
    count = f"echo $(ls {fresh}/running | wc -l) >> {fresh}/seen"
    (fresh / "running").mkdir()
    body = f'touch {fresh}/running/$$; {count}; "$REAL" "$@"; code=$?; '
    body += f"rm {fresh}/running/$$; exit $code"
    compiler(fresh, monkeypatch, body)
    assert library.native().answer() == 42
    seen = [int(line) for line in (fresh / "seen").read_text().split()]
    assert len(seen) == 7 and 1 <= max(seen) <= 2


def test_a_compiler_reads_nothing_of_the_users_input(fresh, monkeypatch):
    compiler(fresh, monkeypatch, f'cat > {fresh}/read; exec "$REAL" "$@"')
    assert library.native().answer() == 42
    assert (fresh / "read").read_bytes() == b""


def test_leftovers_of_killed_compilers_and_old_libraries_go(fresh):
    folder = fresh / "cache" / "omnikv" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    old, young = folder / ".making-old", folder / ".making-young"
    old.mkdir()
    young.mkdir()
    libraries = [folder / f"kernels-{i:02d}.so" for i in range(cache.KEPT + 3)]
    for i, path in enumerate(libraries):
        path.write_bytes(b"")
        os.utime(path, (1000 + i, 1000 + i))
    os.utime(old, (1000, 1000))
    cache.sweep(folder)
    assert kept(fresh) == sorted([young, *libraries[3:]])


def test_a_prompt_of_no_queries_attends_to_nothing():
    """It divided by the number of its parts: SIGFPE."""
    if library.native() is None:
        pytest.skip(library.missing())
    q, k = torch.zeros(0, 4, 64), torch.zeros(2, 10, 64)
    out, lse = attend_prompt(q, k, k, 0.125, 0)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("code, error", [(1, ValueError), (2, MemoryError)])
def test_a_kernels_code_becomes_an_error(code, error):
    library.check(0, "a product")
    with pytest.raises(error, match="a product"):
        library.check(code, "a product")


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


def test_it_asks_for_no_openmp():
    """Its threads are a team of its own (team.cpp): a second OpenMP would be a third team, and
    Apple's compiler has none.
    """
    code = (
        "import torch\n"
        "from kernels.native.library import native\n"
        "def openmps():\n"
        "    return {m for m in open('/proc/self/maps').read().split() if 'omp.so' in m}\n"
        "before = openmps()\nnative()\nprint(len(before), openmps() == before)\n"
    )
    if library.missing() or not os.path.exists("/proc/self/maps"):
        pytest.skip("no library, or no /proc")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["True"], done.stderr
    assert not any("omp" in flag for flag in library.FLAGS)


# ---------------------------------------------------------------- the libraries of a wheel


@pytest.fixture
def carried(fresh, monkeypatch):
    """`fresh`, with a library that a wheel carries, and no compiler."""
    monkeypatch.setattr(library, "PREBUILT", fresh / "prebuilt")
    library.prebuild(fresh / "prebuilt", library._set())
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    return fresh


def test_a_wheels_library_needs_no_compiler(carried):
    assert library.missing() == "" and not library.to_compile()
    assert library.native().answer() == 42
    assert not kept(carried)  # nothing was compiled


def test_a_wheels_library_of_other_sources_or_flags_is_not_taken(carried, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(library, "FLAGS", (*library.FLAGS, "-DOTHER"))
        assert library.native() is None and "no C++ compiler" in library.missing()
    again(monkeypatch)
    (carried / "source" / "one.cpp").write_text(GOOD.replace("42", "43"))
    assert library.native() is None
    again(monkeypatch)
    monkeypatch.setattr(library, "COMPILERS", ("c++", "g++", "clang++"))
    assert library.to_compile() and library.native().answer() == 43


@pytest.mark.parametrize("damage", ["short", "flipped", "gone", "elsewhere"])
def test_a_damaged_library_of_a_wheel_is_not_taken(carried, monkeypatch, damage):
    path = carried / "prebuilt" / library._file(library._set())
    data = path.read_bytes()
    flipped = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    if damage in ("short", "flipped"):
        path.write_bytes({"short": data[:-1], "flipped": flipped}[damage])
    elif damage == "gone":
        path.unlink()
    else:  # another instruction set's
        path.rename(path.with_name("other.so"))
    assert library.native() is None and "no C++ compiler" in library.missing()


def test_a_wheels_library_that_does_not_load_is_compiled_instead(carried, monkeypatch):
    """One of another C library."""
    path = carried / "prebuilt" / library._file(library._set())
    path.write_bytes(b"no library")
    library.cache.seal(path, library._stamp(library._flags()))
    assert library.native() is None
    again(monkeypatch)
    monkeypatch.setattr(library, "COMPILERS", ("c++", "g++", "clang++"))
    assert library.native().answer() == 42 and len(kept(carried)) == 1


def test_a_wheels_library_is_forbidden_as_any_other(carried, monkeypatch):
    monkeypatch.setenv("OMNIKV_NATIVE", "0")
    assert library.native() is None and library.missing() == "OMNIKV_NATIVE=0"


def test_nothing_is_compiled_for_the_compilers_own_machine():
    """A library that a wheel carries runs on every machine of its instruction set."""
    for flags in (library.FLAGS, *library.SETS.values(), *library.ARM_SETS.values()):
        assert not any(flag.startswith(("-mtune", "-mcpu")) or "native" in flag for flag in flags)
        marches = [flag for flag in flags if flag.startswith("-march")]
        assert all(flag.startswith("-march=armv8.") for flag in marches)  # a list of what is used


def test_prebuild_makes_every_instruction_set(fresh):
    library.prebuild(fresh / "all")
    made = sorted(path.stem for path in (fresh / "all").iterdir())
    compiler = library._found_compiler()
    known = [name for name in library.own_sets() if library._knows(compiler, name)]
    sets = {name: library.own_sets()[name] for name in known}
    assert made == sorted(sets)
    stamps = {library._stamp((*library.FLAGS, *flags)) for flags in sets.values()}
    for name, flags in sets.items():
        path = fresh / "all" / library._file(name)
        assert cache.whole(path, library._stamp((*library.FLAGS, *flags)))
        assert not cache.whole(path, b"other") and cache.whole(path)
    assert len(stamps) == len(made)


def test_prebuild_copies_what_is_in_the_cache(fresh, monkeypatch):
    assert library.native().answer() == 42
    monkeypatch.setattr(library, "_compile", None)
    (made,) = library.prebuild(fresh / "all", library._set())
    assert made.read_bytes() == kept(fresh)[0].read_bytes()


def test_another_machines_compiler_makes_libraries_for_it(fresh):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None or library.isa() in library.ARM_SETS:
        pytest.skip("no compiler of another machine")
    library.prebuild(fresh / "arm", *library.ARM_SETS, compiler=compiler)
    assert {path.stem for path in (fresh / "arm").iterdir()} == set(library.ARM_SETS)
    for name, flags in library.ARM_SETS.items():
        path = fresh / "arm" / f"{name}.so"
        assert cache.whole(path, library._stamp((*library.FLAGS, *flags)))
        assert path.read_bytes()[18:20] == b"\xb7\0"  # of an ELF file: EM_AARCH64


def test_prebuild_says_what_is_missing(fresh, monkeypatch):
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        library.prebuild(fresh / "all")
