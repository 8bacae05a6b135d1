"""The tables of broken lines follow the code: every pattern matches one place, and every test that
is to notice exists. Whether it notices is asked by hand (tests/programs/breakages.py).
"""

import ast
from functools import cache

import pytest

from tests.programs import batch_breakages, breakages, gpu_breakages, reliability_breakages
from tests.programs.attack.planted import BATCH_BUGS, BUGS
from tests.programs.breakages import ROOT, place

TABLES = {
    "breakages": breakages.TABLE,
    "batch": batch_breakages.TABLE,
    "gpu": gpu_breakages.TABLE,
    "reliability": reliability_breakages.TABLE,
    "planted": BUGS + BATCH_BUGS,
}


@cache
def functions(file):
    """Names of all functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", TABLES)
def test_every_pattern_matches_one_place(table):
    assert TABLES[table]
    for breakage in TABLES[table]:
        place(ROOT, breakage)


@pytest.mark.parametrize("table", TABLES)
def test_every_test_that_is_to_notice_exists(table):
    for breakage in TABLES[table]:
        for test in breakage.tests:
            file, _, name = test.partition("::")
            assert not name or name.split("[")[0] in functions(file), (breakage.name, test)


def test_a_row_whose_line_is_gone_is_named(tmp_path):
    row = breakages.TABLE[0]
    (tmp_path / row.files).parent.mkdir(parents=True)
    (tmp_path / row.files).write_text("pass")
    with pytest.raises(SystemExit, match=f"{row.name}: found 0 places"):
        place(tmp_path, row)
