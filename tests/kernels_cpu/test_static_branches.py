"""A kernel's branch on a constant is decided while it is compiled.

Stops: `if packed(rows):` where `packed` is a @triton.jit function. Triton 3.7 hands its constant
back, 3.6 a value of the running program, and then no kernel over packed rows compiles: the two
arms of such a branch have tiles of other types.
"""

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def jitted(trees):
    """{name: function} of every @triton.jit function."""
    return {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def late_branches(trees):
    """Branches of kernels whose condition calls a jitted function, as text."""
    known = jitted(trees)
    return sorted(
        f"{name}: if {ast.unparse(node.test)}"
        for name, function in known.items()
        for node in ast.walk(function)
        if isinstance(node, (ast.If, ast.IfExp))
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known
    )


def test_no_branch_of_a_kernel_asks_a_jitted_function():
    trees = [ast.parse(path.read_text()) for path in sorted(KERNELS.rglob("*.py"))]
    assert len(jitted(trees)) > 40
    assert late_branches(trees) == []


def test_the_rule_sees_such_a_branch():
    source = (
        "@triton.jit\ndef packed(rows):\n    return rows.dtype == tl.int8\n\n"
        "@triton.jit\ndef kernel(rows):\n    if packed(rows):\n        pass\n"
    )
    assert late_branches([ast.parse(source)]) == ["kernel: if packed(rows)"]
    static = source.replace("@triton.jit\ndef packed", "@triton.constexpr_function\ndef packed")
    assert late_branches([ast.parse(static)]) == []
