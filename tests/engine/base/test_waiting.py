"""How torch's threads wait is said before torch is loaded: it reads that once.

Stops: threads that spin on cores which other processes use, a user's own choice overwritten.
"""

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# importing torch ends the process with what torch would have read
PROBE = """
import os, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print([os.environ.get(name) for name in {names}])
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Stop())
import {module}
""".replace("{names}", repr(NAMES))


@pytest.mark.parametrize(
    "module", ["engine.llm", "engine.chat.cli", "tools.bench.cli", "tools.speed.cpu_forms"]
)
@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ["passive", None, None]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", None, None]),
        ({"GOMP_SPINCOUNT": "1000"}, [None, "1000", None]),
        ({"KMP_BLOCKTIME": "1"}, [None, None, "1"]),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(module, given, expected):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    found = subprocess.run(
        [sys.executable, "-c", PROBE.replace("{module}", module)],
        env={**environment, **given},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == repr(expected), found.stderr
