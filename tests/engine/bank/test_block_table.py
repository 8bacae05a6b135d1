"""Blocks of host memory: an interrupt at any line loses none, and leaves every address true.

Stops: blocks that nobody holds and nobody has, an address of the block that another session reads.
"""

from functools import partial

import pytest

from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from tests.programs.attack.interrupt import Interrupt, interrupted_after

SIZE = 128


def interrupted(work, line):
    """Do work(), with an interrupt at its line-th line of the engine; whether it came."""
    with interrupted_after(line) as countdown:
        try:
            work()
        except Interrupt:
            pass
    return countdown.hit


def whole(*tables):
    for table in tables:
        addresses = table.addresses[: len(table.blocks)].tolist()
        assert addresses == [block.address for block in table.blocks]
        assert len(set(addresses)) == len(addresses)


def tables(pool):
    """One with 3 blocks, one that shares them, an empty one."""
    made = [BlockTable(pool, SIZE, 64 * 8, "cpu") for _ in range(3)]
    made[0].reserve(0, 3 * 64)
    made[1].share(made[0], 3 * 64)
    return made


WORK = {
    "grow by one": lambda one, other, third: one.reserve(3 * 64, 4 * 64),
    "grow": lambda one, other, third: one.reserve(3 * 64, 6 * 64),
    "write what is shared": lambda one, other, third: other.reserve(64, 5 * 64),
    "share": lambda one, other, third: third.share(one, 2 * 64),
    "cut": lambda one, other, third: one.cut(64),
}


@pytest.mark.parametrize("name", WORK)
def test_an_interrupt_loses_no_block(name):
    for line in range(1, 200):
        pool = HostPool(slab_bytes=32 * SIZE)
        made = tables(pool)
        hit = interrupted(partial(WORK[name], *made), line)
        whole(*made)
        made[2].cut(0)  # a copy that broke off is given up
        WORK[name](*made)
        whole(*made)
        for table in made:
            table.cut(0)
        assert pool.in_use == 0, f"line {line}"
        if not hit:
            assert line > 5
            return
    raise AssertionError("no end")
