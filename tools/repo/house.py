"""The structure of the code: rooms, floors, import arrows, circles, lengths and annotations.

    python -m tools.repo.house [FOLDER] [--arrows] [--write] [--picture]

tests/test_house.py holds the tree to the rules here and to the figures of tests/house.json. An
arrow is any import of one of our modules by another: at any depth of a file, and for types too.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.repo import pages

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("engine", "kernels", "weights", "tools")
FIGURES = ROOT / "tests" / "house.json"
CORE = ROOT / "tests" / "core.json"
# From the top of the house to its ground, one line a floor: an arrow points down or stays inside a
# room. docs/architecture.svg is drawn from this table.
FLOORS = (
    ("tools.studies",),
    ("tools.check_gpu",),
    ("tools.paper",),
    ("tools.fidelity", "tools.suites"),
    ("tools.compare", "tools.gpu", "tools.families", "tools.speed"),
    ("tools.banks", "tools.bench", "tools.real_model"),
    ("tools.calibrate",),
    ("tools.arm", "tools.convert", "tools.compile_kernels", "tools.release", "tools.repo"),
    ("tools.tasks",),
    ("tools.common", "tools.__main__"),
    ("tools",),
    ("engine.fleet",),
    ("engine.serve", "engine.chat"),
    ("engine.cli",),
    ("engine.integrations",),
    ("engine",),
    ("engine.asynchronous",),
    ("engine.ranks",),
    ("engine.llm",),
    ("engine.batch",),
    ("engine.session",),
    ("engine.exact", "engine.saved"),
    ("engine.runner",),
    ("engine.load",),
    ("engine.calibration",),
    ("engine.forward",),
    ("engine.methods",),
    ("engine.bank", "engine.terminal"),
    ("engine.plan", "engine.sampling"),
    ("engine.model", "engine.text", "engine.evidence"),
    ("engine.base",),
    ("kernels.chain",),
    ("kernels.experts", "kernels.index"),
    ("kernels.select", "kernels.prefill", "kernels.quant", "kernels.kept", "kernels.sketch"),
    ("kernels.attention", "kernels.layer", "kernels.recurrent"),
    ("kernels.rows", "kernels.ranks"),
    ("kernels.tier", "kernels.native"),
    ("kernels.launch",),
    ("kernels", "weights"),
)
# Rooms of one floor may not import each other, but for these
BESIDE: frozenset[tuple[str, str]] = frozenset()
# Packages that list many files of one shape may have more than MOST_MODULES
REGISTRIES = (
    "engine.methods.evict",
    "engine.model.config.families",
    "tools.banks",
    "tools.bench",
    "tools.compare",
    "tools.speed",
    "tools.studies.exact",
    "tools.studies.pocket",
    "tools.tasks",
    "weights",
)
MOST_MODULES = 9
# their packages stay empty: signal handling and transformers import them
SILENT_ROOMS = {"engine.base": "Errors, checks, figures, the device, interrupts, locks."}
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Function:
    """One function or method: where it is, its length in lines, its arguments and how many of them
    have a type.
    """

    place: str
    lines: int
    arguments: int
    typed: int


def sources(root: Path, folders: tuple[str, ...] = ROOTS) -> dict[str, Path]:
    """{module name: file} of every Python file of these folders."""
    found = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of every import; no names for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)


def arrows(modules: Mapping[str, Path]) -> Graph:
    """{module: modules that it imports}; `from package import module` is an arrow to the module."""
    graph: Graph = {}
    for name, path in modules.items():
        graph[name] = _targets(parse(path), modules) - {name}
    return graph


def _targets(tree: ast.AST, modules: Mapping[str, Path]) -> set[str]:
    found = set()
    for module, names in imported(tree):
        inner = {f"{module}.{taken}" for taken in names} & modules.keys()
        rest = not names or len(inner) < len(names)
        found |= inner | ({module} & modules.keys() if rest else set())
    return found


def hidden(modules: Mapping[str, Path]) -> list[str]:
    """The imports of our own modules that only a type checker sees, as "module -> module"."""
    found = []
    for name, path in modules.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                found += [f"{name} -> {target}" for target in sorted(_targets(node, modules))]
    return found


def foreign_writes(modules: Mapping[str, Path]) -> list[str]:
    """The places that write a field of an argument whose class another module defines."""
    homes: dict[str, set[str]] = {}
    trees = {name: parse(path) for name, path in modules.items()}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(name)
    found = []
    for name, tree in trees.items():
        taken = {n for module, names in imported(tree) if module in modules for n in names}
        known = {c for c, places in homes.items() if c in taken and name not in places}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                typed = _classes(node, known)
                found += [f"{name}: {place}" for place in _writes(node, typed)]
    return sorted(found)


def _classes(function: ast.FunctionDef | ast.AsyncFunctionDef, known: set[str]) -> dict[str, str]:
    """{argument: class} of the arguments whose annotation is one of the `known` classes."""
    taken = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    said = {a.arg: ast.unparse(a.annotation).strip("'\"") for a in taken if a.annotation}
    return {arg: kind for arg, kind in said.items() if kind in known}


def _writes(function: ast.AST, typed: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for whole in targets:
            for target in whole.elts if isinstance(whole, ast.Tuple) else [whole]:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    if target.value.id in typed:
                        yield f"{typed[target.value.id]}.{target.attr}"


def rooms(graph: Graph, package: str) -> Graph:
    """The graph among the direct children of a package ("" : the roots), each subpackage as one
    room; the package's own face is a room beside them.
    """
    prefix = f"{package}." if package else ""

    def room(module: str) -> str | None:
        if module == package:
            return package
        return prefix + module[len(prefix) :].split(".")[0] if module.startswith(prefix) else None

    found: Graph = {}
    for module, targets in graph.items():
        here = room(module)
        if here is not None:
            there = {other for target in targets if (other := room(target)) is not None}
            found.setdefault(here, set()).update(there - {here})
    return found


def packages(modules: Mapping[str, Path]) -> list[str]:
    """Every package, the house itself ("") first."""
    return ["", *(name for name, path in modules.items() if path.name == "__init__.py")]


def crowded(modules: Mapping[str, Path]) -> list[str]:
    """The packages that are no registry and have more than MOST_MODULES modules."""
    count: dict[str, int] = {}
    for name, path in modules.items():
        if path.name not in ("__init__.py", "__main__.py"):
            parent = name.rpartition(".")[0]
            count[parent] = count.get(parent, 0) + 1
    return [f"{p}: {n}" for p, n in count.items() if n > MOST_MODULES and p not in REGISTRIES]


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach each other, each sorted (Tarjan's strongly connected parts)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in graph.get(name, ()):
            if target not in order:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == order[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def levels(graph: Graph) -> int:
    """How many floors the arrows make: the longest chain of modules, a cycle counted as one."""
    home = {name: min(part) for part in cycles(graph) for name in part}
    bare: Graph = {}
    for name, targets in graph.items():
        here = home.get(name, name)
        bare.setdefault(here, set()).update({home.get(t, t) for t in targets} - {here})
    depth: dict[str, int] = {}

    def deep(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max(map(deep, bare.get(name, ())), default=0)
        return depth[name]

    return max(map(deep, bare), default=0)


def floor(module: str) -> int:
    """The floor of a module, 0 at the top: that of its longest named prefix. Raises KeyError for a
    module of a room that no floor names.
    """
    homes = {name: number for number, names in enumerate(FLOORS) for name in names}
    parts = module.split(".")
    if len(parts) == 1 or parts[0] == "weights":
        return homes[parts[0]]
    return homes[".".join(parts[:2])]


def unnamed(modules: Mapping[str, Path]) -> list[str]:
    """The modules that no floor names."""

    def named(module: str) -> bool:
        try:
            floor(module)
        except KeyError:
            return False
        return True

    return sorted(module for module in modules if not named(module))


def room_of(module: str) -> str:
    """The room of the house that a module lies in: its root's direct child, or the root."""
    return ".".join(module.split(".")[:2])


def upward(graph: Graph) -> list[str]:
    """The arrows that point up the house, or across a floor into another room."""
    return sorted(
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if floor(target) < floor(name)
        or (
            floor(target) == floor(name)
            and room_of(target) != room_of(name)
            and "weights" not in (name.split(".")[0], target.split(".")[0])
            and (room_of(name), room_of(target)) not in BESIDE
        )
    )


def figures(modules: Mapping[str, Path], graph: Graph) -> dict[str, dict[str, int]]:
    """{package: its rooms, levels and arrows}, of the house and of every package."""
    found = {}
    for package in packages(modules):
        small = rooms(graph, package)
        found[package or "house"] = {
            "rooms": len(small),
            "levels": levels(small),
            "arrows": sum(map(len, small.values())),
        }
    return found


def functions(modules: Mapping[str, Path], root: Path) -> Iterator[Function]:
    """Every function and method but Triton's kernels (their arguments are compiled, not typed)."""
    for path in modules.values():
        for node in ast.walk(parse(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any("triton.jit" in text or "autotune" in text for text in decorators):
                continue
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            taken += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
            taken = [argument for argument in taken if argument.arg not in ("self", "cls")]
            yield Function(
                f"{path.relative_to(root)}:{node.lineno} {node.name}",
                (node.end_lineno or node.lineno) - node.lineno + 1,
                len(taken),
                sum(argument.annotation is not None for argument in taken),
            )


def lengths(modules: Mapping[str, Path], root: Path) -> dict[str, int]:
    """{file: its lines}."""
    return {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules.values()
    }


def report_imports(modules: Mapping[str, Path], graph: Graph) -> None:
    """Print rooms, levels, arrows and circles of every package, and what breaks a rule."""
    print(f"{'package':28} modules   rooms  levels  arrows  circles")
    for package in packages(modules):
        names = {n for n in graph if not package or f"{n}.".startswith(f"{package}.")}
        small = rooms(graph, package)
        row = (len(names), len(small), levels(small), sum(map(len, small.values())))
        print(f"{package or 'the house':28}", *(f"{v:7}" for v in (*row, len(cycles(small)))))
    for part in cycles(graph):
        print("circle:", " <-> ".join(part))
    for package in packages(modules):
        for part in cycles(rooms(graph, package)):
            print(f"circle of rooms in {package or 'the house'}:", " <-> ".join(part))
    for label, found in (
        ("on no floor", unnamed(modules)),
        ("upward or across", [] if unnamed(modules) else upward(graph)),
        ("for the type checker only", hidden(modules)),
        ("crowded", crowded(modules)),
        ("writes another module's class", foreign_writes(modules)),
    ):
        for line in found:
            print(f"{label}: {line}")


def report_tree(modules: Mapping[str, Path], root: Path) -> None:
    """Print every folder with its files and their lines."""
    folders: dict[str, list[tuple[str, int]]] = {}
    for name, count in lengths(modules, root).items():
        path = Path(name)
        folders.setdefault(str(path.parent), []).append((path.name, count))
    for folder, files in folders.items():
        total = sum(count for _, count in files)
        print(f"{folder}/  {len(files)} files, {total} lines")
        print("   ", "  ".join(f"{name} {count}" for name, count in files if count))


def report_lengths(modules: Mapping[str, Path], root: Path) -> None:
    """Print the longest file and function, and the share of typed arguments, of every root."""
    for folder in ROOTS:
        inside = {name: path for name, path in modules.items() if name.split(".")[0] == folder}
        if not inside:
            continue
        files, found = lengths(inside, root), list(functions(inside, root))
        file, longest = max(files, key=lambda name: files[name]), max(found, key=lambda f: f.lines)
        taken = sum(function.arguments for function in found)
        share = sum(function.typed for function in found) / max(1, taken)
        print(f"{folder:8} {len(files):3} files {sum(files.values()):6} lines;", end=" ")
        print(f"longest file {file} {files[file]};", end=" ")
        print(f"longest function {longest.place} {longest.lines};", end=" ")
        print(f"{share:.0%} of {taken} arguments typed")


def report_types(modules: Mapping[str, Path], root: Path) -> None:
    """Print the share of typed arguments of every folder."""
    folders: dict[str, list[int]] = {}
    for function in functions(modules, root):
        count = folders.setdefault(str(Path(function.place.split(":")[0]).parent), [0, 0])
        count[0] += function.typed
        count[1] += function.arguments
    for folder, (typed, taken) in folders.items():
        print(f"{folder:28} {typed / max(1, taken):4.0%} of {taken:4} arguments typed")


def said(modules: Mapping[str, Path]) -> dict[str, str]:
    """{room of engine/ or kernels/, and weights: the first paragraph of its docstring}."""
    names = [name for floor in FLOORS for name in floor if name in modules]
    found = {}
    for name in names:
        text = (ast.get_docstring(parse(modules[name])) or SILENT_ROOMS.get(name, "")).split("\n\n")
        if name.split(".")[0] != "tools" and name not in ("engine", "kernels") and text[0]:
            found[name] = " ".join(text[0].split())
    return found


def made_pages(modules: Mapping[str, Path], root: Path) -> dict[Path, str]:
    """{page: its text with what is made from the tables here and from tests/core.json}."""
    kept = json.loads(CORE.read_text(encoding="utf-8"))
    size = pages.core_sentence(kept["files"], kept["whole"])
    made = (
        ("docs/architecture.svg", "floors", pages.drawn(FLOORS)),
        ("docs/ARCHITECTURE.md", "rooms", pages.rooms_table(said(modules), kept["files"])),
        ("docs/ARCHITECTURE.md", "core", size),
        ("README.md", "core", size),
    )
    found: dict[Path, str] = {}
    for name, mark, content in made:
        page = root / name
        text = found.get(page) or page.read_text(encoding="utf-8")
        found[page] = pages.put(text, mark, content)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the report of a checkout."""
    parser = argparse.ArgumentParser(prog="python -m tools.repo.house", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="checkout to look at")
    parser.add_argument("--arrows", action="store_true", help="print every import arrow too")
    parser.add_argument("--write", action="store_true", help="write tests/house.json anew")
    parser.add_argument(
        "--picture", action="store_true", help="write what pages say of floors, rooms and core"
    )
    chosen = parser.parse_args(arguments)
    modules = sources(chosen.folder)
    graph = arrows(modules)
    if chosen.write:
        FIGURES.write_text(json.dumps(figures(modules, graph), indent=1) + "\n", encoding="utf-8")
        return 0
    if chosen.picture:
        for page, text in made_pages(modules, chosen.folder).items():
            page.write_text(text, encoding="utf-8")
        return 0
    report_imports(modules, graph)
    print()
    report_tree(modules, chosen.folder)
    print()
    report_lengths(modules, chosen.folder)
    report_types(modules, chosen.folder)
    if chosen.arrows:
        print(*(f"{name} -> {t}" for name, ts in graph.items() for t in sorted(ts)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
