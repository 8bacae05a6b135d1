"""Rules of the house that a machine can hold: imports in one direction and in no circle, lengths,
no foreign names caught, no words about files that are not here, pins within ranges, a true tree.

`python -m tools.repo.house` prints the figures.
"""

import ast
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement

from tools.repo import house

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "kernels": {"kernels", "torch", "triton"},
    "weights": {"weights", "torch", "huggingface_hub", "safetensors"},
}
FORBIDDEN = {"engine": {"tools", "tests", "transformers"}, "tools": {"tests"}}
# the module that is for transformers; nobody here imports it
BUT = {"engine.integrations.transformers": {"transformers"}}
MOST_LINES = 65  # of a function; it may only go down
TYPES_ONLY = {"typing_extensions"}  # of annotations that Python 3.10 cannot spell
# empty: transformers looks for a package of this name, and signal handling imports nothing
SILENT = {"kernels", "engine.base"}
TEXTS = (".py", ".cpp", ".h", ".md", ".toml", ".html", ".txt", "")  # "": Makefile, .ci/run
CITED = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[A-Z][A-Z_]+\.md)\b")
ELSEWHERE = re.compile(r"\.\./shared\b|\b[Hh]ook [A-G]\b|\bFACTS\b|\bitem \d+\b")
KNOWN_WRITES = {
    "tools.studies.exact.frozen: ExactRunner._dense_step",
    "tools.studies.exact.frozen: ExactRunner._kept_draft",
    "tools.studies.exact.frozen: ExactRunner._own_draft",
}
MODULES = house.sources(ROOT)
ARROWS = house.arrows(MODULES)


def texts():
    """(path, content) of every text file that belongs to the project."""
    for name in ("engine", "kernels", "weights", "tools", "tests", "docs", "examples", ".ci", "."):
        found = (ROOT / name).glob("*") if name == "." else (ROOT / name).rglob("*")
        for path in found:
            if path.is_file() and path.suffix in TEXTS and path != Path(__file__):
                try:
                    yield path, path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


@pytest.mark.parametrize("package", ["kernels", "weights", "engine", "tools"])
def test_a_package_imports_what_it_may(package):
    for name, path in MODULES.items():
        if name.split(".")[0] != package:
            continue
        found = {module.split(".")[0] for module, _ in house.imported(house.parse(path))}
        found -= set(sys.stdlib_module_names)
        found -= TYPES_ONLY
        assert found <= ALLOWED.get(package, found), f"{path}: {found - ALLOWED[package]}"
        found -= BUT.get(name, set())
        assert not found & FORBIDDEN.get(package, set()), f"{path}: {found & FORBIDDEN[package]}"


def test_nobody_imports_the_module_that_is_for_transformers():
    for name in BUT:
        assert not [module for module, targets in ARROWS.items() if name in targets]


def test_every_room_has_a_floor():
    """tools/repo/house.py names them: serve and chat, llm, batch, session, ... base, kernels."""
    assert house.unnamed(MODULES) == []


def test_no_import_points_up_the_house():
    """Not for types either, and not into another room of the same floor."""
    assert house.upward(ARROWS) == []


def test_no_modules_import_each_other_in_a_circle():
    assert house.cycles(ARROWS) == []


@pytest.mark.parametrize("package", house.packages(MODULES))
def test_no_rooms_of_a_package_import_each_other_in_a_circle(package):
    assert house.cycles(house.rooms(ARROWS, package)) == []


def test_a_circle_and_an_arrow_that_points_up_are_seen():
    """Also a circle between packages that is none between modules, and a step across a floor."""
    graph = {"engine.bank.a": {"engine.plan.a"}, "engine.plan.b": {"engine.bank.b"}}
    assert house.cycles(graph) == []
    assert house.cycles(house.rooms(graph, "engine")) == [["engine.bank", "engine.plan"]]
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    graph = {"engine.bank.a": {"engine.methods.b", "engine.plan.c"}}
    graph["engine.serve.x"] = {"engine.chat.y"}
    graph["kernels.rows.x"] = {"weights.y"}
    assert house.upward(graph) == [
        "engine.bank.a -> engine.methods.b",
        "engine.serve.x -> engine.chat.y",
    ]


def written(folder, **files):
    """A small house of these modules of engine/."""
    (folder / "engine").mkdir()
    for name, text in files.items():
        (folder / "engine" / f"{name}.py").write_text(text)
    return house.sources(folder)


def test_an_import_for_the_type_checker_is_an_arrow_and_is_named(tmp_path):
    hidden = "if TYPE_CHECKING:\n    import engine.b\ndef f():\n    from engine import b\n"
    modules = written(tmp_path, a=hidden, b="import engine.a\n")
    assert house.arrows(modules) == {"engine.a": {"engine.b"}, "engine.b": {"engine.a"}}
    assert house.hidden(modules) == ["engine.a -> engine.b"]


def test_nothing_is_imported_for_the_type_checker_alone():
    assert house.hidden(MODULES) == []


def test_a_class_is_written_to_in_its_own_module():
    """Two modules that write one object's fields are two owners of one idea. KNOWN_WRITES may only
    shrink.
    """
    assert set(house.foreign_writes(MODULES)) == KNOWN_WRITES


def test_a_write_to_another_modules_class_is_seen(tmp_path):
    modules = written(
        tmp_path,
        a="class Held:\n    def f(self, other: Held):\n        other.x = 1\n",
        b="from engine.a import Held\n"
        "def f(held: Held, mine: Other):\n    held.x, mine.y = 1, 2\nclass Other: ...\n",
        c="from elsewhere import Held\ndef f(held: Held):\n    held.x = 1\n",
    )
    assert house.foreign_writes(modules) == ["engine.b: Held.x"]


def test_a_package_has_few_modules():
    """Registries, lists of many files of one shape, are named in tools/repo/house.py."""
    assert house.crowded(MODULES) == []


def test_every_package_says_what_it_is_for():
    silent = [
        name
        for name, path in MODULES.items()
        if path.name == "__init__.py" and name not in SILENT
        if not ast.get_docstring(house.parse(path))
    ]
    assert silent == []


def test_the_figures_of_the_house_do_not_grow():
    """`python -m tools.repo.house --write` takes today's; a commit that raises one says why."""
    kept = json.loads(house.FIGURES.read_text(encoding="utf-8"))
    now = house.figures(MODULES, ARROWS)
    grown = [
        f"{package}: {what} {number}, was {kept.get(package, {}).get(what, 0)}"
        for package, row in now.items()
        for what, number in row.items()
        if number > kept.get(package, {}).get(what, 0)
    ]
    assert not grown, "\n".join(grown)


def test_pages_draw_the_house_as_it_is():
    """`python -m tools.repo.house --picture` writes them."""
    for page, text in house.made_pages(MODULES, ROOT).items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: run it"
        if page.suffix == ".svg":
            ElementTree.fromstring(text)  # no browser draws half of one


def test_a_type_checker_sees_the_public_names():
    import engine

    stub = ast.parse((ROOT / "engine" / "__init__.pyi").read_text(encoding="utf-8"))
    seen = {(name, home) for home, names in house.imported(stub) for name in names}
    assert seen == set(engine._HOMES.items())


def test_functions_stay_short():
    functions = [
        f"{function.place}: {function.lines}"
        for function in house.functions(MODULES, ROOT)
        if function.lines > MOST_LINES
    ]
    assert not functions, "\n".join(["longer than the limit:", *functions])


def test_nobody_cites_what_is_not_in_the_repository():
    """A stranger has this repository and nothing else: METHODS.md is docs/METHODS.md, and so on."""
    dangling = []
    for path, content in texts():
        for number, line in enumerate(content.splitlines(), 1):
            boxes = (ROOT / "weights" / name for name in ("pocket", "judge"))
            homes = (ROOT, path.parent, ROOT / "docs", *boxes)
            cited = [
                name
                for name in CITED.findall(line)
                if not any((home / name).is_file() for home in homes)
            ]
            cited += ELSEWHERE.findall(line)
            dangling += [f"{path.relative_to(ROOT)}:{number}: {name}" for name in cited]
    assert not dangling, "\n".join([f"{len(dangling)} dangling references:", *dangling])


def test_our_kernels_do_not_pass_for_the_hubs():
    """transformers looks for a package of this name; ours on the path must not break it, so it
    stays empty.
    """
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
    import transformers
    import transformers.integrations.hub_kernels

    import kernels

    assert Path(kernels.__file__).is_relative_to(ROOT)
    assert transformers.LlamaForCausalLM


def pins():
    """Requirements of requirements.txt and requirements-dev.txt that hold for this Python."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith(("#", "-r")):
                requirement = Requirement(line)
                if requirement.marker is None or requirement.marker.evaluate():
                    yield requirement


def test_every_pin_lies_in_its_range_and_every_range_has_a_pin():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    ranges = {
        r.name: r.specifier
        for r in map(Requirement, ranges)
        if r.marker is None or r.marker.evaluate()
    }
    pinned = {}
    for pin in pins():
        assert [s.operator for s in pin.specifier] == ["=="], pin
        pinned[pin.name] = next(iter(pin.specifier)).version
    assert pinned.keys() == ranges.keys()
    assert all(version in ranges[name] for name, version in pinned.items())


def test_a_clock_is_set_for_one_thread():
    """A server's event loop in another thread asks the same `time` (tests/clocks.py)."""
    patched = re.compile(r"""setattr\(\s*(?:"[\w.]*\btime\.\w+"|[\w.]*\btime,)""")
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file.name != "clocks.py":
            found = patched.search(file.read_text(encoding="utf-8"))
            assert not found, f"{file.relative_to(ROOT)}: {found and found[0]}: use set_clock"


def test_the_readmes_tree_and_targets_are_on_disk():
    readme, make = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / "Makefile").read_text()
    tree = readme[readme.index("## The tree") :]
    for folder in re.findall(r"^(\w+)/ ", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
    for name in re.findall(r"`((?:engine|kernels|weights|tools|tests)/[\w/.]+)`", readme):
        assert (ROOT / name).exists(), name
    targets = set(re.findall(r"^([\w-]+):", make, re.MULTILINE))
    assert {
        "chat",
        "test",
        "lint",
        "format",
        "bench",
        "kernels",
        "check-gpu",
        "eval",
        "pocket",
        "clean",
    } <= targets
    assert set(re.findall(r"^make ([\w-]+)", readme, re.MULTILINE)) <= targets
    for module in re.findall(r"-m (tools\.\w+)", make):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file() or (
            ROOT / module.replace(".", "/")
        ).is_dir(), module
