"""`make quick` samples what tests/quick.py names, and every name there is of a test.

Stops: a sample that shrinks unseen because a test or a file has another name now.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests import quick

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/engine/text/test_text.py"


def test_every_file_and_name_of_the_list_is_of_a_test():
    # addopts would shorten the listing to a number for each file
    options = "--quick --collect-only -o addopts= -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", *options, *quick.QUICK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<Function " in done.stdout and "<Stale " not in done.stdout, done.stdout


def test_a_name_that_no_test_has_is_found(monkeypatch):
    monkeypatch.setitem(quick.QUICK, FILE, ("stop", "gone"))
    tests = [f"{FILE}::test_stop", "tests/test_docs.py::test_links"]
    assert quick.stale(tests, [FILE]) == [f"{FILE}: gone"]
    assert quick.stale(tests, []) == [], "of a file that was not asked for whole nothing is said"
    assert quick.stale([], [FILE]) == [], "a file that was skipped holds no test"


def test_a_name_that_no_test_has_fails_a_quick_run(tmp_path):
    """As an item, so that workers of pytest-xdist report it."""
    (tmp_path / "quick_of_one.py").write_text(
        "import sys\nimport pytest\nfrom tests import quick\n"
        f"quick.QUICK[{FILE!r}] = ('stop', 'gone')\n"
        f"sys.exit(pytest.main(['--quick', '-p', 'no:cacheprovider', *sys.argv[1:], {FILE!r}]))\n"
    )
    command = [sys.executable, str(tmp_path / "quick_of_one.py"), "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stdout
    assert f"no test has the name {FILE}: gone" in done.stdout and "1 failed" in done.stdout
