"""Random operations on sessions against an oracle (tests/attack): every method, both tiers,
interrupts at any line, answers that are left early or taken by several threads.

Stops: choices from queries that are gone, half a switch, a check that changes something, a fork
that forgets. The seeds of a failure are printed, with the operations that are left after shrinking.
"""

import re

import pytest
import torch

from kernels.rows import FORMS
from tests.attack.__main__ import failure, report
from tests.attack.planted import BUGS
from tests.attack.rounding import one_rounding
from tests.attack.sequence import Counts, operations
from tests.breakages import ROOT

GROUPS, EACH = 6, 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_sequences(group):
    counts = Counts()
    for seed in range(group * EACH, (group + 1) * EACH):
        todo = operations(seed)
        if failure(seed, todo, counts):
            pytest.fail(report(seed, todo), pytrace=False)
    print(f"seeds {group * EACH} to {(group + 1) * EACH - 1}: {counts}")
    assert counts.checks >= EACH and counts.interrupts


@pytest.mark.parametrize("dtype", FORMS, ids=lambda dtype: FORMS[dtype].name)
def test_rows_that_differ_by_rounding_are_packed_alike_and_others_as_ever(dtype):
    generator = torch.Generator().manual_seed(0)
    rows, noise = (torch.randn(2, 400, 32, generator=generator) for _ in range(2))
    exact = FORMS[dtype].values.pack
    near, far = rows + 1e-5 * noise, rows + 1e-2 * noise

    def same(one, other):
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    with one_rounding() as roundings:
        pack = FORMS[dtype].values.pack
        assert same(pack(rows), exact(rows))
        assert same(pack(near), exact(rows))
        assert same(pack(far), exact(far))
    assert any(rounding.shared for rounding in roundings) and not same(exact(near), exact(rows))
    assert FORMS[dtype].values.pack is exact


def test_every_planted_bug_has_its_place():
    for bug in BUGS:
        (file,) = ROOT.glob(bug.files)
        found = re.findall(bug.pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(found) == 1, bug.name
