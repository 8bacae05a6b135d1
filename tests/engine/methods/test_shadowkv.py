"""ShadowKV: a decomposition of K before rotation in float64, and choices of chunks and outliers,
index by index.

Stops: keys turned back or on to other positions, a basis of one head's K, a landmark of another
chunk, an outlier that competes or that is read in the bank, an exact token whose K is rebuilt, an
index that does not follow the bank, K that comes over the link.
"""

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.shadow import shadowkv
from engine.methods.select.shadow.shadowkv import ShadowKV
from engine.plan.placement import part_bytes, value_bytes
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import SHAPES, everything_happened, llm_of, planted_runtime
from tests.engine.methods.method_table import rows_by_head, without_outliers

LENGTHS = st.sampled_from((1, 7, 8, 9, 24, 47, 48, 49, 97, 127, 131))
NEAR = 1e-5  # of two shares, cosines or singular values: nearer ones may swap in float32


def turned(k, positions, freq, by):
    """Rows [.., n, D] float64 turned by +1 or -1 times their positions."""
    first, second = k.double().chunk(2, -1)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), by * positions[:, None] * freq)
    found = torch.complex(first, second) * turns
    return torch.cat([found.real, found.imag], -1)


def low_rank(k, method, base, stop, freq):
    """(K [Hkv, stop, D] of the rank, gap of its singular values) from rotated k [Hkv, n, D]."""
    heads, _, dim = k.shape
    at = torch.arange(stop)
    rows = turned(k[:, :stop], at, freq, -1).transpose(0, 1).flatten(1)
    rank = min(160, heads * dim) if method.rank is None else method.rank
    _, sizes, right = torch.linalg.svd(rows[:base], full_matrices=True)
    sizes = torch.cat([sizes, torch.zeros(heads * dim + 1 - len(sizes))])
    gap = float((sizes[rank - 1] - sizes[rank]) / sizes[0]) if rank < heads * dim else 1.0
    if rank >= base:  # what is kept beside all there is does not matter
        gap = 1.0
    kept = right[:rank]
    again = (rows @ kept.T @ kept).view(stop, heads, dim).transpose(0, 1)
    return turned(again, at, freq, 1), gap


def simulate(q, k, end, method, freq):
    """(chosen chunks, outlier chunks, their least gap, K to attend to, where the exact begin) of
    one sequence. q [H, D]; k [Hkv, n, D]. Everything is read where there are no chosen chunks.
    """
    n, size = k.shape[1], method.chunk
    base, stop = method.spans(end, n)
    if stop <= method.budget(0) + method.outliers * size:
        return None, None, 1.0, k.double(), 0
    rows, gap = low_rank(k, method, base, stop, freq)
    chosen, held = [], []
    for head, group in enumerate(q.double().view(k.shape[0], -1, q.shape[1])):
        members = k[head, :stop].double().view(-1, size, k.shape[2])
        marks = members.mean(1)
        sizes = members.norm(dim=2) * marks.norm(dim=1)[:, None]
        cosines = ((members @ marks[:, :, None])[:, :, 0] / sizes).amin(1)
        order = cosines[: base // size].sort().indices
        out = order[: method.outliers].tolist()
        edge = cosines[order[max(0, method.outliers - 1) : method.outliers + 1]]
        gap = min([gap, *edge.diff().tolist()])
        free = [i for i in range(len(marks)) if i not in out]
        shares = (group @ marks[free].T / q.shape[1] ** 0.5).softmax(1)
        score = {"max": shares.amax(0), "mean": shares.mean(0), "sum": shares.sum(0)}
        best = score[method.gqa_reduce].sort(descending=True)
        count = method.budget(0) // size
        gap = min([gap, *(-best.values[count - 1 : count + 1].diff()).tolist()])
        chosen.append(sorted(free[i] for i in best.indices[:count].tolist()))
        held.append(sorted(out))
        exact = [row for i in out for row in range(i * size, i * size + size)]
        rows[head, exact] = k[head, exact].double()
    return chosen, held, gap, torch.cat([rows, k[:, stop:].double()], 1), stop


def attention(q, k, v, rows):
    """Of one query head over the rows of its K/V head, float64."""
    return (q.double() @ k[rows].double().T / q.shape[0] ** 0.5).softmax(0) @ v[rows].double()


SETTINGS = (
    dict(rank=12, chunk=4, outliers=3, recent=9, answer=13),
    dict(rank=None, chunk=8, outliers=0, recent=1, answer=1, gqa_reduce="sum"),
    dict(rank=1, chunk=2, outliers=9, recent=5, answer=40, gqa_reduce="mean"),
)


@pytest.mark.parametrize(("backend", "at_once"), [("reference", 1024), ("auto", 16)])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.integers(0, 131),
    st.sampled_from(SETTINGS),
    st.sampled_from((8, 21, 48)),
    st.integers(0, 99),
)
@settings(max_examples=10, derandomize=True, deadline=None)
def test_a_step_reads_what_the_paper_says(backend, at_once, shape, lengths, end, how, budget, seed):
    """A ragged batch of which some read everything; rows of the bank that are not read, outliers
    among them, are NaN once they are in the index, which is made in one part or in several.
    """
    method = ShadowKV(tokens=budget, **how)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    kept = k.clone(), v.clone()
    freq = world.rotary.frequencies()
    found = [simulate(q[b, 0], k[b, :, :n], end, method, freq) for b, n in enumerate(lengths)]
    assume(all(gap > NEAR for _, _, gap, _, _ in found))
    runtime, group = world.runtime, world.plan.group_of[3]
    runtime.end_prompt(end)
    runtime.k = method.budget(0)
    with patch.object(shadowkv, "AT_ONCE", at_once):
        runtime.learn(group, 3, world.bank, list(lengths))
    sparse = any(chosen for chosen, *_ in found)
    for b, (chosen, _, _, _, tail) in enumerate(found):
        for head, own in enumerate(chosen or ()):
            size = method.chunk
            read = {row for i in own for row in range(i * size, i * size + size)}
            unread = sorted({*range(131)} - read - {*range(tail, lengths[b])})
            k[b, head, unread] = v[b, head, unread] = float("nan")
    out = runtime.attend(3, q, world.step(*lengths))
    choice = runtime.chosen[group]
    assert (choice.index is not None) == sparse
    for b, (chosen, held, _, rows, tail) in enumerate(found):
        for head in range(shape[0]):
            kv = head * shape[1] // shape[0]
            read = range(lengths[b])
            if chosen:
                chunks = sorted({*chosen[kv], *held[kv]})
                assert choice.index[b, kv].tolist() == chosen[kv]
                assert len(chunks) == len(chosen[kv]) + len(held[kv])  # it really was sparse
                size = method.chunk
                read = [row for i in chunks for row in range(i * size, i * size + size)]
                read += range(tail, lengths[b])
                if b == 0:
                    assert runtime.rows_read(lengths[0])[3] == len(read) < lengths[0]
                    assert runtime.chosen_rows(3)[kv].tolist() == [r for r in read if r < tail]
            expected = attention(q[b, 0, head], rows[kv], kept[1][b, kv], list(read))
            torch.testing.assert_close(out[b, 0, head].double(), expected, atol=2e-4, rtol=2e-4)


@given(st.sampled_from(GROUPS), st.integers(20, 131), st.integers(0, 99))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_of_full_rank_over_all_chunks_it_is_full_attention(shape, n, seed):
    """Every chunk's K is rebuilt, but for outliers and what is exact."""
    method = ShadowKV(tokens=512, outliers=1, recent=3, answer=4)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, n)
    q, (k, v) = world.queries(), world.bank.kv(3)
    world.runtime.end_prompt(n)
    object.__setattr__(method, "leaves_out", lambda indexed, budget: indexed > 0)
    out = world.runtime.attend(3, q, world.step(n))
    assert world.runtime.chosen[world.plan.group_of[3]].index is not None
    for head in range(shape[0]):
        kv = head * shape[1] // shape[0]
        expected = attention(q[0, 0, head], k[0, kv], v[0, kv], list(range(n)))
        torch.testing.assert_close(out[0, 0, head].double(), expected, atol=1e-5, rtol=1e-5)


@given(st.sampled_from(GROUPS), st.integers(0, 99))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_with_a_chunk_per_token_it_is_the_exact_top_k(shape, seed):
    method = ShadowKV(tokens=24, chunk=1, outliers=0, recent=17, answer=18)
    world = World(method, shape, 131, seed=seed)
    world.fill(3, 0, 117)
    q, k = world.queries(), world.bank.kv(3)[0]
    logits = q[0, 0].double().view(shape[1], -1, 16) @ k[0, :, :100].double().mT / 4
    best = logits.softmax(2).amax(1).topk(24, dim=1).indices.sort(1).values
    world.runtime.end_prompt(117)
    world.runtime.attend(3, q, world.step(117))
    assert torch.equal(world.runtime.chosen_rows(3), best)
    assert world.runtime.rows_read(117)[3] == 24 + 17


@pytest.mark.parametrize("outliers", [0, 3])
def test_planted_tokens_are_read(outliers):
    """As outliers, or as chunks whose landmark they turn."""
    positions = [40 + 22 * i for i in range(8)]
    method = ShadowKV(tokens=64, rank=8, outliers=outliers, recent=16, answer=24)
    runtime = planted_runtime(method, positions)
    for heads in rows_by_head(runtime, 321).values():
        for rows in heads:
            assert {*positions} <= {*rows} and len(rows) < 321


@given(
    st.lists(
        st.tuples(st.integers(1, 130), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6
    ),
    st.integers(0, 9),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_an_index_follows_the_bank_wherever_it_goes(moves, seed):
    method = ShadowKV(tokens=8, rank=9, chunk=4, outliers=2, recent=3, answer=7)
    world, before = World(method, (4, 2), 130, seed=seed), 0
    for n, share, end in moves:
        kept = round(share * min(before, n - 1))
        world.runtime.truncate(kept)
        world.fill(3, kept, 130)
        fresh = method.runtime(world.runtime.setup)
        for runtime in (world.runtime, fresh):
            runtime.ends = [round(end * n)]
            runtime.learn(1, 3, world.bank, [n])
        base, stop = method.spans(round(end * n), n)
        assert base <= stop < n and (2 * base > stop or not base)
        assert base % 4 == stop % 4 == 0 and n - stop <= 7 + 4 or stop == 0
        for name, rows in (("coefficients", stop), ("landmarks", stop // 4)):
            ours, theirs = (
                getattr(one, name)[1, 0].narrow(-2, 0, rows) for one in (world.runtime, fresh)
            )
            # the same sums, of other numbers of rows at a time
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        if stop:
            assert torch.equal(world.runtime.outliers[1], fresh.outliers[1])
            assert torch.equal(world.runtime.outlier_v[1], fresh.outlier_v[1])
        before = n


def test_an_interrupted_index_is_made_anew():
    """Ctrl-C at a later prompt's end, behind the basis: the prompt before has its own again."""
    method = ShadowKV(tokens=8, rank=9, chunk=4, outliers=2, recent=3, answer=7)
    world = World(method, (4, 2), 130)
    world.fill(3, 0, 130)
    world.runtime.ends = [60]
    world.runtime.learn(1, 3, world.bank, [60])
    held = world.runtime.coefficients[1, 0, :56].clone()
    world.runtime.ends = [120]
    stop = Mock(side_effect=KeyboardInterrupt)
    with patch.object(shadowkv, "furthest", stop), pytest.raises(KeyboardInterrupt):
        world.runtime.learn(1, 3, world.bank, [120])
    assert not torch.equal(world.runtime.coefficients[1, 0, :56], held)
    world.runtime.ends = [60]
    world.runtime.learn(1, 3, world.bank, [60])
    assert torch.equal(world.runtime.coefficients[1, 0, :56], held)


def test_rows_in_bfloat16_are_decomposed_in_float32():
    method = ShadowKV(tokens=24, rank=None, chunk=4, outliers=2, recent=5, answer=6)
    world = World(method, (8, 2), 131, dtype=torch.bfloat16)
    world.fill(3, 0, 120)
    q, (k, v) = world.queries(), world.bank.kv(3)
    freq = world.rotary.frequencies()
    chosen, held, gap, rows, tail = simulate(q[0, 0], k[0, :, :120], 120, method, freq)
    assert gap > NEAR
    world.runtime.end_prompt(120)
    out = world.runtime.attend(3, q, world.step(120))
    for head in range(8):
        kv = head // 4
        read = [row for i in (*chosen[kv], *held[kv]) for row in range(4 * i, 4 * i + 4)]
        expected = attention(q[0, 0, head], rows[kv], v[0, kv], [*read, *range(tail, 120)])
        torch.testing.assert_close(out[0, 0, head].double(), expected, atol=0.03, rtol=0.03)


def test_an_index_is_declared_to_the_byte():
    """160 of 512 numbers a token, an eighth of K, outliers, and a basis a layer."""
    config = tiny_config(layers=6, heads=8, kv_heads=8, head_dim=64, hidden=512)
    method = ShadowKV(tokens=104)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1607).items()}
    assert found["coefficients"] == 6 * 1600 * 160 * 2
    assert found["landmarks"] == 6 * 200 * 512 * 2
    assert found["basis"] == 6 * 160 * 512 * 4
    assert found["outlier_k"] == found["outlier_v"] == 6 * 8 * 48 * 8 * 64 * 2
    needs = method.needs(method.plan(config), config, 1607, 2)
    assert sum(found.values()) == needs.device_bytes
    assert needs.selected == 104 + 48 * 8


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order; over host memory, whose bits are the device's.
    """
    method = ShadowKV(tokens=40, rank=12, outliers=2, recent=16, answer=24)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method, offload="host") as (one, _):
        assert one.runtime.rows_read(260)[3] == 16 + 40 + 260 - 232


@pytest.mark.parametrize(
    ("shape", "backend"), [(SHAPES[0], "reference"), (SHAPES[1], "auto"), (SHAPES[2], "auto")]
)
def test_a_step_brings_v_alone_of_what_any_head_chose_once(shape, backend):
    """Counted from the first step after a prompt on: half of the bytes of K and V, at most what
    the plan promised; nothing of outliers and of what is exact.
    """
    llm = llm_of(shape, backend=backend)
    method = ShadowKV(tokens=40, rank=8, outliers=2, recent=16, answer=70)
    plan = llm.plan(method, offload="host")
    part, value = part_bytes(llm.config, 4), value_bytes(llm.config, 4)
    assert 2 * value == part
    with llm.session(method, offload="host") as session:
        session.prefill(random_ids(301))
        base, _ = method.spans(301, 301)
        past = sum(range(0, 301, 64))
        layers = len(plan.placement.layers)
        # every chunk the past of every layer, the last layer's once; then twice what is in the
        # index, of the last layer what does not lie on the device from its chunk still
        came = (layers - 1) * (past + 2 * base) + 256 + 2 * 256
        assert session.stats.bytes_streamed == part * came or backend == "reference"
        whole = llm.plan(method, offload="host", max_context=301)
        assert whole.prompt_link_bytes == part * came
        session.decode(5)  # has begun with the tails of the rings
        for token in random_ids(24, seed=1):
            came = session.stats.bytes_streamed
            session.decode(token)
            declared, n = without_outliers(session.runtime, len(session)), len(session)
            tail = method.spans(301, n)[1]
            rows = 0
            for layer in plan.placement.layers:
                chosen = {row for own in declared[layer] for row in own if row < tail}
                assert session.runtime.rows_read(n)[layer] < n  # it really was sparse
                rows += len(chosen)
            assert session.stats.bytes_streamed - came == rows * value <= plan.step_link_bytes


@pytest.mark.parametrize("bank", ["int4", "fp8"])
def test_v_of_packed_rows_comes_alone_too(bank):
    """Spans of rows that begin in the middle of a copied word: the device's bits."""
    config = tiny_config(layers=3, heads=4, kv_heads=1, hidden=128)
    llm = tiny_llm(Full(), config, tiny_weights(config), max_context=256, chunk=64, bank=bank)
    method = ShadowKV(tokens=40, outliers=2, recent=16, answer=20)
    with llm.session(method, offload="host") as one, llm.session(method, offload="device") as two:
        assert torch.equal(one.prefill(random_ids(200)), two.prefill(random_ids(200)))
        before = one.stats.bytes_streamed
        for token in random_ids(6, seed=1):
            assert torch.equal(one.decode(token), two.decode(token))
        assert one.stats.bytes_streamed > before
        assert one.runtime.rows_read(206)[2] < 206


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(tokens=7), "tokens: found 7, expected at least a chunk of 8 tokens"),
        (dict(rank=0), "rank: found 0, expected an int >= 1"),
        (dict(chunk=0), "chunk: found 0"),
        (dict(outliers=-1), "outliers: found -1"),
        (dict(recent=0), "recent: found 0"),
        (dict(answer=0), "answer: found 0"),
        (dict(gqa_reduce="none"), "max, mean, sum"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        ShadowKV(**bad)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(rank=33), "rank: found 33, expected at most 32: K of this model has 2 heads of 16"),
        (dict(tokens=10**8), "tokens: found 100,000,000, expected at most"),
    ],
)
def test_settings_that_a_model_cannot_have_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        llm_of().plan(ShadowKV(**bad))
