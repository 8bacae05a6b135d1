"""The tokens of a stream against a plain list of all of them.

Stops: an id off by one after a block was dropped, a copy that shares, a digest that another text
has, memory that grows.
"""

import random
import sys

import pytest

from engine.base.errors import SettingError
from engine.base.newest_tokens import BLOCK, NewestTokens


def grown(count, kept=BLOCK, seed=0, most=3000):
    """(NewestTokens of so many ids that came in pieces, the list of all)."""
    rng, mine = random.Random(seed), NewestTokens(kept=kept)
    every, n = [rng.randrange(50_000) for _ in range(count)], 0
    while n < count:
        stop = min(n + rng.randint(1, most), count)
        mine[n:] = every[n:stop]
        mine[n:] = every[n:stop]  # what an interrupt does: once more
        n = stop
    return mine, every


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK + 7])
def test_what_is_held_is_read_as_from_the_list_of_all(count):
    mine, every = grown(count)
    first = mine.first
    assert len(mine) == count and list(mine) == every[first:] and mine == every
    assert count < 2 * BLOCK or count - first >= BLOCK  # at least `kept` of them, where some went
    assert first == max(0, (count - BLOCK) // BLOCK * BLOCK)
    rng = random.Random(count)
    for _ in range(200 if count else 0):
        a, b = sorted(rng.randint(first, count) for _ in range(2))
        assert mine[a:b] == every[a:b]
        at = rng.randrange(first, count)
        assert mine[at] == every[at] and mine[at - count] == every[at]
    assert mine[-8:] == every[-8:]
    with pytest.raises(IndexError):
        mine[count]


def test_what_is_gone_is_named():
    mine, _ = grown(3 * BLOCK)
    for wrong in (lambda: mine[0], lambda: mine[5:10], lambda: mine[:100], lambda: mine[0:]):
        with pytest.raises(SettingError, match="found token .* asked for, expected 8,192 or later"):
            wrong()
    with pytest.raises(SettingError, match="a stream keeps its newest 4,096 of 12,288"):
        del mine[7:]
    assert len(mine) == 3 * BLOCK  # nothing happened
    del mine[0:]
    assert len(mine) == 0 == mine.first and mine == []


def test_cuts_and_copies_share_nothing():
    mine, every = grown(3 * BLOCK + 5)
    for n in (mine.first, mine.first + 1, len(mine)):
        part, copy = mine[:n], mine.copy()
        part[n:] = [1, 2]
        del copy[n:]
        assert part == [*every[:n], 1, 2] and copy == every[:n] and mine == every


def test_a_common_beginning_reaches_over_what_is_gone():
    mine, every = grown(4 * BLOCK + 9)
    assert mine.shared(every) == len(every) == mine.shared([*every, 3])
    for n in (mine.first, mine.first + 1, len(mine) - 1):
        assert mine.shared(every[:n]) == n
        assert mine.shared([*every[:n], 60_000, *every[n + 1 :]]) == n
    assert mine.shared(every[: mine.first - 1]) == 0  # it ends in what is gone
    for at in (0, BLOCK - 1, BLOCK, mine.first - 1):
        other = list(every)
        other[at] += 1
        assert mine.shared(other) == 0 and mine != other
    again, _ = grown(4 * BLOCK + 9, most=1)  # in pieces of another size
    assert again == mine and again.past == mine.past
    longer, _ = grown(9 * BLOCK, seed=0)
    # neither holds the beginning of the other, so that nobody can tell
    assert longer.shared(mine) == 0 == mine.shared(longer)


def test_memory_is_bounded():
    sizes = set()
    for count in (4 * BLOCK, 40 * BLOCK, 400 * BLOCK):
        mine, _ = grown(count)
        assert len(mine._held.ids) <= 2 * BLOCK + 3000
        sizes.add(sys.getsizeof(mine._held.ids) // 4096)
    assert max(sizes) <= 12
