"""Choices by an index of K, and tokens put into one: in C++ and by torch's operators.

Stops: a channel or a code of another head, rows read past the tokens (they hold NaN, or a code that
has no entry), equal scores that differ where a vector ends, a tie that the higher token wins, a
token before the first that competes, weights that vanish, a token that overwrites its neighbour.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.attention.sparse import decode_sparse
from kernels.index import choose, learn, step
from kernels.index.choose import choose_by_channels, choose_by_codes
from kernels.index.indexes import Channels, Codes, Ends
from kernels.index.step import BoundLayer, Now
from kernels.launch.softmax import Softmax
from kernels.native.library import missing
from kernels.select.topk import select_topk_ref

NATIVE = pytest.param("auto", marks=pytest.mark.skipif(bool(missing()), reason=missing()))
TOKENS = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 257, 4097])
GROUPS = st.sampled_from([1, 2, 3, 4, 8])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
WHOLE = st.booleans()  # small whole numbers: no sum is rounded, and many are equal
BATCH = 2
ALL = pytest.mark.parametrize("backend", [NATIVE, "cpu", "reference"])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for binding in (choose.BINDING, learn.BINDING, step.BINDING):
        assert bool(missing()) or binding.usable(), binding.fault


def some(generator, whole, *shape):
    if whole:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


def places(lists, tokens, stop, room, most):
    """(scores, choice, ends) of so many lists, what nobody writes being 7."""
    ends = Ends(*(torch.full((lists,), n, dtype=torch.int32) for n in (stop, room, 7)))
    return torch.full((lists, tokens), 7.0), torch.full((lists, most), 7).int(), ends


def assert_chosen(index, ends):
    """What was chosen is the top of the scores that were left, to the token."""
    expected, counts = torch.empty_like(index.chosen), torch.empty_like(ends.counts)
    first = torch.zeros_like(ends.stop)
    select_topk_ref(index.scores, first, ends.stop, ends.room, expected, counts)
    assert torch.equal(index.chosen, expected) and torch.equal(ends.counts, counts)


def reduced(scores, how):
    """Of float64 [B, Hkv, G, n]: [lists, n]."""
    if how == "none":
        return scores.flatten(0, 2)
    found = {"max": scores.amax(2), "mean": scores.mean(2), "sum": scores.sum(2)}[how]
    return found.flatten(0, 1)


@ALL
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2]),
    GROUPS,
    TOKENS,
    st.sampled_from(["max", "mean", "sum"]),
    st.sampled_from([1, 5, 16, 24]),
    DTYPES,
    WHOLE,
)
def test_the_largest_channels_choose_as_in_float64(
    backend, heads, group, tokens, how, r, dtype, whole
):
    generator = torch.Generator().manual_seed(tokens + r)
    rows = some(generator, whole, BATCH, heads, 24, tokens + 5).to(dtype)
    rows[..., tokens:] = math.nan
    q = some(generator, whole, BATCH, heads * group, 24)
    if whole:  # all channels of a query are of one size, whose root is exact: ties everywhere
        q = q.sign() + (q == 0)
    newest, lists = 3, BATCH * heads
    scores, chosen, ends = places(lists, tokens + 5, max(0, tokens - newest), 9, 11)
    logits, weights = (
        torch.full((BATCH, heads * group, tokens + 5), 7.0),
        torch.zeros(BATCH, heads * group),
    )
    index = Channels(scores, chosen, how, 0.25, logits, rows=rows, r=r, weights=weights)
    choose_by_channels(index, q, [tokens] * BATCH, ends, newest, backend)
    asked = q.double().view(BATCH, heads, group, 24)
    order = asked.abs().sum(2).sort(dim=-1, descending=True, stable=True).indices[..., :r]
    few = asked.gather(3, order.unsqueeze(2).expand(-1, -1, group, -1))
    cover = few.abs().sum(-1, keepdim=True) / asked.abs().sum(-1, keepdim=True)
    own = rows.double().gather(2, order.unsqueeze(3).expand(-1, -1, -1, tokens + 5))[..., :tokens]
    exact = few @ own * 0.25 / cover.clamp(min=1e-30).sqrt()
    torch.testing.assert_close(
        logits[..., :tokens], exact.flatten(1, 2).float(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        scores[:, :tokens], reduced(exact, how).float(), atol=2e-5, rtol=1e-5
    )
    assert (scores[:, tokens:] == 7).all() and (logits[..., tokens:] == 7).all()
    assert_chosen(index, ends)
    shares = exact.softmax(-1)
    for h, own in enumerate(chosen.view(BATCH, heads, -1).flatten(0, 1)):
        b, h = divmod(h, heads)
        read = [*own[own >= 0].tolist(), *range(max(0, tokens - newest), tokens)]
        mass = shares[b, h][:, read].sum(-1).float()
        torch.testing.assert_close(
            weights.view(BATCH, heads, group)[b, h], mass, atol=1e-5, rtol=1e-4
        )


@ALL
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2]),
    GROUPS,
    TOKENS,
    st.sampled_from(["none", "max", "sum"]),
    DTYPES,
    WHOLE,
)
def test_labels_choose_as_in_float64(backend, heads, group, tokens, how, dtype, whole):
    generator = torch.Generator().manual_seed(tokens)
    rows = some(generator, whole, BATCH, heads, 3, tokens + 5).to(dtype)
    rows[..., tokens:] = math.nan
    q, labels = (
        some(generator, whole, BATCH, heads * group, 24),
        torch.tensor([[5, 0, 23], [1, 2, 9]]),
    )
    labels, lists = labels[:heads], BATCH * heads * (group if how == "none" else 1)
    scores, chosen, ends = places(lists, tokens + 5, tokens, 9, 11)
    logits = None if how == "none" else torch.zeros(BATCH, heads * group, tokens + 5)
    index = Channels(scores, chosen, how, 1.0, logits, rows=rows, channels=labels)
    choose_by_channels(index, q, [tokens] * BATCH, ends, backend=backend)
    asked = q.double().view(BATCH, heads, group, 24)
    few = asked.gather(3, labels[None, :, None].expand(BATCH, -1, group, -1))
    expected = reduced(few @ rows[..., :tokens].double(), how)
    torch.testing.assert_close(scores[:, :tokens].double(), expected, atol=1e-5, rtol=1e-5)
    if whole:
        assert torch.equal(scores[:, :tokens].double(), expected)
    assert_chosen(index, ends)


@ALL
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2]),
    GROUPS,
    TOKENS,
    st.sampled_from([1, 2, 8]),
    st.sampled_from([(torch.uint8, 64), (torch.uint8, 200), (torch.int32, 33)]),
    DTYPES,
    st.sampled_from(["clusters", "weights", "far"]),
)
@example(1, 2, 1, 2, (torch.uint8, 64), torch.float32, "weights")  # fewer than the first
def test_codes_choose_as_in_float64(backend, heads, group, tokens, parts, kind, dtype, rank):
    """By weights; by weights of tables none of whose largest entries has a token; by clusters."""
    generator, first, (code, count) = torch.Generator().manual_seed(tokens + parts), 5, kind
    parts, how = (1, "max") if rank == "clusters" else (parts, "sum")
    codes = torch.randint(count - 1, (BATCH, heads, parts, tokens + 9), generator=generator)
    codes[..., tokens:] = 255
    codes, q = codes.to(code), torch.randn(BATCH, heads * group, 24, generator=generator)
    centroids = torch.randn(BATCH, heads, parts, count, 24 // parts, generator=generator)
    if rank == "far":  # the last entry, which no token has, is beyond what a float holds beside it
        of_head = q.view(BATCH, heads, group, parts, -1)[:, :, 0].sign()
        centroids[:, :, :, -1] = 60 * of_head
    centroids = centroids.to(dtype)
    room = 9 + first
    scores, chosen, ends = places(BATCH * heads, max(first, tokens) + 5, tokens, room, room + 2)
    logits = None if rank == "clusters" else torch.zeros(BATCH, heads * group, tokens + 9)
    given_ = dict(codes=codes, centroids=centroids, first=first)
    index = Codes(scores, chosen, how, 0.25, logits, **given_)
    choose_by_codes(index, q, [tokens] * BATCH, ends, backend=backend)
    assert (scores[:, :first] == math.inf).all() and (scores[:, max(first, tokens) :] == 7).all()
    asked = q.double().view(BATCH, heads, group, parts, -1).transpose(2, 3)
    table = asked @ centroids.double().mT * 0.25
    some = codes[..., first:tokens].long().unsqueeze(3).expand(-1, -1, -1, group, -1)
    exact = table.gather(4, some).sum(2)
    exact = reduced(exact if rank == "clusters" else exact.softmax(-1), how).float()
    between = scores[:, first : max(first, tokens)]
    torch.testing.assert_close(between, exact, atol=1e-6, rtol=2e-4)
    assert_chosen(index, ends)
    if backend != "auto":  # torch's softmax rounds the end of a row otherwise than its middle
        return
    for b, own in enumerate(codes[..., first:tokens].flatten(0, 1)):  # equal codes, equal scores
        for t in range(own.shape[1] - 1, max(0, own.shape[1] - 20), -1):
            same = (own == own[:, t : t + 1]).all(0)
            assert len(between[b][same].unique()) == 1


@pytest.mark.parametrize("backend", [NATIVE])
def test_results_do_not_depend_on_threads(backend):
    generator, before, found = torch.Generator().manual_seed(3), torch.get_num_threads(), []
    rows, q = (torch.randn(1, *n, generator=generator) for n in ((2, 16, 9000), (4, 16)))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            scores, chosen, ends = places(2, 9000, 8990, 300, 300)
            logits, weights = torch.empty(1, 4, 9000), torch.empty(1, 4)
            index = Channels(scores, chosen, "sum", 1.0, logits, rows=rows, r=5, weights=weights)
            choose_by_channels(index, q, [9000], ends, 10, backend)
            found.append((scores, chosen, weights))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*both) for both in zip(*found))


@pytest.mark.parametrize("backend", [NATIVE, "cpu"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(DTYPES, st.sampled_from([1, 2, 4]), st.sampled_from([8, 24]), st.integers(0, 69), WHOLE)
def test_a_token_changes_its_place_and_no_other(backend, dtype, parts, dim, token, whole):
    generator = torch.Generator().manual_seed(token)
    k = some(generator, whole, 2, 70, dim).to(dtype)
    one, channels = k[:, token : token + 1], torch.stack([torch.arange(dim - 5, dim)] * 2)
    for few in (None, channels):
        rows = torch.full((2, dim if few is None else 5, 70), 7.0, dtype=dtype)
        learn.learn_channels(rows, token, one, few, backend)
        expected = torch.full_like(rows, 7.0)
        expected[:, :, token] = one[:, 0] if few is None else one[:, 0, dim - 5 :]
        assert torch.equal(rows, expected)
    codes = torch.full((2, parts, 70), 9, dtype=torch.uint8)
    centroids = some(generator, whole, 2, parts, 17, dim // parts)
    if not learn.learn_code(codes, token, one, centroids, backend):
        assert backend == "cpu" and (codes == 9).all()
        return
    near = torch.cdist(one.double().view(2, parts, 1, -1), centroids.double()).square().squeeze(2)
    if not whole:
        assert torch.equal(codes[:, :, token].long(), near.argmin(-1))
    best = near.gather(2, codes[:, :, token : token + 1].long())
    torch.testing.assert_close(best, near.amin(-1, keepdim=True))
    if whole:  # the first of equal ones
        assert torch.equal(codes[:, :, token].long(), (near < best + 1e-9).int().argmax(-1))
    codes[:, :, token] = 9
    assert (codes == 9).all()


@pytest.mark.parametrize("backend", [NATIVE])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 257]),
    DTYPES,
    st.sampled_from(["channels", "labels", "codes"]),
    st.sampled_from([0.0, 20.0]),
    st.booleans(),
)
def test_a_step_in_one_call_is_a_launcher_each(
    backend, heads, group, tokens, dtype, by, cap, learns
):
    """To the bit, from rows of NaN beside those that count, into what a call each fills as well."""
    generator, newest, room = torch.Generator().manual_seed(tokens), min(3, tokens), 9
    k, v = torch.randn(2, 1, heads, tokens + 5, 32, generator=generator).to(dtype)
    k[:, :, tokens:] = v[:, :, tokens:] = math.nan
    q = torch.randn(1, 1, heads * group, 32, generator=generator).to(dtype)
    labels = torch.stack([torch.randperm(32, generator=generator)[:5] for _ in range(heads)])
    held = (
        k.mT.contiguous()
        if by == "channels"
        else k.mT.gather(2, labels[None, ..., None].expand(1, -1, -1, tokens + 5)).contiguous()
    )
    codes = torch.randint(20, (1, heads, 2, tokens + 5), generator=generator).to(torch.uint8)
    centroids = torch.randn(1, heads, 2, 20, 16, generator=generator)
    newest = 0 if by == "labels" else newest
    lists, start = heads * (group if by == "labels" else 1), tokens - newest
    softmax, found = Softmax(cap), []
    for bound in (True, False):
        mine, own = held.clone(), codes.clone()
        if learns:  # the newest token is not in the index yet
            mine[..., tokens - 1], own[..., tokens - 1] = math.nan, 255
        scores, chosen, ends = places(lists, tokens + 5, start, room, room)
        logits, weights = torch.empty(1, heads * group, tokens + 5), torch.empty(1, heads * group)
        if by == "channels":
            given_ = "sum", 0.2, logits
            index = Channels(scores, chosen, *given_, rows=mine, r=7, weights=weights)
            call = "channels", learn.told_channels(mine[0], k[0])
        elif by == "labels":
            index = Channels(scores, chosen, "none", rows=mine, channels=labels)
            call = "channels", learn.told_channels(mine[0], k[0], labels)
        else:
            index = Codes(scores, chosen, "sum", 0.2, logits, codes=own, centroids=centroids)
            call = "code", learn.told_code(own[0], k[0], centroids[0])
        if bound:
            layer = BoundLayer(index, q, k, v, ends.counts, 0.2, softmax, [call])
            now = Now(tokens, start if by == "codes" else tokens, start, *ends[:2], newest, 20)
            out = layer.run(q, now, learns)
        else:
            one = k[0, :, tokens - 1 : tokens]
            if learns and by == "codes":
                assert learn.learn_code(own[0], tokens - 1, one, centroids[0], backend)
            elif learns:
                few = labels if by == "labels" else None
                learn.learn_channels(mine[0], tokens - 1, one, few, backend)
            if by == "codes":
                choose_by_codes(index, q[0], [start], ends, backend=backend)
            else:
                choose_by_channels(index, q[0], [tokens], ends, newest, backend)
            out = torch.empty_like(q)
            for h in range(heads * group if by == "labels" else 1):
                some = slice(h, h + 1) if by == "labels" else slice(None)
                of = slice(h // group, h // group + 1) if by == "labels" else slice(None)
                rows = k[:, of], v[:, of], chosen[None, some].clamp(min=0), ends.counts[some][:1]
                edges = torch.tensor([start]).int(), torch.tensor([tokens]).int()
                out[:, :, some] = decode_sparse(q[:, :, some], *rows, *edges, 0.2, softmax=softmax)
        found.append((out, mine, own, chosen, ends.counts, scores[:, :start]))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    assert found[0][0].isfinite().all()
