"""Print the programs of this package and what each does."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = __package__ or "tools"  # engine.tools where the engine is installed


def programs() -> dict[str, str]:
    """{module that runs: the first sentence of its docstring}, in the order of their names."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(HERE).with_suffix("").parts
        if path.name == "__main__.py" and path.parent != HERE:
            parts, text = parts[:-1], (path.parent / "__init__.py").read_text(encoding="utf-8")
        elif '\nif __name__ == "__main__":' not in text or path == Path(__file__):
            continue
        if parts[0] == "common":  # each says itself that it is no program
            continue
        about = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
        found[".".join((PACKAGE, *parts))] = about.split(". ")[0].rstrip(".")
    return found


if __name__ == "__main__":
    print("Programs, each `python -m NAME --help`:\n")
    for name, about in programs().items():
        print(f"{name}\n    {about}")
