"""Weights of logits with noise and a temperature: C++ against float64, and its random bits against
Keyformer's own in torch, to the last one.

Stops: bits that depend on how many rows there are or where a vector ends, logarithms that are wrong
at either end of 0 .. 1, sinks that tau does not divide, positions read behind the last.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.methods.evict.keyformer import bits, first_of, gumbel
from kernels.kept import noisy
from kernels.kept.noisy import (
    Draw,
    noise_bits,
    noise_bits_ref,
    noise_of,
    weigh_noisy,
    weigh_noisy_ref,
    weighs_noisy,
)
from kernels.native.library import missing
from tests.kernels.support.kernel_checks import assert_scores

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
ROWS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 257, 1021]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert weighs_noisy("auto", torch.device("cpu")), noisy._BINDING.fault
    assert not weighs_noisy("cpu", torch.device("cpu"))
    assert not weighs_noisy("auto", torch.device("meta"))


def a_query(heads, group, rows, seed=0):
    """Logits, a store's positions with rows behind those that count, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(heads, group, 1, rows, generator=generator)
    positions = torch.randint(0, 2**31 - 1, (heads, rows + 5), generator=generator).int()
    return logits, positions, 3 * torch.randn(heads * group, generator=generator)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    rows=st.sampled_from(ROWS),
    tau=st.sampled_from([0.03, 1.0, 1.37, 20.0]),
    noise=st.booleans(),
    sunk=st.booleans(),
    seed=st.integers(0, 2**40),
    query=st.integers(0, 2**31 - 1),
)
def test_against_float64(heads, group, rows, tau, noise, sunk, seed, query):
    logits, positions, sinks = a_query(heads, group, rows, seed % 1000)
    draw = Draw(first_of(seed, 5), query)
    numbers = torch.arange(heads * group).view(heads, group)
    drawn = bits(seed, 5, numbers, torch.tensor([query]), positions[:, :rows].long())
    assert torch.equal(noise_bits(logits.shape, positions, draw).long(), drawn)
    sinks = sinks if sunk else None
    given = (drawn, torch.float64) if noise else None
    exact = weigh_noisy_ref(logits.double(), given and noise_of(*given), tau, sinks)
    plain = weigh_noisy_ref(logits, noise_of(drawn) if noise else None, tau, sinks)
    found = weigh_noisy(logits.clone(), positions, draw if noise else None, tau, sinks)
    assert found.shape == (heads, group, rows)
    # a logit's own rounding, which the exponential makes one of the weight
    bound = 2 * 2.0**-24 * float((logits.abs().max() + 17) / tau) * exact
    error = ((found.double() - exact).abs() - bound - 4e-6 * exact).max()
    assert error <= 2 * (plain.double() - exact).abs().max()
    assert_scores(found, exact, plain, "weights") if tau >= 1 else None


@pytest.mark.parametrize("rows", [1, 16, 257])
def test_bits_are_those_of_plain_numbers_and_noise_is_keyformers(rows):
    logits, positions, _ = a_query(2, 4, rows)
    draw = Draw(first_of(2**63, 31), 2**31 - 1)
    found = noise_bits(logits.shape, positions, draw)
    assert torch.equal(found, noise_bits_ref(logits.shape, positions, draw))
    at, numbers = torch.tensor([2**31 - 1]), torch.arange(8).view(2, 4)
    assert torch.equal(noise_of(found), gumbel(2**63, 31, numbers, at, positions[:, :rows].long()))
    other = noise_bits(logits.shape, positions, Draw(draw.base, draw.query - 1))
    assert (other != found).any()


def test_noise_itself_at_both_ends_and_everywhere_between():
    """Of two rows with logits of 0 the weights' odds are the noises' difference: every number of
    4,000 draws is seen within a few roundings.
    """
    positions = torch.arange(4000).int()[None]
    draw = Draw(first_of(0, 0), 77)
    found = weigh_noisy(torch.zeros(1, 1, 1, 4000), positions, draw, 1.0).double().log()
    noise = noise_of(noise_bits((1, 1, 1, 4000), positions, draw), torch.float64)
    assert noise.max() > 7 and noise.min() < -2
    expected = noise.log_softmax(-1)[0, 0]
    torch.testing.assert_close(found[0, 0], expected[0], atol=2e-6, rtol=0)


def test_nothing_seen_weighs_nothing_and_what_is_not_a_number_shows():
    logits, positions, sinks = a_query(1, 2, 37)
    logits[0, 0, 0, ::2] = -math.inf
    draw = Draw(3, 4)
    found = weigh_noisy(logits.clone(), positions, draw, 2.0, sinks)
    assert not found[0, 0, ::2].any() and found.isfinite().all()
    logits[0, 1, 0, 36] = math.nan
    found = weigh_noisy(logits, positions, draw, 2.0)
    assert found[0, 1].isnan().all() and found[0, 0].isfinite().all()


def test_results_do_not_depend_on_threads():
    logits, positions, sinks = a_query(3, 4, 700)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(weigh_noisy(logits.clone(), positions, Draw(1, 2), 1.1, sinks))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
