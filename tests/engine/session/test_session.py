"""What a session must never depend on: how the prompt was cut, how often it went back, whether it
was copied or interrupted.

Stops: a chunk boundary that leaks, a truncate that leaves state behind, a fork that shares rows, a
Ctrl-C that loses the prompt.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Full, OmniKV, SamplingParams
from engine.base.errors import Busy, ContextTooLong, SessionClosed, SettingError
from tests.builders import random_ids, tiny_llm

SPARSE = dict(filter_layers=(1, 4), tokens=24, dense_below=0)
METHODS = {
    "full": Full(),
    "omnikv": OmniKV(**SPARSE),
    "uniform": OmniKV(selector="uniform", **SPARSE),
    "exponential": OmniKV(selector="exponential", scores="raw", wait_layers=0, **SPARSE),
}
_LLMS = {}


def llm_of(name, chunk=64, backend="reference"):
    """LLMs are shared by the examples of a property: only the chunk differs, and it is a setting of
    its own.
    """
    key = name, chunk, backend
    if key not in _LLMS:
        _LLMS[key] = tiny_llm(METHODS[name], chunk=chunk, backend=backend, max_context=1024)
    return _LLMS[key]


def answer(session, ids, count):
    """(greedy token ids, logits after each) of an answer."""
    logits, tokens, seen = session.prefill(ids) if ids else session.last_logits, [], []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
        seen.append(logits)
    return tokens, torch.stack(seen)


def assert_sparse(session, name):
    if name != "full":
        assert session.stats.sparse_steps == session.stats.decode_steps > 0
        assert (
            all(len(chosen) == 24 for chosen in session.selections.values()) or len(session) < 320
        )


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=8, deadline=None)
@given(
    length=st.integers(2, 420),
    chunk=st.sampled_from([1, 7, 63, 64, 65, 127, 500]),
    seed=st.integers(0, 99),
)
def test_chunking_changes_nothing(name, length, chunk, seed):
    ids = random_ids(length, seed=seed)
    with llm_of(name, 512).session() as whole, llm_of(name, chunk).session() as cut:
        tokens, logits = answer(whole, ids, 4)
        others, others_logits = answer(cut, ids, 4)
        assert tokens == others
        torch.testing.assert_close(logits, others_logits, rtol=1e-4, atol=1e-4)
        assert_sparse(cut, name)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(1, 150), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_turns_are_one_prompt(name, cuts, seed):
    ids = random_ids(sum(cuts), seed=seed)
    with llm_of(name).session() as whole, llm_of(name).session() as turns:
        at = 0
        for count in cuts[:-1]:
            turns.prefill(ids[at : at + count])
            at += count
        tokens, logits = answer(whole, ids, 3)
        others, others_logits = answer(turns, ids[at:], 3)
        assert tokens == others
        torch.testing.assert_close(logits, others_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=8, deadline=None)
@given(
    length=st.integers(2, 400),
    made=st.integers(1, 40),
    back=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_truncate_and_redo_is_never_having_been_there(name, length, made, back, seed):
    """Bitwise on the reference launchers, selections too."""
    ids, back = random_ids(length, seed=seed), min(made, back)
    with llm_of(name).session() as session:
        tokens, logits = answer(session, ids, made)
        chosen = session.selections
        # other tokens are decoded, then taken back
        for token in random_ids(back, seed=seed + 1):
            session.decode(token)
        session.truncate(length + made - back)
        assert len(session) == length + made - back and session.ids == ids + tokens[: made - back]
        again = torch.stack([session.decode(t) for t in tokens[made - back :]])
        assert torch.equal(again, logits[made - back :])
        assert chosen.keys() == session.selections.keys()
        assert all(torch.equal(chosen[f], session.selections[f]) for f in chosen)


@pytest.mark.parametrize("name", METHODS)
def test_retry_restores_the_prompts_own_logits(name):
    with llm_of(name).session() as session:
        first = session.prefill(random_ids(333))
        tokens, logits = answer(session, [], 30)
        session.truncate(333)
        assert torch.equal(session.last_logits, first)
        again, again_logits = answer(session, [], 30)
        assert again == tokens and torch.equal(again_logits, logits)


@pytest.mark.parametrize("name", METHODS)
def test_truncate_further_than_the_query_ring_recomputes_the_window(name):
    """300 tokens back: the ring has lost those queries; they are recomputed from the ids, equal up
    to rounding.
    """
    ids = random_ids(120)
    with llm_of(name).session() as session, llm_of(name).session() as fresh:
        session.prefill(ids)
        fresh.prefill(ids)
        extra = random_ids(320, seed=5)
        for token in extra:
            session.decode(token)
        for token in extra[:20]:
            fresh.decode(token)
        session.truncate(140)
        torch.testing.assert_close(
            session.decode(extra[20]), fresh.decode(extra[20]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", METHODS)
def test_fork_is_independent_and_equal(name):
    ids = random_ids(350)
    with llm_of(name).session() as session:
        tokens, _ = answer(session, ids, 10)
        with session.fork() as twin:
            assert twin.ids == session.ids and torch.equal(twin.last_logits, session.last_logits)
            ours = torch.stack([session.decode(t) for t in (5, 6, 7)])
            theirs = torch.stack([twin.decode(t) for t in (5, 6, 7)])
            assert torch.equal(ours, theirs)
            twin.truncate(100)
            twin.prefill(random_ids(60, seed=9))
        # the twin's life and end changed nothing here
        more = session.decode(8)
        with llm_of(name).session() as fresh:
            fresh.prefill(ids)
            for t in tokens + [5, 6, 7]:
                fresh.decode(t)
            assert torch.equal(fresh.decode(8), more)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_an_interrupted_prefill_keeps_whole_chunks(name, stop_after):
    ids, calls = random_ids(400), []

    def interrupt(progress):
        calls.append(progress.done)
        if len(calls) == stop_after:
            raise KeyboardInterrupt

    with llm_of(name).session() as session, llm_of(name).session() as fresh:
        with pytest.raises(KeyboardInterrupt):
            session.prefill(ids, interrupt)
        assert len(session) == 64 * stop_after and session.ids == ids[: len(session)]
        tokens, logits = answer(session, ids[len(session) :], 5)
        others, others_logits = answer(fresh, ids, 5)
        assert tokens == others
        torch.testing.assert_close(logits, others_logits, rtol=1e-4, atol=1e-4)


def test_an_interrupt_inside_a_chunk_loses_that_chunk_only(monkeypatch):
    ids = random_ids(300)
    with llm_of("uniform").session() as session, llm_of("uniform").session() as fresh:
        whole = session.runtime.attend_prompt
        counter = iter(range(10**6))

        def breaks(*arguments):
            if next(counter) == 8 * 2 + 3:  # the third chunk's fourth layer
                raise KeyboardInterrupt
            return whole(*arguments)

        monkeypatch.setattr(session.runtime, "attend_prompt", breaks)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(ids)
        assert len(session) == 128
        monkeypatch.undo()
        tokens, _ = answer(session, ids[128:], 5)
        assert tokens == answer(fresh, ids, 5)[0]


def test_progress_counts_work_not_tokens():
    """Half of the tokens is less than half of the work, the last report is all of it, and the time
    left ends at none.
    """
    seen = []
    with llm_of("full").session() as session:
        session.prefill(random_ids(1000), seen.append)
    half = next(p for p in seen if p.done >= 500)
    assert half.work < half.done / half.total - 0.02
    assert seen[-1].done == seen[-1].total == 1000 and seen[-1].work == pytest.approx(1.0)
    assert seen[-1].eta == pytest.approx(0.0, abs=1e-6) and all(
        a.work < b.work for a, b in zip(seen, seen[1:])
    )


def test_too_long_is_an_error_before_anything_is_read():
    with llm_of("full").session() as session:
        session.prefill(random_ids(1000))
        with pytest.raises(
            ContextTooLong, match=r"1030 tokens do not fit.*holds 1000.*1024.*max_context"
        ):
            session.prefill(random_ids(30))
        assert len(session) == 1000
        session.prefill(random_ids(24))
        with pytest.raises(ContextTooLong, match="1025"):
            session.decode(3)
        pieces = list(session.generate([], SamplingParams(max_tokens=5, ignore_eos=True)))
        assert pieces[-1].finish_reason == "context" and len(session) == 1024


def test_bad_calls_name_what_they_found():
    with llm_of("full").session() as session:
        with pytest.raises(SettingError, match="found 97, expected 0 to 96"):
            session.prefill([1, 97])
        with pytest.raises(SettingError, match="no tokens"):
            session.prefill([])
        session.prefill([1, 2, 3])
        with pytest.raises(SettingError, match="truncate: found 4"):
            session.truncate(4)
    with pytest.raises(SessionClosed):
        session.decode(1)
    session.close()  # closing twice is fine


def test_a_second_thread_gets_busy():
    llm, seen = llm_of("full"), []
    stream = llm.stream(random_ids(50), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)

    def other():
        try:
            llm.generate(random_ids(5), SamplingParams(max_tokens=1))
        except Busy as error:
            seen.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(seen) == 1 and "another request" in seen[0]
    stream.close()
    assert (
        len(llm.generate(random_ids(5), SamplingParams(max_tokens=2, ignore_eos=True)).token_ids)
        == 2
    )


def test_a_token_that_ends_an_answer_is_in_the_session():
    """A next turn reads it; its text is not shown."""
    with llm_of("omnikv").session() as session:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        tokens = [piece.token_id for piece in session.generate(random_ids(30), params)]
        end = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i)
        session.truncate(0)
        params = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(tokens[end],))
        pieces = list(session.generate(random_ids(30), params))
        assert pieces[-1].finish_reason == "stop" and session.ids[30:] == tokens[: end + 1]


def test_generate_feeds_what_it_sampled_and_a_next_turn_only_appends():
    with llm_of("omnikv").session() as session:
        pieces = list(
            session.generate(random_ids(320), SamplingParams(max_tokens=12, ignore_eos=True))
        )
        tokens = [p.token_id for p in pieces]
        assert (
            len(tokens) == 12
            and session.ids[320:] == tokens
            and pieces[-1].finish_reason == "length"
        )
        again = list(
            session.generate(random_ids(9, seed=3), SamplingParams(max_tokens=2, ignore_eos=True))
        )
        assert (
            again[-1].stats.cached_tokens == 332
            and again[-1].stats.prompt_tokens == 9
            and len(session) == 343
        )
        assert session.stats.prefill_tokens == 329


@pytest.mark.parametrize("name", METHODS)
def test_fast_kernels_give_the_reference_tokens(name):
    ids = random_ids(700, seed=4)
    with llm_of(name).session() as reference, llm_of(name, 64, "auto").session() as fast:
        tokens, logits = answer(reference, ids, 40)
        others, others_logits = answer(fast, ids, 40)
        assert tokens == others
        torch.testing.assert_close(logits, others_logits, rtol=2e-4, atol=2e-4)
        assert_sparse(fast, name)
