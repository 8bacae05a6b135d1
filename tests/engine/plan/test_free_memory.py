"""Free memory as this process may use it: the machine's, or what its container leaves, with idle
page cache counted as free.
"""

import pytest
import torch

import engine.plan.free_memory as freemem
from engine import OmniKV
from engine.bank.pool.host_pool import HostPool
from engine.load.options import Options
from engine.load.planner import Planner
from engine.plan.free_memory import available_bytes, container_memory
from tests.builders import session_config
from tests.fake_gpu import FakeGPU

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


@pytest.mark.parametrize(
    "given, bytes_, name, host_name",
    [
        ({}, 16 * GB, "16.00 GB free RAM", "16.00 GB free host memory"),
        # a budget beyond what is free bounds nothing
        (dict(budget=64 * GB), 16 * GB, "16.00 GB free RAM", "16.00 GB free host memory"),
        (
            dict(budget=4 * GB, host_budget=4 * GB),
            int(4 * GB / freemem.HEADROOM),
            "a budget of 4.00 GB",
            "a budget of 4.00 GB",
        ),
        (
            dict(imagined=80 * GB, host_budget=64 * GB),
            80 * GB,
            "80.00 GB free on an imagined GPU",
            "a budget of 64.00 GB",
        ),
        (
            dict(imagined=80 * GB, imagined_host=64 * GB),
            80 * GB,
            "80.00 GB free on an imagined GPU",
            "64.00 GB free imagined host memory",
        ),
        (
            dict(imagined=80 * GB),
            80 * GB,
            "80.00 GB free on an imagined GPU",
            "16.00 GB free host memory of this machine",
        ),
    ],
)
def test_what_bounds_a_plan_is_said_with_the_figure_given(
    monkeypatch, given, bytes_, name, host_name
):
    """A budget of 64 was printed as 67.37 GB of free host memory, of which a machine had 23."""
    monkeypatch.setattr(freemem, "available_bytes", lambda device: (16 * GB, "free RAM"))
    device = torch.device("cuda" if "imagined" in given else "cpu")
    found = freemem.free_bytes(device, **given)
    assert (found.bytes, found.name, found.host_name) == (bytes_, name, host_name)


def test_this_machine():
    free, what = available_bytes(torch.device("cpu"))
    assert free > 1e6 and what


def test_what_a_pool_holds_idle_is_free_to_the_next_plan(monkeypatch):
    """A GPU's pool keeps its slabs, which the system counts as used. A context of a million tokens
    was refused wherever a shallower one had been read before it.
    """
    FakeGPU(monkeypatch)
    machine, slab = 64 << 20, 40 << 20
    pool = HostPool(slab_bytes=slab, pin=False)
    monkeypatch.setattr(freemem, "_meminfo", lambda: machine - pool.reserved)
    monkeypatch.setattr(freemem, "container_memory", lambda: None)
    monkeypatch.setattr(freemem, "address_space_left", lambda: None)
    settings = dict(
        method=OmniKV(filter_layers=(1, 4), tokens=64, dense_below=0),
        device="cuda", offload="host", host_pool=pool, max_context=1024,
    )  # fmt: skip
    planner = Planner("tiny", session_config(), Options.of(settings))
    assert planner.plan().host_free == machine
    blocks = pool.take(4096, 3)
    context = 8192  # what a plan is made for anew
    assert planner.plan(max_context=context).host_free == machine - slab
    pool.release(blocks)
    assert pool.reserved == pool.idle == slab
    assert planner.plan(max_context=context).host_free == machine
    # within the limit of the pool itself, as before
    budget = Options.of({**settings, "ram_budget": 8 << 20})
    found = Planner("tiny", session_config(), budget).plan().host_free
    assert found == pytest.approx((8 << 20) / freemem.HEADROOM, abs=1)
