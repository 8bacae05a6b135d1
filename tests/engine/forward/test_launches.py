"""How many kernels one decode step launches, recorded without a GPU (tests/programs/launches.py).

Stops: small kernels that a layer of a step grows unnoticed. At 2 us each, the 12 that a sparse
layer over the host tier once had were 0.5 ms of a step of 6.
"""

from collections import Counter

import pytest

from tests.programs.launches import (
    STEPS,
    choosing_launches,
    launches,
    recurrent_launches,
    token_launches,
)


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
    assert host["rotate_store_kernel"] == device["rotate_store_kernel"] == 32
    assert host.total() - device.total() == 4 * groups + layers + 4


def test_a_step_launches_no_more_than_it_did(found):
    """An upper bound for each method; a change that needs fewer lowers it."""
    most = {"Full": 267, "OmniKV w1": 287, "OmniKV w0": 287, "w1, host tier": 327}
    assert {name: by.total() for name, by in found.items() if by.total() > most[name]} == {}
    # the recorder sees kernels and operators
    assert found["Full"]["dense_kernel"] == 32 and found["OmniKV w0"]["sparse_kernel"] == 27
    assert found["Full"]["product_kernel"] == 4 * 32 + 1 and found["Full"]["index"] == 1
    # a filter layer's scores are counted as they are written: two digits are left of three
    assert found["OmniKV w0"]["digit_kernel"] == 2 * 3


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits_launch_what_floats_launch(weights, found):
    """One product a matrix, nothing that dequantises or adds beside it."""
    by, floats = launches(*STEPS["OmniKV w0"], weights=weights), found["OmniKV w0"]
    assert by.pop("few_bits_kernel") == floats["product_kernel"] and "product_kernel" not in by
    assert by == Counter({name: n for name, n in floats.items() if name != "product_kernel"})


def test_the_plain_form_launches_no_more_than_it_did():
    """torch's operators and merges of their own, which run if the self-test fails."""
    by = launches(*STEPS["w1, host tier"], step="plain")
    assert by.total() <= 535 and by["merge_kernel"] == 40 and by["store_kernel"] == 32
    # both halves of a layer
    assert by["before"] and by["after"] and by["mm"]


def test_a_token_that_nobody_waits_for_costs_three_launches():
    """Choose, copy, count up; where the host reads it first, it is eight."""
    assert token_launches(ahead=True) == {"max": 1, "copy_": 1, "fill_": 1}
    assert token_launches(ahead=False).total() <= 8


def test_a_delta_net_is_one_launch_between_its_products():
    """The 18 of Qwen3.5's shape, beside 6 layers that attend; torch's operators are uncompiled."""
    record = recurrent_launches("qwen3.5")
    assert record.by["net_step_kernel"] == 18 and record.by["dense_kernel"] == 6
    assert record.by.total() <= 969 and not record.reads
    assert not {"softplus", "bmm", "index_put_"} & record.by.keys()


def test_mamba_2_launches_no_more_than_it_did():
    """36 layers, whose steps are torch's operators but for the convolution."""
    record = recurrent_launches("granite 4")
    assert record.by["conv_kernel"] == 36 and record.by["dense_kernel"] == 4
    assert record.by.total() <= 3543 and not record.reads


@pytest.mark.parametrize("name", ["quest", "delta", "less_is_more", "oracle_topk", "sparq"])
def test_a_method_that_chooses_waits_for_the_device_once_a_step(name):
    """For the lengths: not once more in each layer that chooses."""
    record = choosing_launches(name, layers=6)
    assert record.by["sparse_kernel"] > 1 and record.by["product_kernel"] == 4 * 6 + 1
    assert record.reads.total() <= 1
