"""Tokens that heads name in turns: token by token, in C++ and by torch's operators.

Stops: a token that counts twice, heads in another order, a tie that the higher token wins, tokens
before the first or from `stop` on that are named, a list that is one short.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native.library import missing
from kernels.select import turns
from kernels.select.turns import name_in_turns

NATIVE = pytest.param("auto", marks=pytest.mark.skipif(bool(missing()), reason=missing()))


def simulate(logits, first, stop, count):
    """The rule as it is said."""
    ranks = [sorted(range(first, stop), key=lambda t, own=own: (-own[t], t)) for own in logits]
    named = []
    for place in range(stop - first):
        for own in ranks:
            if own[place] not in named and len(named) < count:
                named.append(own[place])
    return [*range(first), *sorted(named)]


@pytest.mark.parametrize("backend", [NATIVE, "cpu", "reference"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 4, 9]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([4, 5, 63, 64, 65, 97, 128]),
    st.sampled_from([1, 3, 16, 40]),
    st.booleans(),
)
def test_it_is_the_rule(backend, heads, first, stop, count, ties):
    if backend == "auto":
        assert turns.BINDING.usable(), turns.BINDING.fault
    generator = torch.Generator().manual_seed(stop + count)
    logits = torch.randn(heads, stop + 3, generator=generator)
    logits = logits.mul_(2).round_() if ties else logits  # -0 among them
    logits[:, stop:] = math.inf
    logits[:, :first] = -math.inf
    out = torch.full((50,), 7, dtype=torch.int32)
    kept = name_in_turns(logits, first, stop, count, torch.empty(stop), out, backend)
    expected = simulate(logits.tolist(), first, stop, count)
    assert kept == len(expected) and out[:kept].tolist() == expected
    assert (out[kept:] == -1).all()
