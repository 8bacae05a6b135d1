"""Logits by an index of K, natively and by torch's operators.

Stops: a channel or a code of another head, rows read past the tokens (they hold NaN, or a code that
has no entry), a tail of tokens that no vector holds, parts of a key that are not added up.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native.library import missing
from kernels.select import index_logits
from kernels.select.index_logits import channel_logits, code_logits

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TOKENS = [1, 15, 16, 17, 63, 64, 65, 257, 4095, 4097, 8191]
GROUPS = [1, 2, 3, 4, 8]
BACKENDS = ["auto", "cpu", "reference"]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert index_logits._BINDING.usable(), index_logits._BINDING.fault


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from(GROUPS),
    r=st.sampled_from([1, 3, 16]),
    tokens=st.sampled_from(TOKENS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    backend=st.sampled_from(BACKENDS),
)
def test_channels_against_float64(heads, group, r, tokens, dtype, backend):
    generator = torch.Generator().manual_seed(tokens + r)
    keys = torch.randn(heads, 24, tokens + 5, generator=generator).to(dtype)
    keys[:, :, tokens:] = math.nan
    channels = torch.stack([torch.randperm(24, generator=generator)[:r] for _ in range(heads)])
    few = torch.randn(heads, group, r, generator=generator)
    room = torch.full((heads, group, tokens + 3), 7.0)
    channel_logits(few, channels, keys, room[:, :, :tokens], backend)
    own = keys.double().gather(1, channels[:, :, None].expand(-1, -1, tokens + 5))[:, :, :tokens]
    torch.testing.assert_close(room[:, :, :tokens], (few.double() @ own).float())
    assert (room[:, :, tokens:] == 7).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from(GROUPS),
    parts=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from(TOKENS),
    dtype=st.sampled_from([torch.uint8, torch.int32]),
    backend=st.sampled_from(BACKENDS),
)
def test_codes_against_float64(heads, group, parts, tokens, dtype, backend):
    generator = torch.Generator().manual_seed(tokens + parts)
    table = torch.randn(heads, parts, group, 64, generator=generator)
    codes = torch.randint(64, (heads, parts, tokens + 9), generator=generator).to(dtype)
    codes[:, :, tokens:] = 255
    room = torch.full((heads, group, tokens + 3), 7.0)
    begun = codes[:, :, 4:] if tokens > 4 else codes  # from a token on, as behind the first ones
    n = min(tokens, begun.shape[2] - 9)
    code_logits(table, begun, room[:, :, :n], backend)
    expected = torch.zeros(heads, group, n, dtype=torch.float64)
    for h in range(heads):
        for p in range(parts):
            expected[h] += table[h, p].double()[:, begun[h, p, :n].long()]
    torch.testing.assert_close(room[:, :, :n], expected.float())
    assert (room[:, :, n:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_have_no_logits(backend):
    """As before a first cluster: neither codes nor tables."""
    room = torch.full((2, 1, 4), 7.0)
    nothing = room[:, :, :0]
    code_logits(torch.empty(2, 1, 1, 0), torch.empty(2, 1, 0, dtype=torch.int32), nothing, backend)
    channels = torch.zeros(2, 3, dtype=torch.int64)
    channel_logits(torch.ones(2, 1, 3), channels, torch.empty(2, 8, 0), nothing, backend)
    assert (room == 7).all()


def test_results_do_not_depend_on_threads():
    generator, before, found = torch.Generator().manual_seed(3), torch.get_num_threads(), []
    keys, few = torch.randn(2, 16, 9000, generator=generator), torch.randn(2, 2, 5)
    channels = torch.arange(10).view(2, 5)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(torch.empty(2, 2, 9000))
            channel_logits(few, channels, keys, found[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
