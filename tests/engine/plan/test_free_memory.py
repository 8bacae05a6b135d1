"""Free memory as this process may use it: the machine's, or what its container leaves, with idle
page cache counted as free.
"""

import pytest
import torch

import engine.plan.free_memory as freemem
from engine.plan.free_memory import available_bytes, container_memory

GB = 10**9
V2 = {
    "memory.max": str(8 * GB),
    "memory.current": str(6 * GB),
    "memory.stat": f"anon 5\nactive_file 7\ninactive_file {2 * GB}\n",
}
V1 = {
    "memory/memory.limit_in_bytes": str(8 * GB),
    "memory/memory.usage_in_bytes": str(6 * GB),
    "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GB}\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    "files, found",
    [
        (V2, (8 * GB, 4 * GB)),
        (V1, (8 * GB, 4 * GB)),
        ({}, None),
        (V2 | {"memory.max": "max"}, None),
        # version 1's way to say none
        (V1 | {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        # over the limit: nothing is left
        (V2 | {"memory.current": str(9 * GB), "memory.stat": "anon 1"}, (8 * GB, 0)),
        (V2 | {"memory.current": str(GB)}, (8 * GB, 8 * GB)),
        (V2 | {"memory.current": "lots"}, None),
    ],
)
def test_what_a_container_leaves(tmp_path, files, found):
    assert container_memory(write(tmp_path, files)) == found


def test_the_smaller_of_machine_and_container_counts(monkeypatch):
    monkeypatch.setattr(freemem, "_meminfo", lambda: 10 * GB)
    for container, expected in (
        (None, (10 * GB, "free RAM")),
        ((64 * GB, 3 * GB), (3 * GB, "left of the container's memory limit")),
        ((64 * GB, 60 * GB), (10 * GB, "free RAM")),
    ):
        monkeypatch.setattr(freemem, "container_memory", lambda container=container: container)
        assert available_bytes(torch.device("cpu")) == expected


def test_this_machine():
    free, what = available_bytes(torch.device("cpu"))
    assert free > 1e6 and what
