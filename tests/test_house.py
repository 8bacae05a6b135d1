"""Rules of the house that a machine can hold: imports in one direction, no foreign names caught,
pins within ranges, a true tree.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "kernels": {"kernels", "torch", "triton"},
    "weights": {"weights", "torch", "huggingface_hub", "safetensors"},
}
FORBIDDEN = {"engine": {"tools", "tests", "transformers"}, "tools": {"tests"}}


def imports(path):
    """First names of everything a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", ["kernels", "weights", "engine", "tools"])
def test_imports_point_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        found = {name for name in imports(path) if name not in sys.stdlib_module_names}
        assert found <= ALLOWED.get(package, found), f"{path}: {found - ALLOWED[package]}"
        assert not found & FORBIDDEN.get(package, set()), f"{path}: {found & FORBIDDEN[package]}"


def test_our_kernels_do_not_pass_for_the_hubs():
    """transformers looks for a package of this name; ours on the path must not break it, so it
    stays empty.
    """
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
    code = "import kernels, transformers.integrations.hub_kernels, transformers; print(kernels.__file__); transformers.LlamaForCausalLM"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) in done.stdout


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
