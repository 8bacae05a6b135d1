"""An interrupt in a step of several sessions: the next step finds every session whole.

Stops: a step over a state that broke off between two, logits that go with an interrupt although
their token stays, a token that is fed to a session which was cut meanwhile.
"""

import sys

import pytest
import torch

from engine.bank.row_origins import FULL
from engine.batch.batch import Batch
from engine.methods.evict.window import Window
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.sampling.params import SamplingParams
from engine.session.generate import generate
from tests.builders import random_ids, tiny_llm
from tests.engine.methods.method_table import OF_SESSIONS

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
METHODS = [row.sparse[0] if row.sparse else row.neutral for row in OF_SESSIONS] + [Exact(SPARSE)]
IDS = random_ids(100, seed=1)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(SPARSE, backend="reference", max_context=256, chunk=64, threads=1)


@pytest.fixture
def pair(llm):
    """method -> (a batch, a session of it, one alone that has read the same, a neighbour)"""
    with llm.batch(3) as batch:

        def made(method):
            mine, alone, beside = batch.session(method), llm.session(method), batch.session()
            mine.prefill(IDS), alone.prefill(IDS), beside.prefill(IDS[:40])
            for token in (3, 4):
                batch.feed(mine, token)
                batch.step()
                alone.decode(token)
            return batch, mine, alone, beside

        yield made


def broken(monkeypatch, target, name, before):
    """Have target.name raise a KeyboardInterrupt once, after before()."""

    def breaks(*arguments):
        monkeypatch.undo()
        before(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, breaks)


def goes_on(batch, mine, alone, token):
    batch.feed(mine, token)
    assert torch.equal(batch.step()[mine], alone.decode(token))
    assert mine.ids == alone.ids


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("token", [5, None], ids=["given", "likeliest"])
def test_a_step_that_was_torn_is_taken_by_the_next_one(pair, monkeypatch, method, token):
    """In the commit, after the method's state has changed."""
    batch, mine, alone, beside = pair(method)
    batch.feed(mine, token), batch.feed(beside, 5)
    broken(monkeypatch, mine.runtime, "commit", mine.runtime.commit)
    likeliest = int(alone.last_logits.argmax())
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    assert len(mine) == 102
    wanted = alone.decode(likeliest if token is None else token)
    assert torch.equal(batch.step()[mine], wanted)
    assert mine.ids == alone.ids and len(beside) == 41
    goes_on(batch, mine, alone, 6)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("where", ["left_selection", "rows_read"])
def test_who_keeps_the_token_keeps_its_logits(pair, monkeypatch, method, where):
    """What an interrupt may cost a session that has taken its step is the step's figures."""
    batch, mine, alone, _ = pair(method)
    batch.feed(mine, 5)
    broken(monkeypatch, mine.runner, where, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    if len(mine) == 102:  # before its step: still fed
        batch.step()
    assert torch.equal(mine.last_logits, alone.decode(5)) and mine.ids == alone.ids
    batch.feed(mine, None)
    token = int(alone.last_logits.argmax())
    assert torch.equal(batch.step()[mine], alone.decode(token))
    goes_on(batch, mine, alone, 6)


def test_who_is_cut_or_goes_on_after_it_was_fed_takes_nothing(pair):
    batch, mine, _, beside = pair(Window(tokens=40))
    batch.feed(mine, 5), batch.feed(beside, 5)
    mine.truncate(101, later=True)
    beside.decode(1)
    assert batch.step() == {} and (len(mine), len(beside)) == (101, 41)


def test_who_fails_on_its_way_back_fails_alone(pair, monkeypatch):
    batch, mine, _, beside = pair(Window(tokens=40))
    batch.feed(mine, 5), batch.feed(beside, 5)
    broken(monkeypatch, mine.runtime, "commit", mine.runtime.commit)
    with pytest.raises(KeyboardInterrupt):
        batch.step()

    def fails(*_):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(mine.runtime, "load", fails)
        done = batch.step()
    assert isinstance(done[mine], RuntimeError) and len(mine) == 102
    assert beside.ids == [*IDS[:40], 5] and torch.equal(done[beside], beside.last_logits)


@pytest.mark.parametrize("method", [Full(), SPARSE, Window(tokens=40)], ids=lambda m: m.name)
def test_a_session_alone_keeps_them_too(llm, monkeypatch, method):
    with llm.session(method) as session, llm.session(method) as other:
        session.prefill(IDS), other.prefill(IDS)
        broken(monkeypatch, session.runner, "left_selection", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            session.decode(5)
        if len(session) == 100:
            session.decode(5)
        assert torch.equal(session.last_logits, other.decode(5))
        before = session.last_logits
        broken(monkeypatch, session.runtime, "commit", session.runtime.commit)
        with pytest.raises(KeyboardInterrupt):
            session.decode(6)
        assert len(session) == 101 and session.last_logits is before
        assert torch.equal(session.decode(6), other.decode(6))


def test_an_answer_that_is_stopped_after_an_interrupt_takes_nothing_more(llm, monkeypatch):
    """Its token was fed, and the step that was to take it broke off."""
    answer = SamplingParams(max_tokens=5, ignore_eos=True)
    with llm.batch(2) as batch:
        first, second = batch.session(), batch.session()
        for session in (first, second):
            session.prefill(IDS[:40])
            batch.write(session, [], answer)
        broken(monkeypatch, first.runtime, "attend", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            for _ in batch.run():
                pass
        batch.stop(first)
        for _ in batch.run():
            pass
        assert len(first) == 40 and len(second) == 45


def test_a_failure_that_an_interrupt_hides_is_told_by_the_next_step(pair, monkeypatch):
    batch, mine, alone, beside = pair(Full())
    batch.feed(mine, 5), batch.feed(beside, 5)

    def fails(*_):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(mine.bank, "before_step", fails)
        real = beside.bank.before_step
        calls = iter([KeyboardInterrupt])

        def breaks(n):
            for error in calls:
                raise error
            real(n)

        patch.setattr(beside.bank, "before_step", breaks)
        with pytest.raises(KeyboardInterrupt):
            batch.step()
        done = batch.step()
    assert "planted" in str(done[mine]) and len(mine) == 102 and len(beside) == 41
    assert batch.step() == {}
    goes_on(batch, mine, alone, 6)


def test_pieces_of_an_answer_that_was_stopped_do_not_come_later(llm, monkeypatch):
    """Of a round that was interrupted after one of its answers had a piece."""
    answer = SamplingParams(max_tokens=5, ignore_eos=True)
    with llm.batch(2) as batch:
        sessions = [batch.session(), batch.session()]
        for session in sessions:
            session.prefill(IDS[:40])
            batch.write(session, [], answer)
        broken(monkeypatch, sessions[1].counters, "count_step", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            for _ in batch.run():
                pass
        real = batch.scheduler.schedule

        def interrupted():
            real()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(batch.scheduler, "schedule", interrupted)
            for _ in batch.run():
                pass
        batch.stop(sessions[0])
        told = [session for session, _ in batch.run()]
        assert told == [sessions[1]] * 5, "the other's are not lost"


def test_an_answer_whose_step_nobody_could_take_takes_nothing_more(llm, monkeypatch):
    with llm.batch(2) as batch:
        session, other = batch.session(), batch.session()
        session.prefill(IDS[:40]), other.prefill(IDS[:40])
        batch.write(session, [], SamplingParams(max_tokens=5, ignore_eos=True))

        def fails(*_):
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(batch._stepping, "forget", fails)
            assert "planted" in str([piece for _, piece in batch.run()])
        batch.feed(other, 3)
        assert set(batch.step()) == {other} and len(session) == 40


def test_who_keeps_a_token_knows_how_its_row_came_about(llm, monkeypatch):
    """Rows of a sparse answer are nobody else's, also where a prompt's were there before."""
    with llm.session() as session:
        session.prefill(IDS)
        assert session.origins.text(0, 100) == FULL
        session.truncate(90)
        broken(monkeypatch, session.origins, "add", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            session.decode(5)
        assert len(session) == 90 or session.origins.text(89, 91) is None
        broken(monkeypatch, session.runner, "rows_read", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            session.decode(5)
        assert len(session) == 91 and session.origins.text(90, 91) is None


def test_a_chunk_that_was_read_is_known_by_how_it_was_read(llm, monkeypatch):
    with llm.session() as session:
        session.prefill(IDS[:64])
        for token in (3, 4):
            session.decode(token)
        session.truncate(64)
        broken(monkeypatch, session.origins, "add", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(IDS[64:])
        assert session.origins.text(0, len(session)) == FULL


@pytest.mark.parametrize("how", ["alone", "batch"])
def test_an_interrupt_in_an_answer_leaves_the_llm_free(llm, how):
    """At any line of its loop and of its end, even where somebody keeps the exception, whose frames
    hold the request.
    """
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def interrupted(lines):
        """Whether the answer was interrupted after so many lines."""

        def counts(frame, event, argument):
            nonlocal lines
            if frame.f_code not in (Batch.run.__code__, generate.__code__):
                return None
            lines -= event == "line"
            if lines < 0:
                sys.settrace(None)
                raise KeyboardInterrupt(frame.f_lineno)
            return counts

        with llm.batch(1) as batch, llm.session() as alone:
            pieces = alone.generate(IDS[:5], params)
            if how == "batch":
                batch.write(batch.session(), IDS[:5], params)
                pieces = batch.run()
            before = sys.gettrace()
            try:
                sys.settrace(counts)
                list(pieces)
            except KeyboardInterrupt as kept:
                sys.settrace(before)
                assert kept and llm._lock.free, f"at line {kept}"
                return True
            finally:
                sys.settrace(before)
        return False

    lines = next(lines for lines in range(200) if not interrupted(lines))
    assert lines > 15
