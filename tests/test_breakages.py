"""The tables of breakages follow the code.

Stops: a pattern that matches nowhere any more, so that nobody sees which test would notice.
"""

import re

import pytest

from tests import breakages, gpu_breakages, reliability_breakages

TABLES = [
    breakage
    for module in (breakages, gpu_breakages, reliability_breakages)
    for table in vars(module).values()
    if isinstance(table, tuple) and table and isinstance(table[0], breakages.Breakage)
    for breakage in table
]


@pytest.mark.parametrize("breakage", TABLES, ids=lambda b: b.name)
def test_a_breakage_has_its_place_and_its_tests(breakage):
    expression = re.compile(breakage.pattern, re.MULTILINE)
    texts = [path.read_text() for path in breakages.ROOT.glob(breakage.files)]
    assert sum(len(expression.findall(text)) for text in texts) == 1
    assert any(expression.sub(breakage.instead, text) != text for text in texts)
    for test in breakage.tests:
        file, _, name = test.partition("::")
        text = (breakages.ROOT / file).read_text()
        assert not name or re.search(rf"def {name.partition('[')[0]}\b", text), test
