"""What a wheel holds: one top-level package.

In a clone the engine is engine/, kernels/, weights/ and tools/ side by side. Installed it is
`engine` alone, with the others inside it, since `kernels` and `tools` are also names of other
people's packages: `from kernels.rows import forms` becomes `from engine.kernels.rows import forms`
in the wheel, and a hint that names `python -m tools.bench` names `python -m engine.tools.bench`.
An editable install keeps the clone's names.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# programs of tools/ that a user without a clone has use for, and what they import
TOOLS = ("banks", "bench", "calibrate", "common", "compare", "convert", "tasks")
GUESTS = ("kernels", "weights", "tools")
IMPORT = re.compile(rf"^(\s*from )({'|'.join(GUESTS)})\b(?=[\w.]* import )", re.MULTILINE)
WHOLE = re.compile(rf"^(\s*)import ({'|'.join(GUESTS)})$", re.MULTILINE)
PROGRAM = re.compile(rf"(?<=python -m )(?=(?:{'|'.join(GUESTS)})\b)")


def installed(source: str) -> str:
    """The text of a module as a wheel has it. Raises ValueError for an import in a form that is
    not rewritten: `import kernels.rows`, whose uses would have to be found too.
    """
    text = WHOLE.sub(r"\1from engine import \2", IMPORT.sub(r"\1engine.\2", source))
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        left = [name for name in names if name.partition(".")[0] in GUESTS]
        if left:
            raise ValueError(f"line {node.lineno}: expected `from {left[0]} import ...`")
    return PROGRAM.sub("engine.", text)


class OnePackage(build_py):
    """Copies the guests into engine/, then gives every import its installed name."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file) of a package; of tools itself only how it starts."""
        found = super().find_package_modules(package, package_dir)
        if package.rpartition(".")[2] != "tools" or self.editable_mode:
            return found
        return [entry for entry in found if entry[1].startswith("__")]

    def run(self) -> None:
        """Build, and rewrite what was built."""
        super().run()
        if self.editable_mode:
            return
        for path in sorted(Path(self.build_lib, "engine").rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                source = path.read_text(encoding="utf-8")
                try:
                    text = installed(source)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from None
                path.write_text(text, encoding="utf-8")


def layout(editable: bool) -> dict:
    """packages, package_dir and package_data of setup()."""
    inside = "" if editable else "engine."
    tools = ["tools", *(f"tools.{name}" for name in TOOLS)]
    tools += [f"tools.{name}.*" for name in TOOLS]
    guests = find_packages(include=["kernels", "kernels.*", "weights", "weights.*", *tools])
    return {
        "packages": find_packages(include=["engine", "engine.*"]) + [inside + g for g in guests],
        "package_dir": {f"{inside}{name}": name for name in GUESTS},
        "package_data": {
            "engine": ["py.typed", "*.pyi"],
            "engine.evidence": ["*.html"],
            "engine.serve.page": ["*.html", "*.css", "*.js"],
            f"{inside}kernels.native": ["*.h", "*.cpp", "prebuilt/*.so"],
            f"{inside}weights": ["pocket/*", "judge/*"],
        },
    }


if __name__ == "__main__":
    setup(cmdclass={"build_py": OnePackage}, **layout("editable_wheel" in sys.argv))
