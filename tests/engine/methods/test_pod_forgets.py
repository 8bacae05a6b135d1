"""PoD with forget: distant keys that no layer reads are not held, and nothing else changes.

Stops: a ring that overwrites a key which is still seen, a key of one head in the row of another, a
way back over keys that are gone, bytes that the plan does not say, a switch that does not tell what
it costs.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bank.near.near_bank import NearBank
from engine.bank.near.near_rows import NearRows
from engine.base.errors import SettingError
from engine.methods.evict.snapkv import SnapKV
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.select.pod import PodUntrained
from engine.runner.rewind import tokens_again
from engine.session.check import check
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import allocated

BLOCKS = {1: (0, 2, 5), 2: ((0, 2, 5), (0, 3)), 4: ((0,), (0, 1, 2, 3, 4, 5, 6), (0, 2), (0, 6))}
ROWS = 8 + 64 + 512 + 128  # of a ring: first, recent, spare and queries, in chunks of up to 512
CONTEXT = 2048


def pod(heads=2, forget=True, skip=1.0):
    """The method; it forgets by default."""
    assert PodUntrained().forget
    return PodUntrained(BLOCKS[heads], first=8, recent=64, skip=skip, forget=forget)


def llm_of(heads=(8, 2), **kwargs):
    config = tiny_config(layers=7, heads=heads[0], kv_heads=heads[1])
    given = dict(max_context=CONTEXT, chunk=64) | kwargs
    return tiny_llm(Full(), config, tiny_weights(config, seed=7), **given)


def close(a, b, **kwargs):
    """Both sessions' results of the same calls, equal up to the order of sums."""
    torch.testing.assert_close(a, b, **dict(atol=2e-5, rtol=2e-5) | kwargs)


# ---------------------------------------------------------------- rows of one layer


@given(
    st.integers(0, 5),
    st.integers(1, 9),
    st.sampled_from((0, 1, 2, 7)),
    st.lists(st.integers(1, 8), min_size=1, max_size=9),
    st.sampled_from(((), (0,), (0, 2), (0, 1, 2))),
    st.integers(0, 9),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_what_is_seen_is_held_and_what_is_not_is_named(first, recent, spare, chunks, near, seed):
    """Chunks of 1 to 8 tokens and steps, against a bank of all rows; two sequences."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(2, 80, 3, width, generator=generator) for width in (4, 6)]
    rows = min(80, first + recent + 8 + spare)
    held = NearRows(near, first, recent, rows, (2, 3, 80, (4, 6)), torch.float32, "cpu")
    at = 0
    for chunk in chunks:
        stop = at + chunk
        held.note(stop)
        positions = torch.arange(at, stop).expand(2, -1)
        held.write(*(side[:, at:stop] for side in whole), positions, "auto")
        assert torch.equal(held.v[:, :, :stop].transpose(1, 2), whole[1][:, :stop])
        for head in range(3):
            keys = whole[0][:, :, head]
            seen = max(first, at + 1 - recent)
            for low, high in ((0, min(first, stop)), (seen, stop)):
                parts = held.head_keys(head, low, high)
                assert [p for p, _ in parts][0] == low and len(parts) <= 1 + (head in near)
                found = torch.cat([k for _, k in parts], 2)[:, 0]
                assert torch.equal(found, keys[:, low : max(low, high)])
            if head in near and stop > rows:
                parts = held.head_keys(head, max(first, held.low), stop)
                found = torch.cat([k for _, k in parts], 2)[:, 0]
                assert torch.equal(found, keys[:, max(first, held.low) : stop])
            if head in near and stop > rows and held.low > first:
                with pytest.raises(SettingError, match="forget: found K of positions"):
                    held.head_keys(head, held.low - 1, stop)
            elif head not in near or stop <= rows:
                ((_, found),) = held.head_keys(head, 0, stop)
                assert torch.equal(found[:, 0], keys[:, :stop])
        assert held.holds(stop, spare) and not held.holds(stop + 1, spare)
        back = max(0, stop - recent - spare)
        assert back >= held.low or stop <= rows
        at = stop
    again = NearRows(near, first, recent, rows, (2, 3, 80, (4, 6)), torch.float32, "cpu")
    again.load(*(side[:, :at].transpose(1, 2) for side in whole))
    for head in range(3):
        span = head, max(first, at + 1 - recent), at
        pairs = zip(again.head_keys(*span), held.head_keys(*span), strict=True)
        assert all(p == o and torch.equal(k, other) for (p, k), (o, other) in pairs)


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize(
    ("heads", "skip", "kwargs"),
    [
        ((4, 4), 1.0, dict(chunk=300, backend="auto")),  # whose steps are C++ kernels
        ((8, 2), 0.6, dict(backend="reference", chunk=512)),
        ((8, 1), 1.0, dict(bank="int8", chunk=200)),
    ],
)
def test_answers_are_those_of_a_bank_of_all_keys(heads, skip, kwargs):
    """Groups of 1, 4 and 8; to the bit until the ring has been around, then up to the order of
    sums (and a step of a row's rounding); in turns that end beside the ring's length.
    """
    near = dict(atol=1e-3 if "bank" in kwargs else 2e-5, rtol=2e-5)
    llm, ids = llm_of(heads, **kwargs), random_ids(CONTEXT, seed=3)
    with (
        llm.session(pod(heads[1], skip=skip)) as a,
        llm.session(pod(heads[1], False, skip)) as b,
    ):
        for stop in (50, ROWS - 1, ROWS + 2, 1103):
            at = len(a)
            x, y = a.prefill(ids[at : stop - 2]), b.prefill(ids[at : stop - 2])
            assert torch.equal(x, y) or stop > ROWS
            close(x, y, **near)
            for token in ids[stop - 2 : stop]:
                close(a.decode(token), b.decode(token), **near)
        assert a.stats.sparse_steps == b.stats.sparse_steps > 0 and isinstance(a.bank, NearBank)
        assert a.runtime.gates == b.runtime.gates and (a.runtime.skipped > 0) == (skip < 1)
        with llm.session(Full()) as full:
            full.prefill(ids[:1103])
            assert (full.last_logits - a.last_logits).abs().max() > 1e-3


def test_keys_between_the_first_and_the_newest_are_not_there():
    """All of a ring but what the next query sees is NaN, and it answers the same."""
    llm, ids = llm_of(), random_ids(1000, seed=3)
    with llm.session(pod()) as session:
        session.prefill(ids)
        expected = session.decode(5)
        session.truncate(1000)
        spoiled = 0
        for rows in session.bank._near.values():
            seen = [rows.first + (p - rows.first) % rows.size for p in range(1001 - 64, 1000)]
            hidden = sorted(set(range(8, rows.rows)) - set(seen))
            rows.ring[:, :, hidden] = float("nan")
            spoiled += len(hidden) * len(rows.near)
        assert spoiled == 9 * (ROWS - 8 - 63)
        assert torch.equal(session.decode(5), expected)
        session.truncate(1000)
        rows.ring[:, :, seen[0]] = float("nan")
        assert session.decode(5).isnan().any()


def test_bytes_are_those_of_the_plan_and_of_the_map():
    """Nine heads of fourteen hold `ROWS` rows of K, all fourteen every V."""
    llm = llm_of()
    given = llm.config, llm.dtype.itemsize
    with llm.session(pod()) as session:
        # and a step's row in each of the six layers that have such heads, twice
        keys = 5 * CONTEXT + 9 * ROWS + 6 * 4 * 2
        assert session.bank.nbytes == (keys + 14 * CONTEXT) * 8 * given[1]
        assert session.stats.bank_bytes == session.bank.nbytes
        assert 0 <= allocated(session.bank) - session.bank.nbytes < 1024
        assert abs(session.stats.resident - (keys + 14 * CONTEXT) / (28 * CONTEXT)) < 1e-6
    planned = tiny_llm(pod(), llm.config, max_context=CONTEXT, chunk=64).plan()
    assert planned.bytes_of("context bank") == (keys + 14 * CONTEXT) * 8 * given[1]
    assert "of distant K that no layer reads" in str(planned)
    # in a context that the ring covers nothing is freed, and nothing is taken beside it
    short = tiny_llm(pod(), llm.config, max_context=512, chunk=64)
    assert short.plan().bytes_of("context bank") == 28 * 512 * 8 * given[1]


def test_it_goes_back_over_the_ring_and_reads_again_what_is_gone():
    llm, ids = llm_of(), random_ids(1000, seed=3)
    with llm.session(pod()) as a, llm.session(pod(forget=False)) as b:
        for session in (a, b):
            session.prefill(ids)
        # what the ring holds, what it has overwritten, and then it is as new
        for n, again in ((1000 - 512, 0), (300, 300), (0, 0)):
            assert (tokens_again(a, n), tokens_again(b, n)) == (again, 0)
            for session in (a, b):
                session.truncate(n)
                session.prefill(ids[n : n + 90])
            close(a.last_logits, b.last_logits)


def test_sessions_of_one_step_answer_as_they_do_alone():
    """Two that lie on both sides of the ring's length."""
    llm, ids = llm_of(), random_ids(1000, seed=3)
    batch, expected = llm.batch(slots=2), []
    with llm.session(pod()) as alone:
        for count in (300, 900):
            alone.truncate(0)
            alone.prefill(ids[:count])
            expected.append(alone.decode(5))
    sessions = [batch.session(pod()) for _ in expected]
    for session, count in zip(sessions, (300, 900)):
        session.prefill(ids[:count])
        batch.feed(session, 5)
    done = batch.step()
    for session, one in zip(sessions, expected):
        close(done[session], one)
    batch.close()


def test_copies_and_other_backends_go_on_alike():
    llm, ids = llm_of(), random_ids(1000, seed=3)
    with llm.session(pod()) as session:
        session.prefill(ids)
        with session.fork() as copy:
            assert isinstance(copy.bank, NearBank)
            expected = session.decode(5)
            assert torch.equal(copy.decode(5), expected)
        session.set_backend("reference")
        assert isinstance(session.bank, NearBank)
        session.truncate(1000)
        close(session.decode(5), expected)


def test_a_change_of_method_says_what_it_reads_again_and_does():
    llm, ids = llm_of(), random_ids(1000, seed=3)
    with llm.session(Full()) as session:
        session.prefill(ids)
        expected = session.decode(5)
        session.truncate(1000)
        # rows that others made are taken as they are
        assert (session.reads_again(pod()), session.frees(pod())) == (0, 1000)
        session.set_method(pod())
        assert isinstance(session.bank, NearBank) and session.reads_again(pod()) == 0
        found = session.decode(5)
        with llm.session(Full()) as other:
            other.prefill(ids)
            other.set_method(pod(forget=False))
            close(found, other.decode(5))
        session.truncate(1000)
        for method in (Full(), SnapKV(tokens=64), pod(forget=False)):
            assert (session.reads_again(method), session.frees(method)) == (1000, 0)
        session.set_method(Full())
        assert not isinstance(session.bank, NearBank) and not session.bank.lacks
        torch.testing.assert_close(session.decode(5), expected)


def test_what_needs_all_keys_is_refused_in_one_line(tmp_path):
    llm, ids = llm_of(), random_ids(1000, seed=3)
    with llm.session(pod()) as session:
        session.prefill(ids)
        with pytest.raises(SettingError, match="save: found pod_untrained with forget=True"):
            session.save(tmp_path / "x")
        expected = session.decode(5)
        for needs_all in (lambda: session.bank.kv(1), lambda: check(session)):
            with pytest.raises(SettingError, match="forget: found K of positions 0 to"):
                needs_all()
        session.truncate(1000)
        assert torch.equal(session.decode(5), expected)
    with pytest.raises(SettingError, match="frees keys that full attention reads"):
        Exact(pod())
    assert Exact(pod(forget=False)) and PodUntrained(forget=True).cannot_draft == ""
    # where the ring covers the context nothing goes
    with llm_of(max_context=512).session(pod()) as session:
        session.prefill(ids[:300])
        assert not session.bank.lacks and session.reads_again(Full()) == 0
        session.save(tmp_path / "x")
