"""Host memory taken by a thread while a prompt is read: reading waits for no allocation that could
have been made before, errors stay what they were, and no thread outlives the reading.

Stops: pages faulted and locked between two chunks, a thread that hides an error or says it twice, a
thread that goes on after Ctrl-C, a block handed out before its pages are there.
"""

import re
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import Allocator, ordinary
from engine.base.errors import OutOfHostMemory
from tests.builders import random_ids, tiny_llm
from tests.engine.bank.test_offload_faults import BLOCK, METHOD, SMALL, offloaded

CPU = torch.device("cpu")


class Slow:
    """An allocator that takes `seconds` for a slab and refuses every one from the `at`-th on. Knows
    which threads asked.
    """

    def __init__(self, seconds=0.0, at=1000):
        self.seconds, self.at, self.threads = seconds, at, []

    def __call__(self, size):
        self.threads.append(threading.current_thread().name)
        time.sleep(self.seconds)
        if len(self.threads) > self.at:
            self.at = 0  # refused once, refused for ever
            raise RuntimeError("cannot allocate memory")
        return ordinary(size).fill_(7)

    def pool(self, slab=BLOCK, pinned=False, **limits):
        return HostPool(
            slab_bytes=slab, allocators=[Allocator("test", self, pinned=pinned)], **limits
        )


def left_behind():
    return [thread for thread in threading.enumerate() if thread.name == "host memory"]


@pytest.fixture(scope="module")
def expected():
    with tiny_llm(METHOD, offload="device", **SMALL).session() as session:
        return session.prefill(random_ids(250))


def test_a_prompts_blocks_are_taken_by_a_thread(expected):
    """Every slab of a prompt comes from the thread, one after the other, and blocks are handed out
    while the next slab is still on its way.
    """
    allocate = Slow(0.02)
    pool = allocate.pool()
    with offloaded(pool).session() as session:
        assert torch.equal(session.prefill(random_ids(250)), expected)
        assert allocate.threads == ["host memory"] * 4 and pool.reserved == 4 * BLOCK
        session.decode(1)
        session.prefill(random_ids(5))  # what is there needs no thread
    assert allocate.threads[4:] == [] and not left_behind() and pool.in_use == 0


def test_a_block_is_taken_while_the_next_slab_is_on_its_way():
    go = threading.Event()

    def allocate(size):
        if pool.reserved:
            assert go.wait(10)
        return ordinary(size)

    pool = HostPool(slab_bytes=128, allocators=[Allocator("test", allocate)])
    with pool.ahead(128, 2, CPU):
        first = pool.take(128, 1)  # would wait for ever if it waited for both
        assert left_behind() and pool.in_use == 128
        go.set()
        assert len({b.address for b in first + pool.take(128, 1)}) == 2
    assert not left_behind()


@pytest.mark.parametrize("pinned", [False, True])
def test_the_pages_that_will_be_written_are_touched_and_no_others(pinned):
    """Each page of the wanted blocks has been written; pages of ordinary memory that nobody asked
    for stay the system's. Locked pages are there already.
    """
    size, wanted = 3 * 4096, 5
    pool = Slow().pool(slab=16 * size, pinned=pinned)
    with pool.ahead(size, wanted, CPU):
        while left_behind():
            time.sleep(0.005)
    blocks = pool.take(size, 16)
    starts = [block.bytes[::4096].tolist() for block in blocks]
    touched = [all(byte == 0 for byte in bytes_) for bytes_ in starts]
    assert touched == [not pinned] * wanted + [False] * (16 - wanted)
    assert [b.address for b in blocks] == sorted(b.address for b in blocks)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(at=st.integers(0, 5), limit=st.sampled_from([None, 2, 3]), slow=st.booleans())
def test_errors_are_those_of_a_reading_without_the_thread(expected, at, limit, slow):
    """Refused at the at-th slab, or at the pool's limit: the same one line, the same tokens kept,
    the same memory held.
    """
    found = []
    for ahead in (True, False):
        allocate = Slow(0.003 * slow, at)
        pool = allocate.pool(limit=limit and limit * BLOCK)
        if not ahead:
            pool.ahead = lambda *_: nullcontext()
        with offloaded(pool).session() as session:
            error = None
            try:
                logits = session.prefill(random_ids(250))
                assert torch.equal(logits, expected)
            except OutOfHostMemory as refused:
                error = re.sub(r"[\d.]+ \wB (free|RAM|of RAM)", "", str(refused))
            found.append((error, len(session), pool.in_use, pool.reserved))
        assert not left_behind() and pool.in_use == 0
    with_thread, without = found
    assert with_thread == without
    assert (with_thread[0] is None) == (at >= 4 and limit is None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupt_leaves_no_thread_behind(error, expected):
    """Broken off after the first chunk, with slabs still to come: whole chunks stay, the thread has
    ended, and the rest of the prompt gives the same answer.
    """

    def stop(progress):
        raise error

    allocate = Slow(0.1)  # a chunk is read in less
    pool = allocate.pool()
    with offloaded(pool).session() as session:
        with pytest.raises(error):
            session.prefill(random_ids(250), progress=stop)
        assert not left_behind() and len(session) == 50
        assert len(allocate.threads) < 4
        assert torch.equal(session.prefill(random_ids(250)[50:]), expected)
    pool.close()
    assert not left_behind() and pool.reserved == 0


def test_an_interrupt_while_a_block_is_waited_for():
    """Ctrl-C in `take`, while the slab that it waits for is being allocated."""
    begun, go = threading.Event(), threading.Event()

    def allocate(size):
        begun.set()
        go.wait(10)
        return ordinary(size)

    pool = HostPool(slab_bytes=128, allocators=[Allocator("test", allocate)])
    real = pool._lock.wait

    def interrupted():
        assert begun.wait(10)
        pool._lock.wait = real
        go.set()
        raise KeyboardInterrupt

    pool._lock.wait = interrupted
    with pytest.raises(KeyboardInterrupt), pool.ahead(128, 1, CPU):
        pool.take(128, 1)
    assert not left_behind() and pool.in_use == 0 and len(pool.take(128, 1)) == 1


def test_without_another_thread_blocks_come_as_they_are_taken(monkeypatch, expected):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    allocate = Slow()
    session = offloaded(allocate.pool()).session()
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert torch.equal(session.prefill(random_ids(250)), expected)
    assert len(allocate.threads) == 4 and "host memory" not in allocate.threads


def test_two_prompts_on_one_pool(expected):
    """Two LLMs read at once; the one that comes second waits for the other's slabs, or takes its
    own.
    """
    pool, answers = Slow(0.005).pool(), []

    def read():
        with offloaded(pool).session() as session:
            answers.append(session.prefill(random_ids(250)))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(answers) == 3 and all(torch.equal(answer, expected) for answer in answers)
    assert not left_behind() and pool.in_use == 0
    pool.close()
