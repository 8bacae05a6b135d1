"""Families on one thread and on all: a row has its figures, and a bad name is told.

Stops: a family whose sizes no longer make a model.
"""

import pytest

from tests.programs import family_threads
from tools.families.models import configuration

pytest.importorskip("transformers")


def test_a_row_has_every_figure(capsys):
    assert family_threads.main(["llama", "--tokens", "8", "20", "--turns", "1"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| llama |") and row.count("(") == 4


def test_every_family_is_described():
    for name, sizes in family_threads.FAMILIES.items():
        assert configuration(name, **sizes).hidden_size == 768


def test_an_unknown_family_is_told(capsys):
    assert family_threads.main(["lama"]) == 2
    assert "FAMILY: found lama, expected one of llama" in capsys.readouterr().err
