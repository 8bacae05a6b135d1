"""Several sessions in one decode step: each says what it says alone.

Stops: rows or logits that go to another's slot, a tail, a budget or a length that is shared, a
product whose bits depend on who else is in it, an error or an interrupt that costs a neighbour a
token, an answer that waits for another's whole prompt.
"""

import random

import pytest
import torch

import engine.runner.prefill
from engine import Full, OmniKV, SamplingParams
from engine.base.errors import ContextTooLong, SessionClosed, SettingError
from engine.batch.chunking import ChunkBudget
from engine.methods.exact import Exact
from engine.methods.mass_meter import Watch
from engine.methods.omnikv.method import OmniKV as Sparse
from engine.session.session import open_session
from tests.builders import random_ids, tiny_llm
from tests.engine.methods.method_table import OF_SESSIONS

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
OFFICIAL = Sparse(filter_layers=(1, 4), tokens=24, dense_below=0, official=True)
METHODS = [
    *(method for row in OF_SESSIONS for method in (row.sparse or (row.neutral,))),
    OFFICIAL,
    Exact(SPARSE),
]
CAPACITY = 512
SETTINGS = dict(max_context=CAPACITY, chunk=64, threads=1)


@pytest.fixture(scope="module")
def reference():
    return tiny_llm(SPARSE, backend="reference", **SETTINGS)


@pytest.fixture(scope="module")
def fast():
    return tiny_llm(SPARSE, **SETTINGS)


def same(one, other, exact):
    if exact:
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


class Twin:
    """A session of a batch, and one alone to which the same happens."""

    def __init__(self, batch, rng):
        loaded, method = batch.loaded, rng.choice(METHODS)
        offload = rng.choice(["device", "host"])
        if offload == "host" and not method.plan(loaded.config).sparse_layers:
            offload = "device"
        self.rng, self.mine = rng, batch.session(method, offload=offload)
        self.alone = open_session(loaded, batch.planner, method, offload=offload)
        self.read(rng.choice([1, 5, 40, 64, 65, 130, 200]))

    def read(self, count):
        ids = random_ids(count, seed=self.rng.getrandbits(30))
        try:
            self.alone.prefill(ids)
        except SettingError:  # a method of one prompt, or of a longest one
            return
        self.mine.prefill(ids)

    def truncate(self):
        n = self.rng.randint(1, len(self.mine))
        for session in (self.mine, self.alone):
            session.truncate(n)

    def close(self):
        self.mine.close()
        self.alone.close()


def mix(llm, seed, exact, rounds=8):
    """Random joins, leaves, truncates, second prompts and steps of some or all; returns how many
    logits were compared.
    """
    rng, twins, compared = random.Random(seed), [], 0
    with llm.batch(slots=4) as batch:
        for _ in range(rounds):
            if len(twins) < 4 and (len(twins) < 2 or rng.random() < 0.5):
                twins.append(Twin(batch, rng))
            if len(twins) > 2 and rng.random() < 0.2:
                twins.pop(rng.randrange(len(twins))).close()
            changed = rng.choice(twins)
            if rng.random() < 0.3:
                changed.truncate()
            elif rng.random() < 0.2:
                changed.read(rng.choice([3, 70]))
            for _ in range(rng.randint(1, 3)):
                fed = rng.sample(twins, rng.randint(1, len(twins)))
                tokens = [rng.randrange(llm.config.vocab_size) for _ in fed]
                for twin, token in zip(fed, tokens):
                    batch.feed(twin.mine, token)
                found = batch.step()
                assert list(found) == [twin.mine for twin in fed] or len(found) == len(fed)
                for twin, token in zip(fed, tokens):
                    same(found[twin.mine], twin.alone.decode(token), exact)
                    assert twin.mine.ids == twin.alone.ids
                    assert twin.mine.last_logits is found[twin.mine]
                    compared += 1
        for twin in twins:
            stats = [session.stats.to_dict() for session in (twin.mine, twin.alone)]
            for name in ("decode_steps", "sparse_steps", "decode_bytes", "bank_bytes"):
                assert stats[0].get(name) == stats[1].get(name), name
            twin.close()
    return compared


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_says_what_it_says_alone(reference, seed):
    assert mix(reference, seed, exact=True) > 8


@pytest.mark.parametrize("seed", range(100, 101))
def test_a_sequence_says_what_it_says_alone_on_the_fast_kernels(fast, seed):
    assert mix(fast, seed, exact=False) > 8


@pytest.mark.parametrize("number", range(len(METHODS)))
def test_every_method_beside_another(reference, number):
    """Both sparse: half of its neighbours are of the same method, over other texts."""
    method = METHODS[number]
    with reference.batch() as batch:
        sessions = [batch.session(m) for m in (method, SPARSE, method)]
        for seed, session in enumerate(sessions):
            session.prefill(random_ids(100 + 17 * seed, seed=seed))
        alone = [session.fork() for session in sessions]
        for token in random_ids(2, seed=9):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, other in zip(sessions, alone):
                same(found[session], other.decode(token), exact=True)
                if session.selections:
                    assert all(
                        torch.equal(mine, other.selections[layer])
                        for layer, mine in session.selections.items()
                    )
        assert sessions[1].stats.sparse_steps == 2
        for other in alone:
            other.close()


# ---------------------------------------------------------------- answers


PROMPTS = [random_ids(n, seed=n) for n in (20, 500, 70, 260)]
WRITTEN = SamplingParams(max_tokens=7, ignore_eos=True)


def told(batch):
    """{session: its pieces}; raises what ended an answer."""
    found = {}
    for session, piece in batch.run():
        if isinstance(piece, Exception):
            raise piece
        found.setdefault(session, []).append(piece)
    return found


def test_answers_of_different_samplers_and_ends(reference):
    """Greedy, seeded, with probabilities, with a token that ends it, at the end of the context."""
    kinds = [
        WRITTEN,
        SamplingParams(max_tokens=9, temperature=0.8, seed=5, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=30, stop_token_ids=tuple(range(0, 97, 7))),
        SamplingParams(max_tokens=300, ignore_eos=True, repetition_penalty=1.2),
    ]
    with reference.batch() as batch:
        sessions = [batch.session(max_context=len(p) + 12) for p in PROMPTS]
        for session, ids, params in zip(sessions, PROMPTS, kinds):
            batch.write(session, ids, params)
        found = told(batch)
        for session, ids, params in zip(sessions, PROMPTS, kinds):
            with reference.session(max_context=len(ids) + 12) as alone:
                for mine, theirs in zip(found[session], alone.generate(ids, params), strict=True):
                    assert mine.token_id == theirs.token_id and mine.text == theirs.text
                    assert mine.top_logprobs == theirs.top_logprobs
                    assert mine.finish_reason == theirs.finish_reason
                assert mine.stats.sparse_steps == theirs.stats.sparse_steps
                assert session.ids == alone.ids
                assert torch.equal(session.last_logits, alone.last_logits)
        assert found[sessions[3]][-1].finish_reason == "context"


def test_an_answer_goes_on_without_new_tokens(reference):
    """write(session, []) goes on from what is held; there must be something."""
    with reference.batch() as batch:
        session = batch.session()
        with pytest.raises(SettingError, match="found no tokens"):
            batch.write(session, [])
        batch.write(session, PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
        begun = told(batch)[session]
        batch.write(session, [], SamplingParams(max_tokens=5, ignore_eos=True))
        ids = [piece.token_id for piece in begun + told(batch)[session]]
        with reference.session() as alone:
            whole = alone.generate(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
            assert [piece.token_id for piece in whole] == ids


def test_nobody_waits_for_more_than_one_chunk(reference, monkeypatch):
    """By the order of events: between two steps of a writer at most one chunk of all others."""
    events = []
    real = engine.runner.prefill._read_chunk
    monkeypatch.setattr(
        "engine.runner.prefill._read_chunk",
        lambda session, *a: (events.append(("chunk", len(a[0]))), real(session, *a))[1],
    )
    with reference.batch() as batch:
        first = batch.session()
        batch.write(first, PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        joined = False
        for session, _ in batch.run():
            events.append(("piece", session))
            if not joined:
                joined = True
                for ids in PROMPTS[1:]:
                    batch.write(batch.session(), ids, WRITTEN)
    mine = [i for i, event in enumerate(events) if event == ("piece", first)]
    chunks = [
        sum(size for kind, size in events[a:b] if kind == "chunk") for a, b in zip(mine, mine[1:])
    ]
    assert len(mine) == 40 and max(chunks) == 64 and sum(chunks) == sum(map(len, PROMPTS[1:]))


def test_chunks_follow_the_pause():
    now = [0.0]
    pace = ChunkBudget(1024, 0.5, clock=lambda: now[0])
    sizes = []
    for _ in range(8):
        size = pace.tokens(others=True)
        pace.took(size, size / 600)  # this machine reads 600 tokens a second: 300 in a pause
        sizes.append(size)
    assert sizes == [64, 128, 256, *[256] * 5]
    pace.took(256, 100.0)
    assert pace.tokens(others=True) == 64, "the least, however slow"
    assert pace.tokens(others=False) == 1024
    pace.took(3, 1.0)
    assert ChunkBudget(1024).tokens(others=True) == 1024 and ChunkBudget(32, 0.1).tokens(True) == 32
    with pytest.raises(SettingError, match="pause: found 0"):
        ChunkBudget(64, 0)


def test_a_prompt_is_read_in_smaller_chunks_while_others_write(fast):
    with fast.batch(pause=1e-9) as batch:
        first, second = batch.session(), batch.session()
        batch.write(first, PROMPTS[0], WRITTEN)
        batch.write(second, PROMPTS[1], WRITTEN)
        assert len(told(batch)[second]) == 7
        with pytest.raises(SettingError, match="reads a whole prompt in one call"):
            batch.session(OFFICIAL)


# ---------------------------------------------------------------- failures


def opened(batch, count=3):
    sessions = [batch.session() for _ in range(count)]
    for seed, session in enumerate(sessions):
        session.prefill(random_ids(100 + seed, seed=seed))
    return sessions


def ends(llm, batch, sessions, histories):
    """Every session goes on as one alone that took these tokens."""
    for session, tokens in zip(sessions, histories):
        assert session.ids[-len(tokens) :] == tokens
        with llm.session() as alone:
            alone.prefill(session.ids[: -len(tokens)])
            for token in tokens:
                logits = alone.decode(token)
            if session.last_logits is None:  # a commit broke off
                session.refresh_logits()
            assert torch.equal(session.last_logits, logits)
            batch.feed(session, 3)
            assert torch.equal(batch.step()[session], alone.decode(3))


@pytest.mark.parametrize("where", ["attend", "commit", "before_step"])
def test_who_fails_fails_alone(reference, monkeypatch, where):
    with reference.batch() as batch:
        sessions = opened(batch)
        broken = sessions[1]
        for session in sessions:
            batch.feed(session, 5)
        batch.step()

        def fails(*arguments, **named):
            raise RuntimeError("planted")

        target = broken.bank if where == "before_step" else broken.runtime
        with monkeypatch.context() as patch:
            patch.setattr(target, where, fails)
            for session in sessions:
                batch.feed(session, 7)
            found = batch.step()
        assert isinstance(found.pop(broken), RuntimeError)
        assert set(found) == {sessions[0], sessions[2]}
        ends(reference, batch, sessions, [[5, 7], [5], [5, 7]])


def test_an_interrupt_leaves_every_session_before_or_after_its_step(reference, monkeypatch):
    with reference.batch() as batch:
        sessions = opened(batch)
        calls = [0]
        for session in sessions:
            real = session.runtime.commit

            def commit(count, real=real):
                calls[0] += 1
                if calls[0] == 5:  # the second session's, in the second step
                    raise KeyboardInterrupt
                real(count)

            monkeypatch.setattr(session.runtime, "commit", commit)
        for token in (5, 7):
            for session in sessions:
                batch.feed(session, token)
            try:
                batch.step()
            except KeyboardInterrupt:
                assert token == 7
                assert [s.ids[-1] for s in sessions] == [7, 5, 5]
                found = batch.step()  # those before it are still fed
                assert set(found) == set(sessions[1:])
        assert calls[0] == 7
        ends(reference, batch, sessions, [[5, 7]] * 3)


def test_an_answer_that_fails_ends_with_its_exception(reference, monkeypatch):
    with reference.batch() as batch:
        sessions = [batch.session() for _ in range(3)]
        for session, ids in zip(sessions, PROMPTS):
            batch.write(session, ids[:60], WRITTEN)
        found = {session: [] for session in sessions}
        for session, piece in batch.run():
            found[session].append(piece)
            if session is sessions[1] and len(found[session]) == 2:
                monkeypatch.setattr(session.runtime, "attend", None)
            if session is sessions[2] and len(found[session]) == 3:
                batch.stop(session)
        assert [len(found[session]) for session in sessions] == [7, 3, 3]
        assert isinstance(found[sessions[1]][-1], TypeError)
        assert found[sessions[0]][-1].finish_reason == "length"
        with reference.session() as alone:
            wanted = [p.token_id for p in alone.generate(PROMPTS[0][:60], WRITTEN)]
        assert [p.token_id for p in found[sessions[0]]] == wanted


def test_an_interrupted_run_goes_on(reference):
    """Also where the interrupt met a step that was committed."""
    with reference.batch() as batch:
        sessions = [batch.session() for _ in range(2)]
        for session, ids in zip(sessions, PROMPTS):
            batch.write(session, ids[:60], WRITTEN)
        found, step, count = {session: [] for session in sessions}, batch.step, [0]

        def interrupted():
            count[0] += 1
            done = step()
            if count[0] == 4:
                raise KeyboardInterrupt
            return done

        batch.step = interrupted
        for _ in range(2):
            try:
                for session, piece in batch.run():
                    found[session].append(piece.token_id)
            except KeyboardInterrupt:
                pass
        for session, ids in zip(sessions, PROMPTS):
            with reference.session() as alone:
                assert found[session] == [p.token_id for p in alone.generate(ids[:60], WRITTEN)]


def test_what_cannot_be_is_one_line(reference, fast):
    with reference.batch(slots=1) as batch:
        session = batch.session(max_context=8)
        with pytest.raises(SettingError, match="expected a free slot of slots=1"):
            batch.session()
        with fast.session() as other, pytest.raises(SettingError, match="another's session"):
            batch.feed(other, 1)
        with pytest.raises(ContextTooLong):
            batch.write(session, range(9))
        session.prefill([1] * 8)
        with pytest.raises(ContextTooLong):
            batch.feed(session, 1)
        with pytest.raises(SettingError, match="expected SamplingParams"):
            batch.write(session, [], 3)
        session.close()
        with pytest.raises(SessionClosed):
            batch.feed(session, 1)
        again = batch.session()
        batch.write(again, [1, 2], WRITTEN)
        with pytest.raises(SettingError, match="answer under way"):
            batch.write(again, [1])
        for _, piece in batch.run():
            if piece.stats.new_tokens == 2:
                again.truncate(1)
                break
        assert "cut to 1 tokens" in str([piece for _, piece in batch.run()][-1])
    assert batch.step() == {} and batch.sessions == []
    with pytest.raises(SettingError, match="slots: found 0"):
        reference.batch(slots=0)


def test_a_watched_session_is_measured_in_its_own_step(reference):
    with reference.batch() as batch:
        sessions = opened(batch)
        alone = sessions[0].fork()
        for session in (sessions[0], alone):
            session.watch = Watch(every=2)
        for token in (4, 5, 6):
            for session in sessions:
                batch.feed(session, token)
            assert torch.equal(batch.step()[sessions[0]], alone.decode(token))
        assert sessions[0].watch == alone.watch and alone.watch.sampled == 2
        alone.close()


def test_an_idle_slot_costs_nothing(reference, monkeypatch):
    with reference.batch() as batch:
        sessions = opened(batch)
        monkeypatch.setattr(sessions[1].runtime, "attend", None)
        monkeypatch.setattr(sessions[1].bank, "write_step", None)
        for session in (sessions[0], sessions[2]):
            batch.feed(session, 3)
        assert len(batch.step()) == 2


def test_the_weights_are_read_once(reference, fast, monkeypatch):
    """Products see the rows of all sequences; on the reference launchers one at a time."""
    from kernels.layer.linear import Linear

    rows, real = [], Linear.own  # which every product asks first
    for llm, wanted in ((fast, {3}), (reference, {1})):
        with llm.batch() as batch:
            sessions = opened(batch)
            for session in sessions:
                batch.feed(session, 3)
            rows.clear()
            with monkeypatch.context() as patch:
                patch.setattr(
                    Linear, "own", lambda s, x: (rows.append(x[..., 0].numel()), real(s, x))[1]
                )
                batch.step()
        assert set(rows) == wanted and len(rows) == (3 if wanted == {1} else 1) * (8 * 4 + 1)


def test_full_attention_and_exact_mode_write_the_same(fast):
    with fast.batch() as batch:
        sessions = [batch.session(method) for method in (Full(), Exact(SPARSE)) * 2]
        for session, ids in zip(sessions, PROMPTS):
            batch.write(session, ids, WRITTEN)
        found = told(batch)
        for session, ids in zip(sessions, PROMPTS):
            with fast.session(Full()) as alone:
                wanted = [p.token_id for p in alone.generate(ids, WRITTEN)]
            assert [p.token_id for p in found[session]] == wanted
        assert sessions[1].stats.cycles > 0
