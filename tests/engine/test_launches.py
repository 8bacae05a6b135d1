"""How many kernels one decode step launches, recorded without a GPU (tests/launches.py).

Stops: small kernels that a layer of a step grows unnoticed. At 2 us each, the 12 that a sparse
layer over the host tier once had were 0.5 ms of a step of 6.
"""

import pytest

from tests.launches import STEPS, launches


@pytest.fixture(scope="module")
def found():
    return {name: launches(*step) for name, step in STEPS.items()}


def test_the_host_tier_adds_its_plans_and_its_gathers_and_four_kernels(found):
    """Four kernels a group plan its fetch, one a layer gathers; what the ring needs is computed
    once per step.
    """
    device, host = found["OmniKV w1"], found["w1, host tier"]
    groups, layers = 3, 24
    assert host["move_kernel"] == layers and host["probe_kernel"] == groups
    assert host["store_kernel"] == device["store_kernel"] == 32
    assert host.total() - device.total() == 4 * groups + layers + 4


def test_a_step_launches_no_more_than_it_did(found):
    """An upper bound for each method; a change that needs fewer lowers it."""
    most = {"Full": 499, "OmniKV w1": 498, "OmniKV w0": 495, "w1, host tier": 538}
    assert {name: by.total() for name, by in found.items() if by.total() > most[name]} == {}
    # the recorder sees kernels, operators and both halves of a layer
    assert found["Full"]["dense_kernel"] == 32 and found["OmniKV w0"]["sparse_kernel"] == 27
    assert found["Full"]["before"] and found["Full"]["after"] and found["Full"]["mm"]
