"""Everything that can go wrong with host memory: clear errors, usable sessions, nothing leaked.

Stops: a session that is longer than its rows, a block that nobody gives back, a neighbour that pays
for another's exhaustion.
"""

import gc

import pytest
import torch

from engine import OmniKV
from engine.bank.host.tiered import TieredBank
from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import Allocator, ordinary
from engine.base.errors import OutOfHostMemory
from engine.plan.placement import part_bytes
from tests.builders import random_ids, session_config, tiny_llm

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
BLOCK = 64 * part_bytes(session_config(), 4) * len(METHOD.plan(session_config()).sparse_layers)
SMALL = dict(max_context=512, chunk=50, backend="reference")


class Refusing:
    """An allocator that refuses its `at`-th request, and every one after it while `on`."""

    def __init__(self, at):
        self.at, self.asked, self.on = at, 0, True

    def __call__(self, size):
        self.asked += 1
        if self.on and self.asked > self.at:
            raise RuntimeError("cannot allocate memory")
        return ordinary(size)


def offloaded(pool):
    return tiny_llm(METHOD, offload="host", host_pool=pool, **SMALL)


@pytest.fixture(scope="module")
def expected():
    """What an undisturbed session answers at 250 tokens and after 20 steps."""
    session = tiny_llm(METHOD, offload="device", **SMALL).session()
    first = session.prefill(random_ids(250))
    return first, [session.decode(5) for _ in range(20)]


@pytest.mark.parametrize("at", range(4))
def test_refused_at_every_allocation_of_a_prefill(at, expected):
    """One slab per block, refused at the at-th: whole chunks stay, and once there is memory again
    the rest gives the same answer.
    """
    allocate = Refusing(at)
    pool = HostPool(slab_bytes=64, allocators=[Allocator("test", allocate)])
    session = offloaded(pool).session()
    ids = random_ids(250)
    with pytest.raises(OutOfHostMemory, match="no host memory for .* remedies"):
        session.prefill(ids)
    kept = len(session)
    assert kept == min(200, at * 64 // 50 * 50) and session.ids == ids[:kept]
    assert pool.in_use == -(-kept // 64) * BLOCK
    allocate.on = False
    logits = session.prefill(ids[kept:])
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(session.decode(5), e) for e in expected[1])
    session.close()
    assert pool.in_use == 0


def test_refused_while_generating(expected):
    """The step that would begin a new block raises before anything is written; the session goes on
    when there is memory.
    """
    allocate = Refusing(4)
    session = offloaded(HostPool(slab_bytes=64, allocators=[Allocator("test", allocate)])).session()
    session.prefill(random_ids(250))
    got = [session.decode(5) for _ in range(6)]
    for _ in range(2):
        with pytest.raises(OutOfHostMemory):
            session.decode(5)
        assert len(session) == 256
    allocate.on = False
    got += [session.decode(5) for _ in range(14)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected[1], strict=True))


def test_two_sessions_share_a_pool_and_the_second_exhausts_it(expected):
    pool = HostPool(limit=8 * BLOCK, slab_bytes=BLOCK)
    llm = offloaded(pool)
    first, second = llm.session(), llm.session()
    first.prefill(random_ids(250))
    with pytest.raises(OutOfHostMemory, match="the pool's limit is"):
        second.prefill(random_ids(300, seed=1))
    assert len(second) == 250 and second.decode(3) is not None
    second.truncate(100)
    second.decode(1)  # a shorter one still works
    second.close()
    assert [torch.equal(first.decode(5), e) for e in expected[1]] == [True] * 20
    third = llm.session()
    third.prefill(random_ids(100))  # what the second gave back serves again
    assert pool.reserved <= 8 * BLOCK
    third.close()
    first.close()
    assert pool.in_use == 0


@pytest.mark.parametrize("default", ["device", "host"])
def test_ram_budget_limits_the_host_tier_on_a_cpu(default):
    """One whole session fits, whatever the blocks' size; a second one is refused by name before
    more is allocated than the budget leaves.
    """
    other = OmniKV(filter_layers=(3,), tokens=40, tail=64, dense_below=0)
    settings = dict(offload=default, max_context=512, chunk=50)
    weights = tiny_llm(METHOD, **settings).plan(offload="host").total
    llm = tiny_llm(METHOD, ram_budget=weights + 2 * BLOCK, **settings)
    plan = llm.plan(offload="host")
    left = weights + 2 * BLOCK - (plan.total - plan.bytes_of("host tier"))
    with llm.session(offload="host") as first, llm.session(offload="host") as second:
        first.prefill(random_ids(512))
        with pytest.raises(OutOfHostMemory, match="the pool's limit is"):
            second.prefill(random_ids(500))
        assert 100 <= len(second) < 500
        assert 8 * BLOCK < llm.load().host_pool.reserved <= llm.load().host_pool.limit == left
    with llm.session(other, offload="host") as session:
        session.prefill(random_ids(400))
        assert llm.load().host_pool.reserved <= left


def test_a_pool_serves_two_models_one_after_the_other():
    """Slabs are cut anew for another block size once nobody uses them."""
    pool = HostPool(limit=1 << 20, slab_bytes=1 << 20)
    for layers in (8, 6, 8):
        llm = tiny_llm(
            METHOD,
            offload="host",
            host_pool=pool,
            config=session_config(layers=layers),
            **SMALL,
        )
        with llm.session() as session:
            session.prefill(random_ids(200))
            assert 0 < pool.in_use <= pool.reserved == 1 << 20
        assert pool.in_use == 0


@pytest.mark.parametrize("call", [1, 3, 5, 11, 20, 27, 35, 43])
def test_interrupted_anywhere_in_a_step_or_chunk(monkeypatch, call, expected):
    """Ctrl-C in a chunk (up to the 22nd copy), when rings are filled (30th), in a fetch, in a
    write-back (43rd): the session is at the tokens it says, and answers as ever.
    """
    import engine.bank.host.host_rows as host_rows

    session = offloaded(HostPool(slab_bytes=BLOCK)).session()
    session.prefill(random_ids(200))
    left, real = [call], host_rows.move_rows

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(host_rows, "move_rows", interrupted)
    got = None
    with pytest.raises(KeyboardInterrupt):
        got = session.prefill(random_ids(250)[200:])
        for _ in range(20):
            session.decode(5)
    if len(session) == 200:
        got = session.prefill(random_ids(250)[200:])
    assert got is None or torch.equal(got, expected[0])
    session.truncate(250)
    assert [torch.equal(session.decode(5), e) for e in expected[1]] == [True] * 20
    session.close()
    assert session.loaded.host_pool.in_use == 0


def test_dropped_sessions_give_their_blocks_back():
    """Nobody calls close: neither after a prefill, nor in the middle of a generation, nor after an
    exception.
    """
    llm = offloaded(None)
    session = llm.session()
    session.prefill(random_ids(100))
    pieces = session.fork().generate([1, 2, 3])
    next(pieces)
    assert llm.load().host_pool.in_use > 0
    del session, pieces
    gc.collect()
    assert llm.load().host_pool.in_use == 0
    pieces = llm.stream(random_ids(70))
    next(pieces)
    pieces.close()
    assert llm.load().host_pool.in_use == 0


def test_forks_share_blocks_until_one_writes(expected):
    llm = offloaded(HostPool(slab_bytes=BLOCK))
    session = llm.session()
    session.prefill(random_ids(250))
    held = llm.load().host_pool.in_use
    twins = [session.fork() for _ in range(3)]
    assert llm.load().host_pool.in_use == held
    twins[0].truncate(70)
    twins[0].prefill(random_ids(90, seed=9))
    assert held < llm.load().host_pool.in_use <= held + 3 * BLOCK
    for other in (twins[1], session, twins[2]):
        assert [torch.equal(other.decode(5), e) for e in expected[1]] == [True] * 20
    for other in (session, *twins):
        other.close()
    assert llm.load().host_pool.in_use == 0


def test_a_fork_that_finds_no_memory_leaves_nothing(monkeypatch):
    llm = offloaded(HostPool(slab_bytes=BLOCK))
    session = llm.session()
    session.prefill(random_ids(200))
    held = llm.load().host_pool.in_use

    def refused(*_):
        raise OutOfHostMemory("no")

    monkeypatch.setattr(TieredBank, "copy_from", refused)
    with pytest.raises(OutOfHostMemory):
        session.fork()
    assert llm.load().host_pool.in_use == held and session.decode(1) is not None


def test_other_groups_that_finds_no_memory_leaves_the_session_as_it_was(expected):
    llm = offloaded(HostPool(limit=6 * BLOCK, slab_bytes=BLOCK))
    session = llm.session()
    session.prefill(random_ids(250))
    with pytest.raises(OutOfHostMemory):
        session.set_method(OmniKV(filter_layers=(0, 2), tokens=40, tail=64, dense_below=0))
    assert session.method == METHOD
    assert [torch.equal(session.decode(5), e) for e in expected[1]] == [True] * 20


def test_the_block_given_back_last_is_taken_first_and_any_free_one_serves():
    pool = HostPool(limit=4 * 128, slab_bytes=4 * 128)
    first = pool.take(128, 4)
    assert len({b.address for b in first}) == 4 and all(b.address % 64 == 0 for b in first)
    pool.release(first[2:3])
    pool.release(first[:1])
    # pages that nobody has touched stay the system's
    assert pool.take(128, 2) == [first[0], first[2]]
    with pytest.raises(OutOfHostMemory):
        pool.take(128, 1)
    assert pool.in_use == pool.reserved == 4 * 128
    with pytest.raises(ValueError, match="are in use"):
        pool.close()
    pool.release(first)
    pool.close()
    assert pool.reserved == pool.in_use == 0


def test_a_refused_reserve_changes_nothing():
    pool = HostPool(limit=3 * 128, slab_bytes=128)
    table, other = (BlockTable(pool, 128, 640, "cpu") for _ in range(2))
    table.reserve(0, 130)
    other.share(table, 130)
    before = list(table.blocks), table.addresses.clone(), pool.in_use
    with pytest.raises(OutOfHostMemory):
        table.reserve(128, 140)  # the last block is shared: a copy is needed
    assert (
        table.blocks == before[0]
        and torch.equal(table.addresses, before[1])
        and pool.in_use == before[2]
    )
    other.cut(0)
    assert not table.reserve(128, 140) and pool.in_use == 3 * 128


@pytest.mark.parametrize("slots", [0.5, -1, "many", True])
def test_slots_are_validated(slots):
    from engine.base.errors import SettingError

    with pytest.raises(SettingError, match="slots: found"):
        tiny_llm(METHOD, offload="host", slots=slots)
