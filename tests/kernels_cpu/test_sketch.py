"""Signs, landmarks and low ranks in place of K, natively and by torch's operators.

Stops: codes of another head or table, tokens past the last (their codes agree, their rows hold
NaN), counts past a byte's half, a row weighed by another's chance, first rows weighed at all, a
chunk set aside that competes, a key turned by another's angle or made of another head's basis, a
value of a row beside.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.library import missing
from kernels.sketch import agreement as signs
from kernels.sketch import channel_bounds as by_channel
from kernels.sketch import codes as far_codes
from kernels.sketch import drawn as draw
from kernels.sketch import guesses as guess
from kernels.sketch import rebuilt as rebuild
from kernels.sketch import shares as share
from kernels.sketch.agreement import agreement
from kernels.sketch.channel_bounds import channel_bounds
from kernels.sketch.drawn import Draws, attend_drawn, attend_drawn_ref
from kernels.sketch.rebuilt import LowRank, Rows, attend_rebuilt, attend_rebuilt_ref, rebuilds
from kernels.sketch.shares import HOW, landmark_shares, landmark_shares_ref
from tests.kernels.support.kernel_checks import ORDERS, assert_close, worst

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, GROUPS, DIMS = st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 4, 8]), [16, 64, 80]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    for module in (signs, draw, share, rebuild, guess, by_channel, far_codes):
        assert module._BINDING.usable(), module._BINDING.fault
    assert not rebuilds("cpu", torch.float32, torch.float32, 64, "cpu")
    assert not rebuilds("auto", torch.float32, torch.int8, 64, "cpu")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    tables=st.sampled_from([1, 2, 3, 4, 5, 150, 255]),
    tokens=st.sampled_from([0, 1, 31, 32, 33, 1023, 1024, 1025, 2099]),
    backend=st.sampled_from(["auto", "cpu", "reference"]),
)
def test_tables_in_which_signs_agree(heads, group, tables, tokens, backend):
    generator = torch.Generator().manual_seed(tables + tokens)
    codes = torch.randint(-3, 3, (heads, tables, tokens + 40), generator=generator).short()
    asked = torch.randint(-3, 3, (heads, group, tables), generator=generator).short()
    codes[:, :, tokens // 2 : tokens // 2 + 1] = asked[:, 0].unsqueeze(2)  # all of them
    codes[:, :, tokens:] = asked[:, -1].unsqueeze(2)
    agreed = torch.full((heads, group, tokens + 3), 77, dtype=torch.uint8)
    most = torch.full((heads, tokens + 5), 7.0)
    begun = codes[:, :, 1:] if tokens else codes
    given = asked, begun, agreed[:, :, :tokens], most[:, :tokens], 2, backend
    found = agreement(*given)
    expected = torch.tensor([[[0] * tokens] * group] * heads)
    for table in range(tables):
        same = begun[:, None, table, :tokens].int() == asked[:, :, table, None].int()
        expected += same.int()
    assert torch.equal(agreed[:, :, :tokens].long(), expected.view(heads, group, tokens))
    assert (agreed[:, :, tokens:] == 77).all() and (most[:, tokens:] == 7).all()
    if tokens:
        assert torch.equal(most[:, :tokens].long(), expected.amax(1))
        assert found.tolist() == (expected.amax(1) >= 2).sum(1).tolist()
        assert tokens < 3 or tables < 2 or expected.max() == tables


def some_draws(heads, group, dim, listed, newest, dtype, seed=0):
    """Lists of heads that differ in length, in rows of which all others are NaN."""
    generator = torch.Generator().manual_seed(seed)
    n = 2 * listed + newest + 3
    q = torch.randn(1, heads * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, heads, n, dim, generator=generator).to(dtype)
    own = [torch.randperm(2 * listed, generator=generator)[:listed].sort() for _ in range(heads)]
    index = torch.stack([rows.values for rows in own]).int()
    counts = torch.tensor([listed - (head if listed > head else 0) for head in range(heads)]).int()
    drawn = torch.rand(heads, group, listed + 2, generator=generator) < 0.6
    means = torch.randn(heads, dim, generator=generator) / 3
    first = 2 * listed + 1
    for head, (rows, count) in enumerate(zip(index.long(), counts.tolist())):
        unread = torch.ones(n, dtype=torch.bool)
        unread[rows[:count]], unread[first : first + newest] = False, False
        k[head, unread] = v[head, unread] = math.nan
    return q, k, v, Draws(index, counts, drawn, means, 4, 10, 150), first, first + newest


def near(found, exact, rough, dtype, what):
    """At most twice plain torch's, of which the worst of some orders."""
    assert_close(found, exact, worst(exact, rough), dtype, what)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    dim=st.sampled_from(DIMS),
    listed=st.sampled_from([0, 1, 4, 5, 16, 255, 256, 257, 523]),
    newest=st.sampled_from([1, 17, 255, 257]),
    dtype=st.sampled_from(DTYPES),
)
def test_drawn_rows_against_float64(heads, group, dim, listed, newest, dtype):
    q, k, v, draws, *ends = some_draws(heads, group, dim, listed, newest, dtype, listed + newest)
    found = attend_drawn(q, k, v, draws, *ends, dim**-0.5)
    wide = replace(draws, means=draws.means.double())
    exact = attend_drawn_ref(q.double(), k.double(), v.double(), wide, *ends, dim**-0.5)
    rough = []
    for shift in range(ORDERS):
        order = torch.arange(dim).roll(shift)
        turned = replace(draws, means=draws.means[:, order])
        given = q[..., order], k[..., order], v, turned, *ends, dim**-0.5
        rough.append(attend_drawn_ref(*given))
    near(found, exact, rough, dtype, "out")


def test_what_is_drawn_with_certainty_weighs_as_it_is():
    q, k, v, draws, *ends = some_draws(2, 2, 64, 40, 9, torch.float32)
    every = replace(draws, drawn=torch.ones_like(draws.drawn), sink=40)
    found = attend_drawn(q, k, v, every, *ends, 0.125)
    for head in range(2):
        rows = [*draws.index[head, : int(draws.counts[head])].tolist(), *range(*ends)]
        own = q[0, 2 * head : 2 * head + 2]
        expected = (own @ k[head, rows].T * 0.125).softmax(-1) @ v[head, rows]
        torch.testing.assert_close(found[0, 2 * head : 2 * head + 2], expected)
    other = attend_drawn(q, k, v, replace(every, sink=4), *ends, 0.125)
    assert not torch.allclose(found, other, atol=1e-2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    dim=st.sampled_from(DIMS),
    chunks=st.sampled_from([1, 15, 16, 17, 255, 256, 257, 1021]),
    aside=st.sampled_from([0, 1, 48]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(HOW),
    cap=st.sampled_from([0.0, 3.0]),
)
def test_shares_of_chunks_against_float64(heads, group, dim, chunks, aside, dtype, how, cap):
    """And the chunks that they choose, but for two whose shares a rounding could swap."""
    generator = torch.Generator().manual_seed(chunks + aside)
    q = torch.randn(heads * group, dim, generator=generator).to(dtype)
    marks = torch.randn(heads, chunks + 2, dim, generator=generator).to(dtype)
    marks[:, chunks:] = math.nan
    aside = min(aside, chunks - 1)
    orders = [torch.randperm(chunks, generator=generator)[:aside] for _ in range(heads)]
    out = torch.stack(orders) if aside else torch.empty(heads, 0, dtype=torch.int64)
    room = torch.full((heads, chunks + 3), 7.0)
    given = out, room[:, :chunks], dim**-0.5, Softmax(cap), how
    landmark_shares(q, marks[:, :chunks], *given)
    exact = torch.empty(heads, chunks, dtype=torch.float64)
    wide = q.double(), marks[:, :chunks].double(), out
    landmark_shares_ref(*wide, exact, *given[2:])
    assert (room[:, chunks:] == 7).all()
    assert room[:, :chunks].isneginf().sum(1).tolist() == [aside] * heads
    rough = []
    for shift in range(ORDERS):
        order = torch.arange(dim).roll(shift)
        plain = torch.empty(heads, chunks)
        landmark_shares_ref(q[:, order], marks[:, :chunks, order], out, plain, *given[2:])
        rough.append(plain.clamp(min=0))
    near(room[:, :chunks].clamp(min=0), exact.clamp(min=0), rough, torch.float32, "shares")
    for mine, theirs in zip(room[:, :chunks], exact):
        k = max(1, (chunks - aside) // 3)
        chosen = mine.topk(k).indices.sort().values
        best = theirs.sort(descending=True)
        if k == chunks or best.values[k - 1] - best.values[k] > 1e-5 * best.values[k - 1]:
            assert torch.equal(chosen, best.indices[:k].sort().values)


def some_low_rank(heads, group, dim, sizes, dtype, in_turn, seed=0):
    """Held rows, chunks to rebuild and a tail; values that are not chosen are NaN."""
    held, rank, chunk, count, tail, pairs = sizes
    generator = torch.Generator().manual_seed(seed)
    every = 2 * count + 1
    q = torch.randn(1, heads * group, dim, generator=generator).to(dtype)
    rows = torch.randn(4, heads, held + tail, dim, generator=generator).to(dtype)
    coefficients = (torch.randn(every * chunk, rank, generator=generator) / rank**0.5).to(dtype)
    basis = torch.randn(rank, heads * dim, generator=generator)
    orders = [torch.randperm(every, generator=generator)[:count].sort() for _ in range(heads)]
    chunks = torch.stack([order.values for order in orders]).int()
    angles = torch.rand(heads, count * chunk, pairs, generator=generator) * 6
    v = torch.randn(heads, every * chunk, dim, generator=generator).to(dtype)
    for own, chosen in zip(v, chunks.tolist()):
        unread = [i for i in range(every) if i not in chosen]
        own.view(every, chunk, dim)[unread] = math.nan
    if in_turn:
        read = v.view(heads, every, chunk, dim)
        v = torch.stack([one[own.long()] for one, own in zip(read, chunks)]).flatten(1, 2)
    given = coefficients, basis, chunks, chunk, angles.cos(), angles.sin(), v, in_turn
    exact = Rows(rows[0, :, :held], rows[1, :, :held]), Rows(rows[2, :, held:], rows[3, :, held:])
    return q, exact[0], LowRank(*given), exact[1]


def widened(given):
    """Everything as float64."""
    if isinstance(given, torch.Tensor):
        return given.double() if given.is_floating_point() else given
    return type(given)(*map(widened, given)) if isinstance(given, tuple) else given


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    dim=st.sampled_from(DIMS),
    held=st.sampled_from([0, 1, 384]),
    rank=st.sampled_from([1, 7, 16, 37, 160]),
    chunk=st.sampled_from([1, 3, 7, 8, 9, 17]),
    count=st.sampled_from([0, 1, 5, 64]),
    tail=st.sampled_from([1, 32, 257]),
    dtype=st.sampled_from(DTYPES),
    in_turn=st.booleans(),
    softmax=st.sampled_from([PLAIN, Softmax(3.0)]),
)
def test_rebuilt_keys_against_float64(
    heads, group, dim, held, rank, chunk, count, tail, dtype, in_turn, softmax
):
    sizes = held, rank, chunk, count, tail, dim // 2 - (dim == 64) * 5
    given = some_low_rank(heads, group, dim, sizes, dtype, in_turn, rank + chunk)
    found = attend_rebuilt(*given, dim**-0.5, softmax)
    q, exact, low, newest = given
    wide = [q.double(), *(Rows(*map(torch.Tensor.double, part)) for part in (exact, newest))]
    as_wide = LowRank(*(widened(part) for part in low))
    oracle = attend_rebuilt_ref(wide[0], wide[1], as_wide, wide[2], dim**-0.5, softmax)
    rough = []
    for shift in range(ORDERS):
        order = torch.arange(rank).roll(shift)
        mine = low._replace(coefficients=low.coefficients[:, order], basis=low.basis[order])
        rough.append(attend_rebuilt_ref(q, exact, mine, newest, dim**-0.5, softmax))
    near(found, oracle, rough, dtype, "out")


def test_a_whole_rank_that_does_not_turn_gives_back_the_keys():
    """And sinks join; the keys are of float32's rounding."""
    q, held, low, tail = some_low_rank(2, 2, 64, (5, 128, 8, 6, 9, 32), torch.float32, False)
    keys = torch.randn(2, len(low.coefficients), 64, generator=torch.Generator().manual_seed(3))
    basis = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(4)))[0]
    low = low._replace(
        coefficients=keys.transpose(0, 1).flatten(1) @ basis.T,
        basis=basis.contiguous(),
        cos=torch.ones_like(low.cos),
        sin=torch.zeros_like(low.sin),
    )
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    found = attend_rebuilt(q, held, low, tail, 0.125, Softmax(0.0, sinks))
    for head in range(2):
        tokens = (low.chunks[head].long().unsqueeze(1) * 8 + torch.arange(8)).flatten()
        k = torch.cat([held.k[head], keys[head, tokens], tail.k[head]])
        v = torch.cat([held.v[head], low.v[head, tokens], tail.v[head]])
        logits = torch.cat(
            [q[0, 2 * head : 2 * head + 2] @ k.T * 0.125, sinks.view(2, 2, 1)[head]], 1
        )
        expected = logits.softmax(-1)[:, :-1] @ v
        torch.testing.assert_close(
            found[0, 2 * head : 2 * head + 2], expected, atol=1e-4, rtol=1e-4
        )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    columns=st.sampled_from([1, 8, 15, 16, 17, 19, 32]),
    tokens=st.sampled_from([0, 1, 15, 16, 17, 255, 1021, 4097]),
    room=st.sampled_from([1, 9, 60]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(guess.HOW),
    native=st.booleans(),
)
def test_guesses_against_float64(heads, group, columns, tokens, room, dtype, how, native):
    """How many are near a head's largest, but for those that a rounding moves, and which they
    are.
    """
    generator, dim = torch.Generator().manual_seed(columns + tokens), 32
    skew = torch.randn(heads, dim, columns, generator=generator) / dim**0.5
    q = torch.randn(2, heads * group, dim, generator=generator).to(dtype)
    held = torch.full((2, heads, columns, tokens + 2), math.nan, dtype=dtype)
    held[..., :tokens] = torch.randn(2, heads, columns, tokens, generator=generator).to(dtype)
    logits, scores = (torch.full((2 * n, tokens + 3), 7.0) for n in (heads * group, heads))
    chosen = torch.full((2 * heads, 70), 7, dtype=torch.int32)
    by = guess.Guessed(skew, held, logits, scores, chosen, 0.5, 2.0, how)
    ends = [torch.full((2 * heads,), n, dtype=torch.int32) for n in (tokens, room, 7)]
    given_, few = (by, q, [tokens] * 2, *ends), q.float().view(2, heads, group, dim) @ skew * 0.5
    if native:
        assert guess.choose_guessed(*given_)
    else:
        assert not guess.choose_guessed(*given_, "cpu") and (chosen == 7).all()
    for b in range(2):
        mine, own = held[b, :, :, :tokens], scores.view(2, heads, -1)[b, :, :tokens]
        if not native:
            held_logits = logits.view(2, heads, group, -1)[b, ..., :tokens]
            guess.guesses(few[b], mine, held_logits, own, 2.0, how)
        wide = q[b].double().view(heads, group, dim) @ skew.double() * 0.5
        exact = torch.zeros(heads, group, tokens, dtype=torch.float64)
        below = torch.zeros(heads, tokens, dtype=torch.float64)
        guess.guesses(wide, mine, exact, below, 2.0, how)
        rough = []
        for shift in range(ORDERS if tokens else 0):
            order, plain = torch.arange(columns).roll(shift), torch.empty(heads, tokens)
            rolled = few[b][..., order], mine[:, order], torch.empty(heads, group, tokens), plain
            guess.guesses(*rolled, 2.0, how)
            rough.append(plain)
        # scores are small differences: the roundings are those of the logits
        size = (wide @ mine.double()).abs().max() if tokens else 0
        if tokens:
            found_of, exact_of = (t.double() - size for t in (own, below))
            near(found_of, exact_of, [t.double() - size for t in rough], torch.float32, "guesses")
        if not native:
            continue
        least, most = ((below > bound).sum() // heads for bound in (-2 + 1e-4, -2 - 1e-4))
        counts = ends[2].view(2, heads)[b].tolist()
        assert len({*counts}) == 1
        assert min(tokens, room, max(1, least)) <= counts[0] <= min(tokens, room, max(1, most))
        order = own.sort(descending=True, stable=True).indices[:, : counts[0]].sort().values
        assert torch.equal(chosen.view(2, heads, -1)[b, :, : counts[0]].long(), order)
        assert (chosen.view(2, heads, -1)[b, :, counts[0] :] == -1).all()
    assert (scores[:, tokens:] == 7).all() and (logits[:, tokens:] == 7).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(HEADS, st.sampled_from([5, 64]), st.sampled_from([1, 16, 19]), st.sampled_from(DTYPES))
def test_a_tokens_columns_are_its_key_times_the_skew(heads, dim, columns, dtype):
    generator = torch.Generator().manual_seed(dim + columns)
    skew = torch.randn(heads, dim, columns, generator=generator)
    k = torch.randn(heads, 3, dim, generator=generator).to(dtype)
    held = torch.full((1, heads, columns, 5), 9, dtype=dtype)
    none = torch.zeros(heads, 5), torch.zeros(heads, 5), torch.zeros(heads, 1).int()
    by = guess.Guessed(skew, held, *none, 1.0, 5.0, "max")
    assert guess.learn_guessed(by, 0, 2, k[:, 1:2])
    exact = (k[:, 1:2].double() @ skew.double())[:, 0]
    rough = [(k[:, 1:2].float() @ skew)[:, 0].to(dtype)]
    near(held[0, :, :, 2], exact, rough, dtype, "columns")
    held[..., 2] = 9
    assert (held == 9).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    dim=st.sampled_from([5, 16, 64]),
    count=st.sampled_from([1, 4, 5]),
    pages=st.sampled_from([0, 1, 15, 16, 17, 33, 257]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(by_channel.HOW),
    backend=st.sampled_from(["auto", "cpu", "reference"]),
)
def test_bounds_by_channels_against_float64(heads, group, dim, count, pages, dtype, how, backend):
    generator = torch.Generator().manual_seed(dim + pages)
    q = torch.randn(heads, group, dim, generator=generator)
    low, high = torch.full((2, heads, dim, pages + 3), math.nan, dtype=dtype)
    some = torch.randn(2, heads, dim, pages, generator=generator).to(dtype)
    low[:, :, :pages], high[:, :, :pages] = some.amin(0), some.amax(0)
    room = torch.full((heads, pages + 3), 7.0)
    given = low[:, :, :pages], high[:, :, :pages], count, room[:, :pages], how, backend
    channel_bounds(q, *given)
    exact = []
    for head in range(heads):
        own = q[head].abs().sum(0).sort(descending=True).indices[:count]
        few = q[head, :, own].double().unsqueeze(2)  # [G, count, 1]
        sides = (side[head, own, :pages].double() for side in (low, high))
        bound = torch.maximum(*(few * side for side in sides)).sum(1)
        exact.append({"max": bound.amax, "mean": bound.mean, "sum": bound.sum}[how](0))
    torch.testing.assert_close(room[:, :pages], torch.stack(exact).float(), atol=1e-5, rtol=1e-5)
    assert (room[:, pages:] == 7).all()


def test_results_do_not_depend_on_threads():
    given = some_low_rank(3, 2, 64, (300, 37, 8, 33, 50, 32), torch.bfloat16, False)
    draws = some_draws(3, 2, 64, 300, 33, torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((attend_rebuilt(*given, 0.125), attend_drawn(*draws, 0.125)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    sums=st.sampled_from([2, 8, 16, 17, 256]),
    stop=st.sampled_from([0, 1, 4, 5, 15, 16, 17, 255, 1021]),
    room=st.sampled_from([0, 3, 7, 60, 1021]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(far_codes.HOW),
    sharp=st.sampled_from([0.125, 40.0]),
)
def test_codes_of_far_keys_choose_as_in_float64(heads, group, sums, stop, room, dtype, how, sharp):
    """Whole codes of the best scores, of the last one its oldest tokens, of codes that weigh the
    same (sharp: nothing) whichever comes first; the code that most have counts for all of them.
    """
    generator, dim, first = torch.Generator().manual_seed(stop + sums), 32, 4
    factors = torch.randn(heads, dim, dim, generator=generator).tril() / 8 + 2 * torch.eye(dim)
    centroids = torch.randn(2, heads, sums, dim, generator=generator)
    codes = torch.full((2, heads, stop + 9), sums - 1, dtype=torch.uint8)
    part = torch.randint(max(1, sums - 1), (2, heads, stop), generator=generator)
    codes[:, :, :stop] = part.minimum(part.flip(2)).byte()
    angles = torch.randn(2, 12, generator=generator)
    far = list(zip(angles.cos(), angles.sin()))
    q = torch.randn(2, heads * group, dim, generator=generator).to(dtype)
    chosen = torch.full((2 * heads, 70), 7, dtype=torch.int32)
    scores = torch.zeros(2 * heads, stop + 9)
    by = far_codes.Coded(factors, centroids, codes, scores, chosen, sharp, how, first)
    ends = [torch.full((2 * heads,), n, dtype=torch.int32) for n in (stop, room, 7)]
    assert far_codes.choose_coded(by, q, far, *ends)
    kept = min(room, stop, 70)
    assert (ends[2] == kept).all() and (chosen[:, kept:] == -1).all()
    assert not far_codes.choose_coded(by, q, far, *ends, "cpu")
    far_codes.score_coded(by, q, far, [stop] * 2)
    for b, own in enumerate(chosen.view(2, heads, -1)):
        asked = rebuild.turned(q[b].double(), *(t.double() for t in far[b])).view(heads, group, dim)
        for head, mine in enumerate(own[:, :kept].long()):
            assert mine[: min(first, kept)].tolist() == [*range(min(first, kept))]
            if kept <= first or kept == stop:
                assert mine.tolist() == [*range(kept)]
                continue
            undone = asked[head] @ factors[head].double().inverse().mT
            of = codes[b, head, first:stop].long()
            exact = (undone @ centroids[b, head].double().mT * sharp)[:, of].softmax(1)
            exact = by_channel._REDUCED[how](exact, 0)
            plain = scores.view(2, heads, -1)[b, head, first:stop].double()
            torch.testing.assert_close(plain, exact, atol=1e-6, rtol=2e-3)
            rest = mine[first:] - first
            last, after = exact.sort(descending=True).values[len(rest) - 1 : len(rest) + 1]
            near_zero = (exact < 1e-30) & (exact > 1e-46)  # nothing in float32, or next to it
            exact = exact.where(exact > 1e-46, 0.0)
            order = exact.sort(descending=True, stable=True).indices[: len(rest)]
            same = (
                last < 1e-46
                or of[order[-1]] == of[exact.argsort(descending=True, stable=True)[len(rest)]]
            )
            if not near_zero.any() and (last > after * (1 + 1e-3) or same):
                assert rest.tolist() == order.sort().values.tolist()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(HEADS, st.sampled_from([16, 64]), st.sampled_from([2, 17, 256]), st.sampled_from(DTYPES))
def test_a_tokens_code_is_the_nearest_centroid_of_its_turned_key(heads, dim, sums, dtype):
    generator = torch.Generator().manual_seed(dim + sums)
    factors = torch.randn(heads, dim, dim, generator=generator).tril()
    centroids = torch.randn(1, heads, sums, dim, generator=generator) * 8
    k = torch.randn(heads, 9, dim, generator=generator).to(dtype)
    codes = torch.full((1, heads, 9), 255, dtype=torch.uint8)
    none = torch.zeros(heads, 1), torch.zeros(heads, 1, dtype=torch.int32)
    by = far_codes.Coded(factors, centroids, codes, *none, 1.0, "sum", 0)
    angles = torch.randn(9, dim // 2 - 1, generator=generator)
    for t in range(8):
        assert far_codes.learn_coded(by, 0, t, k[:, t : t + 1], (angles[t].cos(), angles[t].sin()))
    turned = rebuild.turned(k.double(), angles.double().cos(), angles.double().sin())
    away = torch.cdist(turned @ factors.double(), centroids[0].double())
    assert (
        torch.equal(codes[0, :, :8].long(), away[:, :8].argmin(-1))
        and (codes[:, :, 8] == 255).all()
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    heads=HEADS,
    group=GROUPS,
    pages=st.sampled_from([0, 1, 15, 17, 257]),
    room=st.sampled_from([1, 7, 16]),
    kept=st.sampled_from([0, 3, 12]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_choice_of_pages_says_where_their_rows_stand(heads, group, pages, room, kept, dtype):
    """The second of two sequences has one page more and none that was kept apart."""
    generator = torch.Generator().manual_seed(pages + room)
    q = torch.randn(2, heads * group, 16, generator=generator).to(dtype)
    low, high = torch.full((2, 2, heads, 16, pages + 3), math.nan, dtype=dtype)
    some = torch.randn(2, 2, heads, 16, pages + 1, generator=generator).to(dtype)
    low[..., : pages + 1], high[..., : pages + 1] = some.amin(0), some.amax(0)
    bounds = torch.zeros(2 * heads, pages + 3)
    stayed = torch.randint(999, (2, heads, 12), generator=generator, dtype=torch.int32)
    chosen = torch.full((2, heads, 3 * room + 1), -7, dtype=torch.int32)
    by = by_channel.Paged(low, high, bounds, stayed, chosen, 3, 5, "sum")
    spans = [by_channel.Span(pages, kept, 1000), by_channel.Span(pages + 1, 0, 0)]
    assert not by_channel.choose_pages(by, q, spans, room, "cpu") and (chosen == -7).all()
    assert by_channel.choose_pages(by, q, spans, room)
    for b, span in enumerate(spans):
        sides = (side[b, :, :, : span.pages] for side in (low, high))
        expected = torch.empty(heads, span.pages)
        channel_bounds(q[b].float().view(heads, group, 16), *sides, 5, expected, backend="cpu")
        own = bounds.view(2, heads, -1)[b, :, : span.pages]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
        best = own.sort(descending=True, stable=True).indices[:, :room].sort().values
        for head, numbers in enumerate(best.tolist()):
            rows = [page * 3 + t for page in numbers for t in range(3)]
            where = [int(stayed[b, head, i]) if i < span.kept else i + span.later for i in rows]
            assert chosen[b, head].tolist() == where + [-7] * (3 * room + 1 - len(where))
