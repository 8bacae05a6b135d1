"""How many threads OpenMP is told to have. Stops: 64 threads in a container of two cores, a team of
4,096, and a number that is none.
"""

import os
import subprocess
import sys

import pytest

from engine.base.cores.openmp import settle


@pytest.mark.parametrize(
    "given, cores, visible, wanted, line",
    [
        (None, 2, 2, None, ""),
        (None, 2, 64, "2", ""),  # a container's quota, of which OpenMP knows nothing
        ("", 2, 64, "2", ""),
        ("1", 2, 64, "1", ""),
        ("2", 2, 64, "2", ""),
        ("2,4", 2, 64, "2,4", ""),
        ("4096", 2, 64, "2", "OMP_NUM_THREADS: found 4096, more than"),
        ("64,2", 2, 64, "2", "OMP_NUM_THREADS: found 64, more than"),
        ("0", 2, 2, "2", "OMP_NUM_THREADS: found '0', expected"),
        ("-3", 1, 1, "1", "OMP_NUM_THREADS: found '-3', expected"),
        ("many", 1, 1, "1", "OMP_NUM_THREADS: found 'many', expected"),
        ("\u0663", 1, 1, "1", "OMP_NUM_THREADS: found '\u0663', expected"),
    ],
)
def test_the_count_is_one_that_this_process_may_use(given, cores, visible, wanted, line):
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    found = settle(environment, cores, visible)
    assert environment.get("OMP_NUM_THREADS") == wanted
    assert found.startswith(line) and bool(found) == bool(line)
    assert "\n" not in found
    assert settle(environment, cores, visible) == "", "a child says it again"


@pytest.mark.parametrize("given", ["0", "4096"])
def test_a_count_that_cannot_be_is_said_in_one_line_and_torch_runs(given):
    code = "import engine, torch; print(torch.get_num_threads(), float(torch.ones(99999).sum()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": given},
        capture_output=True,
        text=True,
    )
    threads, total = found.stdout.split()
    assert 1 <= int(threads) <= (os.cpu_count() or 1) and total == "99999.0"
    assert found.stderr.startswith("OMP_NUM_THREADS: found") and found.stderr.count("\n") == 1
