"""Memory limits that a plan must see: of the control group this process is in, of those above it,
and of the address space.

Stops: a plan that looks at the root of /sys/fs/cgroup only, and is killed in its second chunk.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.plan.free_memory import container_memory
from tests.engine.plan.test_free_memory import GB, V1, V2, write

ROOT = Path(__file__).resolve().parents[3]


def process(tmp_path, membership, mounts):
    folder = tmp_path / "self"
    folder.mkdir()
    (folder / "cgroup").write_text(membership)
    (folder / "mountinfo").write_text(mounts)
    return folder


def v1(folder):
    return {name.removeprefix("memory/"): text for name, text in folder.items()}


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_version_2_in_a_group_below_the_mount(tmp_path, root):
    write(tmp_path / "mount" / "user" / "run", V2)
    (tmp_path / "mount" / "user" / "memory.max").write_text("max\n")
    above = "" if root == "/" else root
    mounts = f"30 20 0:27 {root} {tmp_path}/mount rw - cgroup2 cgroup2 rw\n"
    own = process(tmp_path, f"0::{above}/user/run\n", mounts)
    assert container_memory(process=own) == (8 * GB, 4 * GB)


def test_version_1_and_a_tighter_group_above(tmp_path):
    write(tmp_path / "a b" / "slurm" / "job", v1(V1))
    tight = v1(V1) | {"memory.limit_in_bytes": str(5 * GB)}
    write(tmp_path / "a b" / "slurm", tight)
    mount = str(tmp_path / "a b").replace(" ", "\\040")
    mounts = (
        f"32 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
        f"33 31 0:30 / {mount} rw,relatime - cgroup cgroup rw,memory\n"
    )
    own = process(tmp_path, "5:cpu:/slurm/job\n4:memory:/slurm/job\n0::/\n", mounts)
    assert container_memory(process=own) == (5 * GB, 1 * GB)


def test_a_group_of_another_namespace_is_the_mounts_own(tmp_path):
    write(tmp_path / "mount", V2)
    mounts = f"30 20 0:27 /../.. {tmp_path}/mount rw - cgroup2 cgroup2 rw\n"
    own = process(tmp_path, "0::/../../elsewhere\n", mounts)
    assert container_memory(process=own) == (8 * GB, 4 * GB)


def test_no_groups(tmp_path):
    assert container_memory(process=process(tmp_path, "", "")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_address_space_limit_is_seen_before_anything_is_loaded():
    code = """
import resource
import torch
from engine.plan.free_memory import address_space_left, available_bytes
assert address_space_left() is None
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + (456 << 20), hard))
free, name = available_bytes(torch.device("cpu"))
assert 190 << 20 < free <= 200 << 20 and "ulimit -v" in name, (free, name)
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), hard))
free, name = available_bytes(torch.device("cpu"))
assert free == 0 and "ulimit -v" in name, (free, name)
from engine.base.errors import OutOfHostMemory
from engine.base.device import typed_errors
try:
    with typed_errors():
        torch.empty(400 << 20, dtype=torch.uint8)
except OutOfHostMemory as error:
    assert "419430400 bytes" in str(error) and "\\n" not in str(error), error
else:
    raise AssertionError("was allocated")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
