"""What a prompt leaves in the C heap goes back to the system.

Stops: a heap that keeps what a prompt took; a C library without `malloc_trim` that fails.
"""

import subprocess
import sys

import pytest

from engine.bank.pool import heap, heap_limit

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


def test_a_limit_gives_back_what_has_grown_and_lies_free(monkeypatch):
    """Resident bytes and those free in the heap, look by look, of a limit of 40."""
    looks = (
        (100, 0, False),  # the first says where it stands
        (139, 90, False),  # not yet
        (141, 39, False),  # grown, by what is in use
        (141, 41, True),
        (100, 90, False),  # it stands at 90, where it was left
        (131, 90, True),
        (60, 90, False),  # something was freed: it stands lower
        (101, 90, True),
        (None, 90, False),
    )
    given, now = [], 0
    monkeypatch.setattr(heap_limit, "give_back", lambda: given.append(now))
    monkeypatch.setattr(heap_limit, "resident_bytes", lambda: 90 if len(given) > before else now)
    limit = heap_limit.HeapLimit(40)
    for now, free, expected in looks:
        before = len(given)
        monkeypatch.setattr(heap_limit, "free_in_heap", lambda free=free: free)
        assert limit.keep() == expected == (len(given) > before), now
