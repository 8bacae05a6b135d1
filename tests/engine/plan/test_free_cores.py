"""How many cores this process may use. Stops: a container of two cores taken for its machine."""

import os

import pytest

from engine.base.cores.free_cores import free_cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 16 cores whose control groups of version 2 are in a folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    group = tmp_path / "tree" / "job"
    group.mkdir(parents=True)
    process = tmp_path / "self"
    process.mkdir()
    (process / "cgroup").write_text("0::/job\n")
    mount = f"30 20 0:1 / {tmp_path / 'tree'} rw - cgroup2 cgroup2 rw\n"
    (process / "mountinfo").write_text(mount)
    return process, group, tmp_path / "version-1"


def test_without_a_quota_it_is_the_affinity(machine, monkeypatch):
    process, group, old = machine
    (group / "cpu.max").write_text("max 100000\n")
    assert free_cores(process, old) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert free_cores(process, old) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert free_cores(process, old) == 4


@pytest.mark.parametrize(
    "quota, wanted", [("400000 100000", 4), ("50000 100000", 1), ("", 16), ("x", 16)]
)
def test_a_quota_bounds_it(machine, quota, wanted):
    process, group, old = machine
    (group / "cpu.max").write_text(quota)
    assert free_cores(process, old) == wanted


def test_the_quota_of_a_group_above_counts_too(machine):
    process, group, old = machine
    (group / "cpu.max").write_text("800000 100000")
    (group.parent / "cpu.max").write_text("200000 100000")
    assert free_cores(process, old) == 2


def test_version_1_has_its_quota_in_two_files(machine):
    process, _, old = machine
    old.mkdir()
    (old / "cpu.cfs_period_us").write_text("100000")
    (old / "cpu.cfs_quota_us").write_text("-1")
    assert free_cores(process, old) == 16
    (old / "cpu.cfs_quota_us").write_text("300000")
    assert free_cores(process, old) == 3
