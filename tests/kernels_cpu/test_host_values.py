"""Tables of a prompt's chunk on their way to a GPU.

Stops: a copy from ordinary memory in the middle of a chunk. It waits for everything launched so
far, 35 to 50 times a chunk of OmniKV-prefill.
"""

import ast
from pathlib import Path

import torch

from kernels.launch.on_device import on_device

ROOT = Path(__file__).resolve().parents[2]


def test_a_chunks_tables_are_pinned_and_nobody_waits_for_them(monkeypatch):
    """As on a GPU: pinned, and a copy that does not block; on a CPU neither is asked for."""
    asked, real = [], torch.tensor

    class Copied:
        def to(self, device, non_blocking=False):
            asked.append((str(device), non_blocking))
            return self

    def tensor(values, dtype, pin_memory):
        asked.append(pin_memory)
        return Copied()

    monkeypatch.setattr(torch, "tensor", tensor)
    on_device([1, 2], torch.int32, torch.device("cuda", 1))
    assert asked == [True, ("cuda:1", True)]
    monkeypatch.setattr(torch, "tensor", real)
    found = on_device([[1, 2], [3, 4]], torch.int64, torch.device("cpu"))
    assert found.tolist() == [[1, 2], [3, 4]] and found.dtype == torch.int64


def test_no_table_takes_the_way_that_waits():
    """torch.tensor(...).to(device) anywhere in a launcher or a method."""

    def waits(node):
        made = getattr(getattr(node, "func", None), "value", None)
        return (
            isinstance(made, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "to"
            and ast.unparse(made.func) == "torch.tensor"
            and not any(keyword.arg == "pin_memory" for keyword in made.keywords)
        )

    files = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "engine" / "methods").rglob("*.py")]
    found = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if waits(node)
    ]
    assert len(files) > 40 and found == []
