"""The reference of the slot policy against a plain Python model over random selection streams:
hits, misses, victims identical.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.support.host_checks import check_moves, check_slots


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 100),
)
def test_slots_follow_the_model(seed, budget, times, odd, more):
    check_slots(
        "cpu", "reference", seed, budget, budget * (1 + times) + odd, budget + more, steps=20
    )


def test_age_is_capped_at_254_plans():
    """Older slots tie: the lowest slot number goes first."""
    check_slots("cpu", "reference", 11, 4, 60, 400, steps=600)


def test_fewer_slots_than_the_budget_is_refused():
    from kernels.tier.lru_slots import make_slots

    with pytest.raises(ValueError, match="slots: found 3, expected at least the budget of 4"):
        make_slots(100, 3, 4, "cpu")


def test_planned_bytes_are_allocated_bytes():
    from kernels.tier.lru_slots import make_slots, slots_bytes

    for capacity, slots, budget in ((100, 40, 10), (5000, 8192, 2048), (64, 1, 1)):
        assert make_slots(capacity, slots, budget, "cpu").nbytes == slots_bytes(
            capacity, slots, budget
        )


@pytest.mark.parametrize(
    "width, layers, count", [(64, 1, 7), (64, 3, 150), (512, 2, 65), (4096, 2, 9)]
)
def test_rows_land_where_they_should(width, layers, count):
    check_moves("cpu", "reference", width, width, layers, 4, count)
