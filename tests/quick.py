"""What `make quick` runs: the files that catch most, and of the large ones a sample.

{file: strings, one of which the test's name holds}; () is the whole file. tests/conftest.py applies
it under `pytest --quick`.
"""

from __future__ import annotations

from pathlib import Path

# One method of each family: OmniKV, accumulated scores, by position, a prompt's window, pages,
# memory blocks, prefill patterns, shared values, whole layers in host memory.
FAMILIES = (
    "omnikv-0", "[omnikv]", "h2o-0", "[h2o]", "streaming_llm-0", "[streaming_llm]", "snapkv-0",
    "[snapkv]", "quest-0", "[quest]", "infllm-0", "minference-0", "pod_untrained-0",
    "brutal_offload-0", "[brutal_offload]",
)  # fmt: skip

QUICK: dict[str, tuple[str, ...]] = {
    "tests/test_house.py": (),
    "tests/engine/model/test_config.py": (),
    "tests/engine/model/test_rope.py": (),
    "tests/engine/test_settings.py": (),
    "tests/engine/test_sampling.py": (),
    "tests/engine/text/test_text.py": (),
    "tests/engine/test_step.py": ("last", "full"),
    "tests/engine/test_session.py": ("last", "full"),
    "tests/engine/methods/test_methods.py": FAMILIES,
    "tests/engine/plan/test_placement.py": (),
    "tests/engine/plan/test_memory_plan.py": ("auto", "reference"),
    "tests/engine/bank/test_offload.py": ("last",),
    "tests/engine/bank/test_lanes.py": ("waits",),
    "tests/engine/bank/test_slots.py": (),
    "tests/kernels_cpu/test_decode.py": (),
    "tests/weights/test_broken.py": ("truncated", "header", "config"),
    "tests/weights/test_safetensors_file.py": (),
}


def chosen(nodeid: str) -> bool:
    """Whether a test belongs to `make quick`."""
    file, _, name = nodeid.partition("::")
    if file not in QUICK:
        return False
    return not QUICK[file] or any(part in name for part in QUICK[file])


def left_out(root: Path) -> str:
    """One sentence on what a quick run has not looked at."""
    files = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    sampled = sum(bool(parts) for parts in QUICK.values())
    return (
        f"quick: {len(QUICK)} of {len(files)} test files, {sampled} of them sampled. Left out: the "
        "Triton kernels (interpreter, ahead-of-time, GPU), tools, chat, weights by name, the "
        "papers' simulations, prefill methods, pinned memory and faults. make test runs everything."
    )
