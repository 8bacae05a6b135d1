"""The shape of the code: modules, levels, import arrows, cycles, lengths and annotations.

    python -m tools.house [FOLDER] [--arrows]

tests/test_house.py holds the tree to the same figures. An arrow is an import at any depth of a
file, also inside a function; imports under `if TYPE_CHECKING:` are not arrows.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("engine", "kernels", "weights", "tools")
# From the top of the house to its ground. An arrow points down or stays on its floor. A module is
# on the floor of its longest prefix here; one of engine/ that is not named is on the session's.
FLOORS = (
    ("tools",),
    ("engine.serve",),
    ("engine.chat",),
    ("engine",),
    ("engine.llm",),
    ("engine.*",),
    ("engine.prefill", "engine.decode"),
    ("engine.methods",),
    ("engine.bank", "engine.model", "engine.plan", "engine.query_ring", "engine.text"),
    (
        "engine.device",
        "engine.finish",
        "engine.settings",
        "engine.units",
        "engine.errors",
        "engine.version",
    ),
    ("kernels", "weights"),
)
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


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what only a type checker runs."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.orelse:
            yield from _running(statement)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _running(child)


def imported(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of every import that runs; no names for `import module`."""
    for node in _running(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)


def arrows(modules: Mapping[str, Path]) -> Graph:
    """{module: modules that it imports}; `from package import module` is an arrow to the module."""
    graph: Graph = {}
    for name, path in modules.items():
        found = set()
        for module, names in imported(path):
            inner = {f"{module}.{taken}" for taken in names} & modules.keys()
            rest = not names or len(inner) < len(names)
            found |= inner | ({module} & modules.keys() if rest else set())
        graph[name] = found - {name}
    return graph


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
    """The floor of a module, 0 at the top."""
    for number, names in enumerate(FLOORS):
        if module in names:
            return number
    parent = module.rpartition(".")[0]
    if parent in ("", "engine"):
        return next(number for number, names in enumerate(FLOORS) if "engine.*" in names)
    return floor(parent)


def upward(graph: Graph) -> list[str]:
    """The arrows that point up the house."""
    return sorted(
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if floor(target) < floor(name)
    )


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
    """Print modules, levels, arrows and cycles of every package and of all."""
    print(f"{'package':28} modules  levels  arrows  cycles    as rooms: rooms levels arrows cycles")
    for package in packages(modules):
        names = {n for n in graph if not package or f"{n}.".startswith(f"{package}.")}
        inside = {name: graph[name] & names for name in names}
        small = rooms(graph, package)
        row = (len(inside), levels(inside), sum(map(len, inside.values())), len(cycles(inside)))
        as_rooms = (len(small), levels(small), sum(map(len, small.values())), len(cycles(small)))
        print(f"{package or 'all':28}", *(f"{value:7}" for value in row), " " * 12, end="")
        print(*(f"{value:6}" for value in as_rooms))
    for part in cycles(graph):
        print("cycle:", " <-> ".join(part))
    for package in packages(modules):
        for part in cycles(rooms(graph, package)):
            print(f"cycle of rooms in {package or 'the house'}:", " <-> ".join(part))
    for line in upward(graph):
        print("upward:", line)


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


def main(arguments: list[str] | None = None) -> int:
    """Print the report of a checkout."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="checkout to look at")
    parser.add_argument("--arrows", action="store_true", help="print every import arrow too")
    chosen = parser.parse_args(arguments)
    modules = sources(chosen.folder)
    graph = arrows(modules)
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
