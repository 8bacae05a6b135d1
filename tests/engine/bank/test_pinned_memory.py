"""Host memory for a GPU, without one: allocators are tried in order, a refusal says why, locked
pages are unlocked before they are unmapped.

Stops: pages unmapped while the driver still holds them, a refusal that ends a session that ordinary
memory would serve, slabs that cost more than the limit, an out-of-memory kill where a sentence
would do.
"""

import ctypes
import gc
import mmap
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import engine.bank.pool.pinned_memory
from engine import OmniKV
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.link import Link, choose, measure_link
from engine.bank.pool.pinned_memory import (
    Allocator,
    Driver,
    allocators_here,
    limits,
    ordinary,
    registered,
)
from engine.base.errors import OutOfHostMemory
from tests.builders import random_ids, tiny_llm

linux = pytest.mark.skipif(
    not hasattr(__import__("mmap"), "MAP_ANONYMOUS"), reason="needs anonymous maps"
)


class Registrar:
    """Locks nothing; knows what is locked, and that it is still mapped when it is unlocked."""

    def __init__(self, refuse=lambda size: False):
        self.locked, self.refuse, self.asked = {}, refuse, 0

    def register(self, address, size):
        self.asked += 1
        if self.refuse(size):
            raise RuntimeError(f"CUDA_ERROR_OUT_OF_MEMORY (2) when registering {size} B")
        assert address % 4096 == 0 and address not in self.locked
        self.locked[address] = size

    def unregister(self, address):
        # a segmentation fault where the pages are gone
        ctypes.memset(address, 0, self.locked.pop(address))


def test_ordinary_memory_is_aligned():
    for size in (64, 1000, 4096):
        memory = ordinary(size)
        assert memory.numel() == size and memory.data_ptr() % 64 == 0


@linux
@pytest.mark.parametrize("size", [64, 4096, 5 * 4096 + 64, 1 << 20])
def test_pages_stay_locked_until_the_last_view_is_gone(size):
    registrar = Registrar()
    memory = registered(registrar, size)
    assert list(registrar.locked.values()) == [size] and memory.numel() == size and not memory.any()
    part = memory[size // 2 :]
    part.fill_(7)
    del memory
    gc.collect()
    assert registrar.locked and int(part.sum()) == 7 * len(part)
    del part
    gc.collect()
    assert not registrar.locked


@linux
def test_what_is_refused_is_unmapped_and_not_unlocked():
    registrar = Registrar(refuse=lambda size: True)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        registered(registrar, 4096)
    gc.collect()
    assert registrar.asked == 1 and not registrar.locked


@linux
def test_a_whole_session_over_registered_pages():
    """Every byte of the host tier in mapped and registered slabs of odd sizes; given back when the
    pool closes, and only then.
    """
    registrar = Registrar()
    method = OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=40, tail=64, dense_below=0)
    pool = HostPool(
        limit=280_000,
        slab_bytes=150_001,
        allocators=[
            Allocator("mapped and registered", partial(registered, registrar), pinned=True)
        ],
    )
    settings = dict(max_context=512, chunk=50, backend="reference")
    expected = tiny_llm(method, offload="device", **settings).session()
    session = tiny_llm(method, offload="host", host_pool=pool, **settings).session()
    assert torch.equal(session.prefill(random_ids(300)), expected.prefill(random_ids(300)))
    assert all(torch.equal(session.decode(5), expected.decode(5)) for _ in range(20))
    assert session.stats.misses > 0 and session.stats.pin_seconds == pool.pin_seconds > 0
    assert sum(registrar.locked.values()) == pool.reserved <= 280_000 and len(registrar.locked) == 2
    session.close()
    gc.collect()
    assert registrar.locked
    pool.close()
    gc.collect()
    assert not registrar.locked


# ---------------------------------------------------------------- the driver's calls


def library(refuse=0, shift=0, current=1):
    """A driver's library with its true prototypes, and what it was asked."""
    asked = []
    integer, pointer, size, number = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint

    def get_current(found):
        found[0] = current or None
        return 0

    def register(address, count, flags):
        asked.append(("register", address, count, flags))
        return refuse

    def seen(found, address, flags):
        found[0] = address + shift
        return 0

    def unregister(address):
        asked.append(("unregister", address))
        return 0

    def name(code, found):
        found[0] = b"CUDA_ERROR_NOT_PERMITTED"
        return 0

    def typed(result, *arguments):
        return lambda function: ctypes.CFUNCTYPE(result, *arguments)(function)

    return SimpleNamespace(
        cuCtxGetCurrent=typed(integer, ctypes.POINTER(pointer))(get_current),
        cuMemHostRegister_v2=typed(integer, pointer, size, number)(register),
        cuMemHostGetDevicePointer_v2=typed(
            integer, ctypes.POINTER(ctypes.c_uint64), pointer, number
        )(seen),
        cuMemHostUnregister=typed(integer, pointer)(unregister),
        cuGetErrorName=typed(integer, integer, ctypes.POINTER(ctypes.c_char_p))(name),
    ), asked


@linux
@pytest.mark.parametrize("current", [0, 1])
def test_the_driver_locks_and_unlocks(current):
    entered = []
    made, asked = library(current=current)
    memory = registered(Driver(made, lambda: entered.append(1)), (1 << 20) + 64)
    address = memory.data_ptr()
    assert (
        asked == [("register", address, (1 << 20) + 64, 3)] and entered == []
        if current
        else entered == [1]
    )
    del memory
    gc.collect()
    assert asked[1:] == [("unregister", address)]


def test_the_driver_says_why():
    made, asked = library(refuse=800)
    with pytest.raises(
        RuntimeError, match=r"CUDA_ERROR_NOT_PERMITTED \(800\) when registering 1.05 MB"
    ):
        Driver(made, None).register(4096, 1 << 20)
    assert len(asked) == 1
    made, asked = library(shift=64)
    with pytest.raises(RuntimeError, match="another address"):
        Driver(made, None).register(4096, 1 << 20)
    assert asked[-1] == ("unregister", 4096)


# ---------------------------------------------------------------- which allocator


def refusing(message):
    def allocate(size):
        raise RuntimeError(message)

    return allocate


def test_allocators_of_this_machine():
    assert [found.name for found in allocators_here(False)] == ["ordinary memory"]
    names = [found.name for found in allocators_here(True)]
    assert names[-2:] == ["torch's pinned allocator", "ordinary memory"]
    assert [found.pinned for found in allocators_here(True)] == [True] * (len(names) - 1) + [False]


def test_a_refused_registration_is_followed_by_torchs_allocator_without_a_word():
    torchs = []
    pool = HostPool(
        slab_bytes=1000,
        allocators=[
            Allocator("mapped and registered", refusing("no"), pinned=True),
            Allocator(
                "torch's pinned allocator",
                lambda size: torchs.append(size) or ordinary(size),
                pinned=True,
                exact=False,
            ),
            Allocator("ordinary memory", ordinary),
        ],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.take(2048, 1)
    assert pool.pinned and pool.allocator.name == "torch's pinned allocator" and torchs == [2048]


def test_memory_that_cannot_be_pinned_is_ordinary_and_said_once():
    pool = HostPool(
        slab_bytes=4096,
        allocators=[
            Allocator("mapped and registered", refusing("locked memory limit"), pinned=True),
            Allocator("torch's pinned allocator", refusing("CUDA error"), pinned=True, exact=False),
            Allocator("ordinary memory", ordinary),
        ],
    )
    assert pool.pinned
    with pytest.warns(
        UserWarning,
        match="cannot be pinned .*registered: locked memory limit; .*CUDA error.*ordinary memory"
        ".*ulimit -l",
    ):
        blocks = pool.take(4096, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.release(blocks + pool.take(4096, 3))
    assert not pool.pinned and pool.in_use == 0 and pool.reserved == 4 * 4096


def test_pinning_that_is_refused_later_is_an_error_not_a_mixture():
    left = [2]

    def allocate(size):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY (2)")
        return ordinary(size)

    pool = HostPool(
        slab_bytes=4096,
        allocators=[Allocator("a", allocate, pinned=True), Allocator("ordinary memory", ordinary)],
    )
    pool.take(4096, 2)
    for _ in range(2):
        with pytest.raises(
            OutOfHostMemory,
            match="no host memory for 4096 more .*CUDA_ERROR_OUT_OF_MEMORY.*ulimit -l.*RAM"
            ".*remedies",
        ):
            pool.take(4096, 1)
    assert pool.pinned and pool.in_use == pool.reserved == 2 * 4096


def test_torchs_allocator_is_asked_for_powers_of_two_only():
    """It would round 2.25 GiB up to 4: the last slab is the largest power of two that the limit
    leaves.
    """
    for exact, sizes in ((False, [1024, 256, 128, 64]), (True, [1024, 448])):
        asked = []
        pool = HostPool(
            limit=1500,
            slab_bytes=1024,
            allocators=[
                Allocator(
                    "test",
                    lambda size, asked=asked: asked.append(size) or ordinary(size),
                    exact=exact,
                )
            ],
        )
        with pytest.raises(OutOfHostMemory, match="the pool's limit is 1500 bytes"):
            pool.take(64, 1500 // 64 + 1)
        taken = pool.take(64, sum(sizes) // 64)
        assert asked == sizes and pool.in_use == len(taken) * 64


def test_no_more_is_locked_than_is_free():
    """Locked pages are taken at once: a machine without them would kill the process instead of
    raising.
    """
    pool = HostPool(
        slab_bytes=1 << 20,
        allocators=[Allocator("test", ordinary, pinned=True)],
        free=lambda: 10_000,
    )
    pool.take(1024, 9)
    assert pool.reserved == 9 * 1024
    pool = HostPool(
        slab_bytes=1 << 20, allocators=[Allocator("test", ordinary, pinned=True)], free=lambda: 1000
    )
    with pytest.raises(OutOfHostMemory, match="only 950 B of RAM may still be locked"):
        pool.take(1024, 1)
    # ordinary pages come as they are written
    pool = HostPool(slab_bytes=1 << 20, allocators=[Allocator("test", ordinary)], free=lambda: 10)
    assert len(pool.take(1024, 5)) == 5


def test_the_limits_are_named():
    assert (
        "ulimit -l" in limits()
        and "RAM" in limits()
        and "remedies: a smaller max_context" in limits()
    )


# ---------------------------------------------------------------- the link


def test_the_fewest_programs_that_fill_the_link():
    assert choose({2: 20e9, 4: 39e9, 8: 49e9, 16: 50e9, 32: 50.5e9}) == 8
    assert choose({2: 50e9, 4: 50e9}) == 2
    said = str(Link(8, 49e9, 54e9, "1.07 GB pinned in 0.31 s, mapped and registered"))
    assert "8 programs" in said and "91%" in said and "pinned in 0.31 s" in said


def test_without_a_gpu_memory_is_ordinary_and_says_so():
    pool = HostPool()
    assert (
        "host memory is ordinary memory" in str(measure_link(pool, torch.device("cpu")))
        and pool.reserved == 0
    )
    refused = HostPool(
        slab_bytes=1 << 24,
        allocators=[
            Allocator("a", refusing("no"), pinned=True),
            Allocator("ordinary memory", ordinary),
        ],
    )
    with pytest.warns(UserWarning, match="cannot be pinned"):
        assert "rows go through the CPU" in str(measure_link(refused, torch.device("cuda")))
    assert refused.in_use == 0
    small = measure_link(HostPool(limit=1000), torch.device("cuda"))
    assert "no room" in str(small) and small.programs is None


@linux
def test_locked_pages_are_large_and_no_childs(monkeypatch):
    """Advised before they are locked: afterwards they are 4 KB pages, faulted one by one."""
    order = []

    class Pages(mmap.mmap):
        def madvise(self, *advice):
            order.append(advice[0])
            if advice[0] == getattr(mmap, "MADV_HUGEPAGE", None):
                raise OSError("a kernel without large pages")
            return super().madvise(*advice)

    registrar = Registrar()
    register = registrar.register
    registrar.register = lambda *where: (order.append("locked"), register(*where))
    monkeypatch.setattr(engine.bank.pool.pinned_memory.mmap, "mmap", Pages)
    memory = registered(registrar, 1 << 20)
    assert order == [mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, "locked"] and not memory.any()
