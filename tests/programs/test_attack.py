"""Random operations on sessions against an oracle (tests/programs/attack): every method, both
tiers, interrupts at any line, answers that are left early or taken by several threads.

Stops: choices from queries that are gone, half a switch, a check that changes something, a fork
that forgets; in batches, a step over an inconsistent state and logits that an interrupt takes. The
seeds of a failure are printed, with the operations that are left after shrinking.
"""

import pytest
import torch

from kernels.rows.forms import FORMS
from tests.engine.methods.method_table import TABLE
from tests.programs.attack.__main__ import BATCH, failure, main, report
from tests.programs.attack.batch import METHODS, WORLDS, BatchCounts
from tests.programs.attack.batch import operations as batch_operations
from tests.programs.attack.rounding import one_rounding
from tests.programs.attack.sequence import Counts, operations

GROUPS, EACH = 6, 4
BATCHES = 20  # in each group


@pytest.mark.parametrize("group", range(GROUPS))
def test_sequences(group):
    counts = Counts()
    for seed in range(group * EACH, (group + 1) * EACH):
        todo = operations(seed)
        if failure(seed, todo, counts):
            pytest.fail(report(seed, todo), pytrace=False)
    print(f"seeds {group * EACH} to {(group + 1) * EACH - 1}: {counts}")
    assert counts.checks >= EACH and counts.interrupts


@pytest.mark.parametrize("group", range(3))
def test_batches(group):
    counts = BatchCounts()
    for seed in range(group * BATCHES, (group + 1) * BATCHES):
        todo = batch_operations(seed)
        if failure(seed, todo, counts, BATCH):
            pytest.fail(report(seed, todo, BATCH), pytrace=False)
    assert counts.checks > 3 * BATCHES and counts.interrupts > BATCHES // 2
    rows = {name.partition(" rows")[0] for name in counts.by if "launchers" in name}
    assert rows == {"float32", "int8", "int4"}


def test_batches_know_every_method():
    """Those of the table, which is held against the registry, and exact mode."""
    assert {name for name, _ in METHODS} == {row.name for row in TABLE} | {"exact"}
    assert len(WORLDS) == 4


def test_a_run_goes_on_where_it_was_left(tmp_path, capsys):
    kept = ["--batch", "--resume", str(tmp_path / "kept.json")]
    assert main([*kept, "--seed", "3", "--sequences", "2"]) == 0
    assert main([*kept, "--sequences", "3"]) == 0
    resumed = capsys.readouterr().out.splitlines()
    assert main(["--batch", "--seed", "3", "--sequences", "3"]) == 0
    straight = capsys.readouterr().out.splitlines()
    last = [line for line in resumed if line.startswith("seeds 3 to 5: 3 batches")]
    assert len(last) == 1 and straight[0].rpartition(" in ")[0] == last[0].rpartition(" in ")[0]
    assert resumed[resumed.index(last[0]) + 1 :] == straight[1:]


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
