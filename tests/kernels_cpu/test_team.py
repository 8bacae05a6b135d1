"""The team of threads of the C++ kernels: every piece is computed once, threads begin with equally
many, and results do not depend on how many there are.

Stops: a piece lost or computed twice, one thread that has all of a short context, a call that a
forked child waits in for ever, a race between a call's end and a thread that comes late.
"""

import shutil
import subprocess
import sys
import threading

import pytest
import torch

from kernels.attention.native import attend
from kernels.layer.native_product import Product
from kernels.native import team
from kernels.native.library import FOLDER

TEAMS = [1, 2, 8, 16, 64]


@pytest.mark.parametrize("threads", [*TEAMS, 3, 255, 4096])
@pytest.mark.parametrize("piece", [1, 3, 64, 5000])
def test_every_number_comes_once(threads, piece):
    for count in (0, 1, 2, 7, 63, 64, 65, 997, 4097):
        times, by = team.marks(threads, count, piece)
        assert (times == 1).all(), (count, times.unique())
        assert count == 0 or 0 <= by.min() <= by.max() < min(threads, team.MOST)


@pytest.mark.parametrize("threads", TEAMS[1:])
def test_threads_begin_with_equally_many_pieces_and_nobody_is_left_alone(threads):
    for count in (2, 7, 64, 1000):
        team.marks(threads, count, 1)
        begun, taken = team.last()
        assert len(begun) == min(threads, count)
        assert sum(begun) == sum(taken) == count
        assert max(begun) - min(begun) <= 1


def test_what_threads_took_is_counted_though_one_comes_twice():
    """A thread that another wakes late finds the call it was in, and takes nothing of it."""
    for _ in range(1000):
        team.marks(64, 24, 1)
        begun, taken = team.last()
        assert sum(taken) == sum(begun) == 24


@pytest.fixture
def threads_of():
    """Set torch's number of threads, which kernels take, and put it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# outputs x inputs of a layer of 160M: q, k and v; output; gate and up; down; and a head's
WEIGHTS = [(1280, 768), (768, 768), (6144, 768), (768, 3072), (4000, 768)]


@pytest.mark.parametrize("outputs, inputs", WEIGHTS)
@pytest.mark.parametrize("threads", TEAMS[1:])
def test_the_bytes_of_a_weight_are_shared_equally(threads_of, outputs, inputs, threads):
    weight = Product(torch.zeros(outputs, inputs, dtype=torch.bfloat16))
    threads_of(threads)
    weight(torch.zeros(1, inputs, dtype=torch.bfloat16))
    begun, taken = team.last()
    assert sum(taken) == sum(begun)
    assert max(begun) <= -(-sum(begun) // threads)  # the mean, rounded up to a piece
    piece = outputs * inputs * 2 / sum(begun)
    assert piece < 128 << 10, "so that the last piece is not waited for"


@pytest.mark.parametrize("rows, units", [(2048, 8), (1025, 8), (1024, 4), (8192, 32)])
def test_the_rows_of_a_context_are_shared_equally(threads_of, rows, units):
    k, v = torch.zeros(2, 4, rows, 64, dtype=torch.bfloat16)
    threads_of(2)
    attend(torch.zeros(1, 12, 64), k, v, 0.125)
    begun, _ = team.last()
    assert begun == [units // 2] * 2


def _results():
    """What each kind of kernel makes of the same numbers."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    k, v, q = draw(2, 2100, 64), draw(2, 2100, 64), draw(2, 6, 64)
    weight, x = draw(1999, 300), draw(3, 300)
    logits = torch.empty(6 * 2100)
    yield from attend(q, k, v, 0.125, logits=logits)
    yield logits
    yield from attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.125)
    for dtype in (torch.float32, torch.bfloat16):
        yield Product(weight.to(dtype))(x.to(dtype))


def test_results_do_not_depend_on_the_number_of_threads(threads_of):
    threads_of(1)
    alone = [t.clone() for t in _results()]
    for threads in (2, 3, 8, 64):
        threads_of(threads)
        for n, (found, expected) in enumerate(zip(_results(), alone, strict=True)):
            assert torch.equal(found, expected), (threads, n)


def test_callers_of_several_threads_get_what_each_asked_for():
    faults = []

    def call():
        for n in range(100):
            times, _ = team.marks(3, 200 + n, 2)
            if not (times == 1).all():
                faults.append(n)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not faults


FORKS = """
import os, torch
from kernels.native import team
from kernels.native.library import native
native()
team.marks(4, 500, 1)
child = os.fork()
times, by = team.marks(4, 500, 1)
if not child:
    os._exit(0 if (times == 1).all() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bool((times == 1).all()))
"""


def test_a_forked_child_has_a_team_of_its_own():
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60
    )
    assert found.stdout.split() == ["0", "True"], found.stderr


STRESS = """
#include "team.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
static int faults;
static void *call(void *) {
    static thread_local int32_t times[700];
    for (int n = 0; n < 300; n++) {
        memset(times, 0, sizeof times);
        share(n % 9 + 1, 100 + n, n % 3 + 1, [&, t = times](long i) { t[i]++; });
        for (int i = 0; i < 100 + n; i++)
            if (times[i] != 1) __atomic_fetch_add(&faults, 1, __ATOMIC_RELAXED);
    }
    return nullptr;
}
int main() {
    pthread_t callers[2];
    for (auto &c : callers) pthread_create(&c, nullptr, call, nullptr);
    for (auto &c : callers) pthread_join(c, nullptr);
    printf("%d", faults);
}
"""


def test_the_thread_sanitizer_finds_no_race(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    (tmp_path / "stress.cpp").write_text(STRESS)
    made = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{FOLDER}"]
    sources = [str(tmp_path / "stress.cpp"), str(FOLDER / "team.cpp")]
    built = subprocess.run(
        [compiler, *flags, *sources, "-o", str(made)], capture_output=True, text=True
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("a compiler without its thread sanitizer")
    assert not built.returncode, built.stderr[:2000]
    found = subprocess.run([str(made)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in found.stderr:
        pytest.skip("a kernel that the thread sanitizer does not run on")
    assert (found.returncode, found.stdout) == (0, "0"), found.stderr[:3000]


# A thread with a clock of its own, whose core others have for `away` of every `each` nanoseconds:
# prints in how much of ten seconds it looks for calls.
LOOKING = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static long wall = 1000000000, mine;
static int clock_of_test(clockid_t clock, timespec *t) {
    const long at = clock == CLOCK_MONOTONIC ? wall : mine;
    t->tv_sec = at / 1000000000, t->tv_nsec = at % 1000000000;
    return 0;
}
#define clock_gettime clock_of_test
#include "team.cpp"
int main(int, char **words) {
    const long each = atol(words[1]), away = atol(words[2]), tick = 50000;
    Watch watch;
    watch.woken();
    long looked = 0, gone = 0;
    for (long at = 0; at < 10000000000; at += tick) {
        wall += tick, mine += tick, gone += tick;
        if (gone >= each - away) wall += away, at += away, gone = 0;
        if (wall < watch.until) {
            watch.woken();  // it slept between two calls
            continue;
        }
        watch.look(wall);
        looked += wall >= watch.until ? tick : 0;
    }
    printf("%.3f", looked / 1e10);
}
"""


def test_a_thread_looks_for_calls_unless_others_want_its_core(tmp_path):
    """Not looked for: a call costs a wake of 20 us, a third of a step of a small model. Looked for
    beside a busy program: the half of a core that is not the team's.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    (tmp_path / "looking.cpp").write_text(LOOKING)
    made = tmp_path / "looking"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{FOLDER}"]
    built = subprocess.run(
        [compiler, *flags, str(tmp_path / "looking.cpp"), "-o", str(made)],
        capture_output=True,
        text=True,
    )
    assert not built.returncode, built.stderr[:2000]

    def share(each_us, away_us):
        words = [str(each_us * 1000), str(away_us * 1000)]
        return float(subprocess.run([made, *words], capture_output=True, text=True).stdout)

    assert share(10**8, 0) == 1.0  # nobody else
    assert share(40_000, 200) > 0.99  # a daemon, 25 times a second
    assert share(10_000, 400) > 0.9  # several
    assert share(300_000, 4_000) > 0.5  # a short program, three times a second
    assert share(8_000, 4_000) < 0.02  # a busy program, at ticks of 4 ms
    assert share(2_000, 1_000) < 0.02  # .. and of 1 ms
    assert share(100_000, 90_000) < 0.02  # a container's quota that is used up
