"""Slots and row moves, interpreted: the slot policy against a plain Python model, moved bytes against a loop over bytes.

Stops: a victim that is in use, ties by chance, a map that disagrees with the slots, rows that land beside their slot.
"""

import pytest

from tests.host_checks import check_moves, check_slots


@pytest.mark.parametrize("seed, budget, width, capacity", [
    (0, 8, 8, 40), (1, 300, 300, 900), (2, 300, 1200, 1500), (3, 257, 1025, 4000), (4, 1, 1, 3), (5, 700, 2100, 2500)])
def test_slots_follow_the_model(seed, budget, width, capacity):
    model = check_slots("cpu", "triton", seed, budget, width, capacity, steps=25)
    assert model.counters[1] > 0 and (budget < 2 or model.counters[0] > 0)


@pytest.mark.parametrize("width, layers, count, programs", [
    (64, 1, 7, None), (64, 3, 150, 2), (512, 2, 65, 4), (4096, 2, 9, 3), (1024 + 64, 1, 20, 1), (24576, 1, 3, 2)])
def test_rows_land_where_they_should(width, layers, count, programs):
    check_moves("cpu", "triton", width + layers, width, layers, 4, count, programs)
