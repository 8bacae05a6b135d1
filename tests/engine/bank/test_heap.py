"""What a prompt leaves in the C heap goes back to the system.

Stops: a heap that keeps what a prompt took, or gives it back where it only lives elsewhere; a C
library without `malloc_trim` that fails.
"""

import subprocess
import sys

import pytest
import torch

from engine.bank.chunk_bank import ChunkBank
from engine.bank.pool import heap, heap_limit
from kernels.native import own_pages
from tests.builders import tiny_config

# in a process of its own, whose heap keeps large blocks as glibc's own growth has it do; every
# second one stays, so that the heap has no free end to give of itself
FREED = """
import ctypes
from engine.bank.pool import heap, heap_limit
from tools.common.resident import resident
size, count = 1 << 20, 100
ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
blocks = [bytearray(b"x") * size for _ in range(count)]
del blocks[::2]
before = resident("VmRSS")
given = heap.give_back()
print(given, before - resident("VmRSS") > size * count // 4, all(b == b"x" * size for b in blocks))
"""


@pytest.mark.skipif(heap._trim() is None, reason="the C library has no malloc_trim")
def test_what_was_freed_goes_back():
    for line, words in (
        (FREED, "True True True"),
        (FREED.replace("heap.give_back()", "True"), "True False True"),  # the control
    ):
        found = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
        assert found.stdout.strip() == words, found


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap, "_trim", lambda: None)
    assert not heap.give_back()


def test_a_limit_gives_back_what_is_resident_and_lives_nowhere(monkeypatch):
    """Look by look of a limit of 40: resident bytes, those in use in the heap, mapped, untouched of
    those, free in the heap; whether it gave back, which leaves 10 resident that nothing lives in.
    """
    looks = (
        ((100, 30, 50, 0, 0), False),  # the first says where it stands: 20
        ((139, 30, 50, 0, 90), False),  # not yet: 59
        ((300, 230, 50, 0, 90), False),  # grown, by what lives in the heap
        ((300, 30, 250, 0, 90), False),  # grown, by what lies in pages of its own
        ((161, 30, 250, 180, 90), True),  # most of which nothing was written to: 61 it stands at
        ((90, 30, 50, 0, 90), False),  # 10, where it was left
        ((131, 30, 50, 0, 40), False),  # no more lies free than the limit
        ((131, 30, 50, 0, 41), True),
        ((85, 30, 50, 0, 90), False),  # something else went: it stands at 5
        ((126, 30, 50, 0, 90), True),
        ((None, 30, 50, 0, 90), False),
    )
    now, given = (0, 0, 0, 0, 0), []

    def resident():
        return sum(now[1:3]) - now[3] + 10 if given[-1:] == [now] else now[0]

    monkeypatch.setattr(heap_limit, "give_back", lambda: given.append(now))
    monkeypatch.setattr(heap_limit, "resident_bytes", resident)
    monkeypatch.setattr(heap_limit, "used_of_heap", lambda: now[1])
    monkeypatch.setattr(heap_limit, "mapped_bytes", lambda: now[2])
    monkeypatch.setattr(heap_limit, "free_in_heap", lambda: now[4])
    limit = heap_limit.HeapLimit(40)
    for now, expected in looks:
        before = len(given)
        assert limit.keep(now[3]) == expected == (len(given) > before), now


@pytest.mark.skipif(heap._asked() is None, reason="the C library has no mallinfo2")
def test_what_lives_is_known_wherever_it_lies():
    """A small tensor in the heap, one beyond its blocks, one in pages of its own until it goes."""
    at = heap.used_of_heap()
    small, large = torch.zeros(50_000, dtype=torch.int8), torch.zeros(64 << 20, dtype=torch.int8)
    assert 64 << 20 <= heap.used_of_heap() - at - len(small) < 65 << 20
    at, size = own_pages.mapped_bytes(), own_pages.LEAST
    own = own_pages.empty_on((size,), torch.int8, "cpu")
    part = own[:5]
    own_pages.empty_on((size - 1,), torch.int8, "cpu")  # too small for pages of its own
    assert own_pages.mapped_bytes() - at == size == len(own)
    del own
    assert own_pages.mapped_bytes() - at == size  # a view holds the pages
    del part, large
    assert own_pages.mapped_bytes() == at


def test_rows_that_wait_say_what_nothing_was_written_to():
    """Room for a prompt is made at once and fills chunk by chunk; what is written stays so."""
    config = tiny_config(layers=2)
    bank, each = ChunkBank(config, 100, torch.float32, "cpu", span=40, chunk=16), config.kv_bytes(4)

    def chunk(start, stop):
        rows = torch.ones(1, stop - start, config.num_kv_heads, config.head_dim)
        bank.write_chunk(0, rows, rows, start, "reference")

    def untouched():
        return sum(held.untouched for held in bank._waiting if held is not None) // each

    with bank.preparing(90):
        assert untouched() == 0
        chunk(0, 16)
        assert untouched() == 24
        chunk(16, 40)
        assert untouched() == 0
        bank.forget(0, 33)  # 7 rows go to the front
        assert untouched() == 0 and bank.rows(0, 33, 40)[0].shape[2] == 7
        chunk(40, 50)
        assert untouched() == 0
