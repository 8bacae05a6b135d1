"""Draws by a race of clocks: the distribution, the bits, and how often two draws agree.

Stops: clocks of neighbours that ring together, a token of probability 0, bits that depend on the
device, two close distributions that draw apart.
"""

import math

import pytest
import torch

from engine import SamplingParams
from engine.sampling.exponential_race import NUMBERS, arrival_times, draw
from engine.sampling.sampler import Sampler

WORD = 1 << 64


def by_hand(token, number):
    """A clock in Python's integers: SplitMix64 of number + id steps, 52 of its bits."""
    z = (token * 0x9E3779B97F4A7C15 + number) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    z ^= z >> 31
    return -math.log(((z >> 12) + 0.5) / 2**52)


def test_the_bits_are_those_of_splitmix64():
    """By hand; the generator's published first value (seed 0) is that of token 1, number 0."""
    z = 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    assert z ^ (z >> 31) == 0xE220A8397B1DCDAF
    ids = torch.tensor([0, 1, 2, 5, 127, 128255])
    for number in (0, 1, 12345, NUMBERS - 1):
        want = torch.tensor([by_hand(i, number) for i in ids.tolist()], dtype=torch.float64)
        torch.testing.assert_close(arrival_times(ids, number), want, rtol=1e-13, atol=1e-15)


def test_clocks_are_exponential_and_neighbours_independent():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(NUMBERS, (40,), generator=generator).tolist()
    rung = torch.stack([arrival_times(torch.arange(2000), number) for number in numbers])
    assert float(rung.min()) > 0
    uniform = (-rung).exp().flatten()
    steps = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    shares = (uniform[:, None] < steps).double().mean(0)
    assert float((shares - steps).abs().max()) < 5 * 0.5 / len(uniform) ** 0.5
    for one, other in ((rung[:, 1:], rung[:, :-1]), (rung[1:], rung[:-1])):
        both = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(both)) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.02}])
def test_draws_follow_the_distribution(settings):
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(SamplingParams(temperature=0.9, seed=5, **settings), 40)
    expected, draws = sampler.probabilities(logits).double(), 3000
    found = torch.bincount(
        torch.tensor([sampler.sample(logits)[0] for _ in range(draws)]), minlength=40
    )
    assert found[expected == 0].sum() == 0
    large = expected * draws > 5
    statistic = ((found - expected * draws) ** 2 / (expected * draws))[large].sum()
    freedom = int(large.sum()) - 1
    assert abs(float(statistic) - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("far", [0.02, 0.3])
def test_two_draws_by_the_same_number_agree_as_often_as_promised(far):
    """At least (1 - d) / (1 + d) at a distance of d; cumulative sums do far worse where a small
    difference shifts them.
    """
    generator = torch.Generator().manual_seed(3)
    one = torch.softmax(torch.randn(500, generator=generator), 0)
    other = torch.softmax(one.log() + far * torch.randn(500, generator=generator), 0)
    distance = float((one - other).abs().sum()) / 2
    ids, draws, same = torch.arange(500), 1500, 0
    for number in torch.randint(NUMBERS, (draws,), generator=generator).tolist():
        same += int(draw(one, ids, number)) == int(draw(other, ids, number))
    promised = (1 - distance) / (1 + distance)
    assert same / draws > promised - 4 * 0.5 / draws**0.5
    ends = torch.stack([one, other]).double().cumsum(1)
    apart = ends - torch.stack([one, other])
    number = (ends.amin(0) - apart.amax(0)).clamp(min=0).sum()
    assert same / draws > number
