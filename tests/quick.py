"""What `make quick` runs: the files that catch most, and of the large ones a sample.

{file: strings, one of which the test's name holds}; () is the whole file. tests/conftest.py applies
it under `pytest --quick`, and fails for a name that no test has.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# One method of each family: OmniKV, accumulated scores, a prompt's window, pages, memory blocks,
# whole layers in host memory.
FAMILIES = (
    "omnikv-0", "[omnikv]", "h2o-0", "[h2o]", "snapkv-0", "quest-0", "[quest]", "infllm-0",
    "brutal_offload-0", "[brutal_offload]",
)  # fmt: skip

QUICK: dict[str, tuple[str, ...]] = {
    "tests/test_house.py": ("import", "circle", "short", "cites", "pin", "readme"),
    "tests/engine/model/test_config.py": (),
    "tests/engine/model/test_rope.py": (),
    "tests/engine/methods/test_settings.py": (),
    "tests/engine/sampling/test_sampling.py": (
        "field",
        "top_p",
        "transformers",
        "greedy",
        "seed",
    ),
    "tests/engine/text/test_text.py": ("[byte", "stop", "bos", "folders", "once"),
    "tests/engine/forward/test_step.py": (),
    "tests/engine/session/test_session.py": ("full", "feeds", "ends", "calls", "too_long"),
    "tests/engine/methods/test_methods.py": FAMILIES,
    "tests/engine/plan/test_placement.py": (),
    "tests/engine/plan/test_memory_plan.py": ("auto", "reference"),
    "tests/engine/bank/test_offload.py": ("OmniKV0", "truncate", "[0-70]", "bytes"),
    "tests/engine/bank/test_lanes.py": ("[4-False]", "ready", "_write_piece", "[64]"),
    "tests/engine/bank/test_slots.py": (),
    "tests/kernels_cpu/test_decode.py": (),
    "tests/weights/test_broken.py": ("sound", "test_library"),
    "tests/weights/test_safetensors_file.py": (),
}


def chosen(nodeid: str) -> bool:
    """Whether a test belongs to `make quick`."""
    file, _, name = nodeid.partition("::")
    if file not in QUICK:
        return False
    return not QUICK[file] or any(part in name for part in QUICK[file])


def stale(nodeids: Iterable[str], whole: Iterable[str]) -> list[str]:
    """Names of QUICK that no test has. nodeids: the tests found; whole: files of which they are
    all. A file that is gone is pytest's own error.
    """
    found: dict[str, list[str]] = {}
    for nodeid in nodeids:
        file, _, name = nodeid.partition("::")
        found.setdefault(file, []).append(name)
    return [
        f"{file}: {part}"
        for file in whole
        if file in found  # a file may be skipped whole, where a package is absent
        for part in QUICK.get(file, ())
        if not any(part in name for name in found[file])
    ]


def left_out(root: Path) -> str:
    """One sentence on what a quick run has not looked at."""
    files = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    sampled = sum(bool(parts) for parts in QUICK.values())
    return (
        f"quick: {len(QUICK)} of {len(files)} test files, {sampled} of them sampled. Left out: the "
        "Triton kernels (interpreter, ahead-of-time, GPU), tools, chat, weights by name, the "
        "papers' simulations, prefill methods, pinned memory and faults. make test runs everything."
    )
