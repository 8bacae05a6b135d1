"""Methods that forget: no bank stands beside their store, and everything else is as with one.

The control is the same method with a bank, which tests of its own hold to float64 simulations.
Stops: a row that is freed too early or never, a plan that says less than is held, a way back over
rows that are gone, a store from a file that is none.
"""

import gc
import math
from dataclasses import replace

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import SavedFileError, SettingError
from engine.methods.evict.ada_snapkv import AdaSnapKV
from engine.methods.evict.duo import Duo
from engine.methods.evict.h2o import H2O
from engine.methods.evict.h2o_plus import H2OPlus
from engine.methods.evict.keyformer import Keyformer
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.shared import by_position
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.snapkv_plus import SnapKVPlus
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window
from engine.saved.container import Reader
from kernels.prefill.window import prefill_window_lse
from tests.builders import random_ids, tiny_llm
from tests.engine.methods.method_checks import allocated, llm_of
from tests.engine.methods.method_table import CAPACITY, duo_gates, every, with_bank

CONSTANT = (Window(tokens=40), StreamingLLM(tokens=40), LMInfinite(tokens=40))
KINDS = (
    *CONSTANT,
    H2O(tokens=40),
    H2OPlus(tokens=40, segment=50),
    SnapKV(tokens=40, window=8),
    Duo(gates=duo_gates(), sinks=4, recent=36),
)


def forgetting(method):
    """The method, without a bank."""
    return replace(method, forget=True)


def turns(session, ids, most=None, first=300):
    """Two prompts and two answers up to `most` tokens: logits of every call."""
    found, at = [], 0
    for prompt, answer in ((first, 6), (90, 6)):
        part = ids[at : at + prompt][: None if most is None else max(0, most - at)]
        if part:
            found.append(session.prefill(part))
        at += prompt
        for token in ids[at : at + answer][: None if most is None else max(0, most - at)]:
            found.append(session.decode(token))
        at += answer
    return found


@pytest.mark.parametrize(
    ("row", "method"),
    [pytest.param(row, method, id=name) for name, row, method in every(lambda row: row.evicts)],
)
def test_every_method_answers_as_with_a_bank_and_holds_what_is_planned(row, method):
    """The same rows, so the same logits; and no more than the plan says, at any chunk's end."""
    llm, ids, most = llm_of(), random_ids(402, seed=5), 0
    with llm.session(with_bank(method)) as kept, llm.session(forgetting(method)) as session:
        expected = turns(kept, ids)

        def look(_):
            nonlocal most
            most = max(most, held(session))

        at = 0
        for prompt, answer in ((300, 6), (90, 6)):
            found = [session.prefill(ids[at : at + prompt], look)]
            found += [session.decode(token) for token in ids[at + prompt : at + prompt + answer]]
            for mine, theirs in zip(found, expected[len(expected) * (at > 0) // 2 :]):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
            at += prompt + answer
            look(None)
        layers = range(session.plan.num_layers)
        positions = [session.runtime.positions(layer) for layer in layers]
        assert positions == [kept.runtime.positions(layer) for layer in layers]
        # it was sparse
        assert all((min if row.by_head else max)(map(len, layer)) < 402 for layer in positions)
        assert session.bank.nbytes < kept.bank.nbytes // 100  # a step's row in each layer
        assert most <= planned(llm.plan(forgetting(method)))


def held(session):
    """Bytes of every tensor of K, V, scores and queries to go back to, each counted once."""
    points = [session.history.savepoints, session.query_ring.kept]
    return allocated([session.bank, session.runtime, points])


def planned(plan):
    """What the plan says of them."""
    names = ("context bank", "retained rows", "savepoints")
    return sum(size for name, size, _ in plan.items if name in names)


@pytest.mark.parametrize("method", KINDS, ids=lambda method: method.name)
def test_the_plan_is_within_five_percent_of_what_a_full_session_holds(method):
    """Every tensor, before each commit, where most is held: two short prompts leave the stores to
    go back to, and a long one fills the context; a long one first where some heads keep it all.
    """
    grows = isinstance(method, Duo)
    llm, ids, sizes = llm_of(chunk=8 if grows else 64), random_ids(CAPACITY, seed=5), []
    with llm.session(forgetting(method)) as session:
        commit = session.runtime.commit

        def look(count):
            sizes.append(held(session))
            commit(count)

        session.runtime.commit = look
        one, two = (495, 496) if grows else (64, 65)
        for first, stop in ((0, one), (one, two), (two, CAPACITY - 4)):
            session.prefill(ids[first:stop])
        for token in ids[-4:]:
            session.decode(token)
        most, due = max(sizes), planned(llm.plan(forgetting(method)))
    assert 0.95 * due <= most <= due + 128, (most, due)  # constants of the runtime


@pytest.mark.parametrize("share", [0.45, 0.6])
def test_a_plan_of_two_large_stores_counts_what_is_there_beside_them(share):
    """Stores of two prompts whose ends are a chunk and a token before a third's: no whole prompt
    waits beside them, nor its scores, nor is a whole layer's cut.
    """
    llm, ids, sizes, chunk = llm_of(chunk=64), random_ids(CAPACITY, seed=5), [], 64
    method = Keyformer(share=share, forget=True)
    with llm.session(method) as session:
        commit = session.runtime.commit

        def look(count):
            sizes.append(held(session))
            commit(count)

        session.runtime.commit = look
        last, first = CAPACITY - 4, 0
        for stop in (last - chunk - 1, last - chunk, last):
            session.prefill(ids[first:stop])
            first = stop
        for token in ids[-4:]:
            session.decode(token)
    plan = llm.plan(method)
    config, cut = llm.config, plan.bytes_of("cut of a layer")
    kept = int(share * CAPACITY)
    # of the layer that is cut: what was kept and a chunk, joined, and what is kept of that
    own = (2 * kept + chunk) * config.kv_bytes(4)
    due = planned(plan) + cut
    # what a chunk's scores take as they are summed is not seen at its commit
    assert 0.88 * due <= max(sizes) + own <= due, (max(sizes), own, due)


@pytest.mark.parametrize("segment", (48, 50, 64, 97, 128, 192))
def test_rows_that_wait_for_a_segments_end_are_planned_and_suffice(segment):
    """A segment of whole chunks waits for its last one alone; one of a prime number for all."""
    llm, ids, seen = llm_of(chunk=64), random_ids(CAPACITY - 4, seed=5), []
    method = forgetting(SnapKVPlus(tokens=40, window=8, segment=segment))
    with llm.session(method) as session:
        commit = session.runtime.commit

        def look(count):
            seen.append(session.bank.nbytes)
            commit(count)

        session.runtime.commit = look
        session.prefill(ids[:300])
        session.decode(ids[0])
        session.prefill(ids[301:])
    most = 64 + segment - math.gcd(segment, 64)
    due = llm.plan(method).bytes_of("context bank")
    # a step's row of every layer beside the rows of a chunk and of its segment
    assert due == len(llm.config.keeping_layers) * (most + 2) * llm.config.kv_bytes(4)
    assert 0.95 * due <= max(seen) <= due


@pytest.mark.parametrize("method", CONSTANT, ids=lambda method: method.name)
def test_a_stream_takes_constant_memory(method):
    """Prompts and answers, ten times as long as what is held: not a byte more from the second
    on. Tensors are walked by the collector too, so that none hides.
    """
    llm, sizes, alive = llm_of(), [], []
    with llm.session(forgetting(method)) as session:
        for turn in range(7):
            session.prefill(random_ids(50, seed=turn))
            for token in random_ids(9, seed=turn):
                session.decode(token)
            sizes.append(held(session))
            gc.collect()
            alive.append(sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor))
        assert len(session) > 10 * 40
        assert len(session.runtime.positions(0)[0]) == 40
    assert len(set(sizes[2:])) == 1 and len(set(alive[2:])) == 1, (sizes, alive)


@pytest.mark.parametrize(
    ("shape", "forget"), [((1, 2, 2), True), ((2, 4, 1), False), ((1, 8, 1), True)], ids=str
)
def test_windows_are_read_as_runs_and_as_blocks_alike(shape, forget, monkeypatch):
    """The second prompt meets a store whose rows an answer has put out of order, with another
    number of sinks; a chunk of 64 is longer and shorter than the windows.
    """
    ids, runs = random_ids(402, seed=5), []

    def counted(q, k, v, past, window, *given):
        runs.append(q.shape[1])
        return prefill_window_lse(q, k, v, past, window, *given)

    monkeypatch.setattr(by_position, "prefill_window_lse", counted)
    others = Window(tokens=1), LMInfinite(tokens=41, sink=40), StreamingLLM(share=0.05)
    for method in (*CONSTANT, *others):
        given = replace(method, forget=forget and method.tokens is not None)
        found = []
        for backend in ("reference", "cpu"):
            before = len(runs)
            with llm_of(shape, backend=backend).session(given) as session:
                found.append(turns(session, ids))
            assert (len(runs) > before) == (backend == "cpu")
        for mine, theirs in zip(*found):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", [SnapKV(tokens=40, window=8), Window(tokens=40)], ids=str)
def test_no_more_stores_are_held_than_may_be_kept_while_one_is_copied(method):
    held, ids = [], random_ids(402, seed=5)
    with llm_of().session(forgetting(method)) as session:
        savepoint = session.runtime.savepoint

        def look():
            held.append(sum(p.state is not None for p in session.history.savepoints))
            return savepoint()

        session.runtime.savepoint = look
        for at in range(0, 400, 50):
            session.prefill(ids[at : at + 50])
        assert held == [0, 1, *[1] * 6]
        assert sum(p.state is not None for p in session.history.savepoints) == 2
        assert session.tokens_again(399) == 49


@pytest.mark.parametrize("method", KINDS, ids=lambda method: method.name)
def test_going_back_is_exact_and_says_how_many_tokens_it_reads_again(method):
    """To places before and behind the last two prompts' ends, which keep their stores."""
    llm, ids = llm_of(), random_ids(402, seed=5)
    with llm.session(forgetting(method)) as session:
        turns(session, ids)
        for n in (401, 396, 393, 306, 303, 100):
            with session.fork() as copy, llm.session(forgetting(method)) as fresh:
                again = copy.tokens_again(n)
                read = copy.stats.prefill_tokens
                copy.truncate(n)
                turns(fresh, ids, n)
                torch.testing.assert_close(copy.decode(7), fresh.decode(7), atol=1e-5, rtol=0)
                assert copy.stats.prefill_tokens == read
            kept = 0 if method.name == "h2o" or n < 300 else 300 if n < 396 else 396
            assert again == n - kept


def test_another_method_reads_the_tokens_again_and_says_how_many():
    llm, ids = llm_of(), random_ids(402, seed=5)
    with llm.session(forgetting(SnapKV(tokens=40))) as session, llm.session(Full()) as fresh:
        turns(session, ids)
        assert session.reads_again(session.method) == 0
        assert session.reads_again(Full()) == 402
        session.set_method(Full())
        assert not session.bank.forgets and session.ids == ids
        fresh.prefill(ids)
        assert torch.equal(session.decode(7), fresh.decode(7))
        assert session.reads_again(OmniKV()) == 0


@pytest.mark.parametrize("method", [H2O(tokens=40), SnapKV(tokens=40, window=8)], ids=str)
def test_a_store_is_made_of_another_methods_bank_which_then_goes(method):
    llm, ids = llm_of(), random_ids(300, seed=5)
    with llm.session(Full()) as session, llm.session(Full()) as kept:
        for one, other in ((session, forgetting(method)), (kept, with_bank(method))):
            one.prefill(ids)
            one.set_method(other)
        for token in (7, 8, 9):
            assert torch.equal(session.decode(token), kept.decode(token))
        assert session.bank.nbytes < kept.bank.nbytes // 100


def test_a_switch_that_is_interrupted_before_it_reads_has_no_logits_of_the_method_before(
    monkeypatch,
):
    llm, ids = llm_of(), random_ids(300, seed=5)
    with llm.session(forgetting(Window(tokens=40))) as session, llm.session(Full()) as fresh:
        session.prefill(ids)
        postpone = session.history.postpone

        def stop(pending):
            postpone(pending)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(session.history, "postpone", stop)
            with pytest.raises(KeyboardInterrupt):
                session.set_method(Full())
        assert session.method == Full() and session.ids == ids and session.last_logits is None
        session.refresh_logits()
        assert torch.equal(session.last_logits, fresh.prefill(ids))


def test_a_switch_that_is_interrupted_reads_on_in_the_next_call():
    llm, ids = llm_of(), random_ids(300, seed=5)
    with llm.session(forgetting(Window(tokens=40))) as session, llm.session(Full()) as fresh:
        session.prefill(ids)

        def stop(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.set_method(Full(), stop)
        assert session.ids == ids
        fresh.prefill(ids)
        assert torch.equal(session.decode(7), fresh.decode(7))


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize(
    "method", [StreamingLLM(tokens=40), H2O(tokens=40), AdaSnapKV(tokens=40, window=8)], ids=str
)
def test_a_store_is_saved_with_its_rows(method, tmp_path):
    llm, ids, path = llm_of(), random_ids(402, seed=5), tmp_path / "session"
    with llm.session(forgetting(method)) as session:
        turns(session, ids)
        session.save(path)
        back, _ = llm.restore(path)
        with back, llm.session(with_bank(method)) as kept:
            turns(kept, ids)
            assert path.stat().st_size < kept.bank.nbytes
            for n in (402, 399):
                back.truncate(n), session.truncate(n)
                assert torch.equal(back.fork().decode(7), session.fork().decode(7))


def test_what_is_not_cut_yet_is_not_saved(tmp_path):
    llm = llm_of()
    with llm.session(forgetting(H2O(tokens=40))) as session:
        session.prefill(random_ids(300))
        with pytest.raises(SettingError, match="300 tokens of h2o that are not cut yet"):
            session.save(tmp_path / "session")
    with llm.session(with_bank(H2O(tokens=40))) as session:
        with pytest.raises(SettingError, match="or one with forget=True"):
            session.save(tmp_path / "session")


@pytest.mark.parametrize("damage", range(9))
def test_a_file_whose_store_is_none_is_refused(damage, tmp_path):
    """Whoever writes a file can sum it too: what is in it is looked at."""
    llm, path = llm_of(), tmp_path / "session"
    with llm.session(forgetting(AdaSnapKV(tokens=40, window=8))) as session:
        session.prefill(random_ids(300))
        runtime = session.runtime
        at, prompt, budgets, layers, sums = runtime.state()
        first, stop, positions, scores, base, (k, v) = layers[0][0]
        far = positions.clone()
        far[0, 0] = 300
        same = positions.clone()
        same[0, 0] = same[0, 1]
        parts = [
            (first, stop, far, scores, base, (k, v)),
            (first, stop, same, scores, base, (k, v)),
            (first, stop, positions.long(), scores, base, (k, v)),
            (first, stop, positions, scores, base, (k[:, 1:], v)),
            (first, stop, positions, scores, base, (k, v.half())),
            (first, stop, positions, scores, 1 << 40, (k, v)),
            (first + 1, stop + 1, positions, scores, base, (k, v)),
            (first, stop, positions, positions, base, (k, v)),
        ]
        if damage < len(parts):
            layers[0][0] = parts[damage]
        else:
            layers.pop()
        runtime.state = lambda: (at, prompt, budgets, layers, sums)
        session.save(path)
    with Reader(path):
        pass  # its sums are right
    with pytest.raises(SavedFileError, match="makes no session"):
        llm.restore(path)


# ---------------------------------------------------------------- bad input, batches, plans


def test_rows_of_others_and_words_for_flags_are_refused():
    llm = llm_of()
    with llm.session(forgetting(SnapKV(tokens=40))) as session:
        with pytest.raises(SettingError, match="adopt: found snapkv with forget=True"):
            session.adopt([1, 2, 3])
    with pytest.raises(SettingError, match="forget: found 'yes', expected True or False"):
        SnapKV(tokens=40, forget="yes")
    with pytest.raises(SettingError, match="expected at least the window of 32 tokens"):
        SnapKV(tokens=8, forget=True)


def test_sessions_of_a_batch_forget():
    method = forgetting(StreamingLLM(tokens=40))
    llm = tiny_llm(method, max_context=256, chunk=64)
    batch, prompts = llm.batch(slots=2), [random_ids(100, seed=i) for i in range(2)]
    sessions = [batch.session() for _ in prompts]
    for session, ids in zip(sessions, prompts):
        session.prefill(ids)
    for token in (5, 6):
        for session in sessions:
            batch.feed(session, token)
        together = batch.step()
        for session, ids in zip(sessions, prompts):
            with llm.session() as alone:
                alone.prefill(ids)
                for one in (5, 6)[: token - 4]:
                    logits = alone.decode(one)
                torch.testing.assert_close(together[session], logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("method", "most"),
    [(StreamingLLM(), 0.9e9), (H2OPlus(), 22.6e9), (H2O(), 19.6e9), (SnapKV(), 19e9)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_plans_of_an_8b_at_128k(method, most):
    """Beside 16.06 GB of weights; full attention takes 17.6 GB there. A method that cuts at a
    prompt's end has all of the prompt until then.
    """
    llm = LLM(
        "llama-3-8b-262k",
        method=forgetting(method),
        max_context=131072,
        load=False,
        dtype="bfloat16",
    )
    plan = llm.plan()
    beside = plan.total - plan.bytes_of("weights")
    assert 0.8 * most < beside < most
    assert "nothing else of the prompt" in str(plan)
