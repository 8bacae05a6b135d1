"""Memory is given back when no card can touch it any more.

Stops: pages that are unmapped while a replayed graph's fetch still reads them (its transfers run
on none of the bank's streams).
"""

import gc
from functools import partial

import pytest
import torch

from engine import OmniKV
from engine.bank.host.tiered import _give_back
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import Allocator, registered
from tests.builders import random_ids, tiny_llm
from tests.engine.bank.test_block_table import interrupted
from tests.engine.bank.test_pinned_memory import Registrar
from tests.fake_gpu import FakeGPU

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)


@pytest.fixture
def held(monkeypatch):
    """(a session over locked pages that believes itself on the second card, its pool, the cards,
    the order of what happened).
    """
    order, registrar = [], Registrar()
    unregister = registrar.unregister

    def unlock(address):
        order.append("unlock")
        unregister(address)

    registrar.unregister = unlock
    pool = HostPool(
        slab_bytes=1 << 22,
        allocators=[Allocator("mapped", partial(registered, registrar), pinned=True)],
        free=lambda: 1 << 30,
    )
    cut = pool.release
    monkeypatch.setattr(pool, "release", lambda b: (order.append("release"), cut(b)))
    session = tiny_llm(METHOD, offload="host", max_context=512, host_pool=pool).session()
    session.prefill(random_ids(100))
    gpu = FakeGPU(monkeypatch)
    gpu.used = {1}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append(str(device)))
    order.clear()
    return session, pool, order


def test_a_bank_waits_for_its_card_before_its_blocks_go_back(held):
    session, _, order = held
    table = session.bank.table
    _, _, arguments, _ = session.bank._end.peek()
    assert arguments[0] is table and arguments[2] == session.bank.device
    _give_back(table, (), torch.device("cuda:1"))
    assert order == ["cuda:1", "release"]


def test_a_pool_waits_for_every_card_in_use_before_it_unlocks(held):
    """And only for those: asking an unused card would make a context on it."""
    session, pool, order = held
    session.close()
    order.clear()
    pool.close()
    gc.collect()
    before = order[: order.index("unlock")]  # another test's pool may end here too
    assert len(before) >= 2 and set(before) == {"1"}


def test_an_interrupt_of_a_close_leaves_nothing_taken():
    """At any line, as in a change to a method that frees the bank, which then closes it again."""
    pool = HostPool(slab_bytes=1 << 22)
    llm = tiny_llm(METHOD, offload="host", max_context=512, host_pool=pool)
    for line in range(1, 200):
        session = llm.session()
        session.prefill(random_ids(100))
        bank = session.bank
        assert pool.in_use > 0
        hit = interrupted(bank.close, line)
        bank.close()
        assert pool.in_use == 0, f"line {line}"
        if not hit:
            assert line > 5
            return
