"""What `make test` prints at its end: each failed test by its name, and one line of counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.run import ROOT, read_counts, read_failures

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="a" name="test_good"/>
<testcase classname="a" name="test_bad[x-1]"><failure message="assert 1&#10; == 2"/></testcase>
<testcase classname="a" name="test_set_up"><error message="no disk"/></testcase>
<testcase classname="a" name="test_left"><skipped message="no card"/></testcase>
</testsuite></testsuites>"""


def test_a_report_names_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "0.xml"
    report.write_text(REPORT)
    assert read_counts(report) == {"failed": 1, "passed": 1, "skipped": 1, "errors": 1}
    assert read_failures(report) == [
        "a::test_bad[x-1]: assert 1 == 2",
        "a::test_set_up: no disk",
    ]


def test_a_run_without_a_report_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "1.xml").write_text("<testsuites>")
    assert read_counts(tmp_path / "1.xml") == {"errors": 1}
    assert "stopped before its end" in read_failures(tmp_path / "1.xml")[0]


def test_the_last_lines_name_a_failed_test(tmp_path: Path) -> None:
    bad = tmp_path / "test_bad.py"
    bad.write_text("def test_one():\n    assert 'found' == 'expected'\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "run.py"), str(bad), "-n", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    last = "\n".join(done.stdout.splitlines()[-4:])
    assert "FAILED RUN: chosen" in last
    assert "test_one: AssertionError: assert 'found' == 'expected'" in last
    assert "===== 1 failed in" in last
