"""What a random attack found (tests/programs/attack), one test each: a switch after a truncate, a
reading that was interrupted, forks, checks, going back under methods that evict, threads.

Every session is compared with a fresh one that was brought to the same place by the shortest way.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import engine.runner.rewind
from engine import Full, OmniKV, SamplingParams
from engine.base.errors import Busy
from engine.methods.evict.a2sf import A2SF
from engine.methods.evict.ada_snapkv import AdaPyramid, AdaSnapKV
from engine.methods.evict.h2o import H2O
from engine.methods.evict.pyramidkv import PyramidKV
from engine.methods.evict.snapkv import SnapKV
from engine.methods.mass_meter import Watch
from engine.methods.select.infllm import InfLLM
from engine.methods.select.minference import MInference
from engine.methods.select.pod import PodUntrained
from tests.builders import random_ids, tiny_llm

IDS = random_ids(400)
SPARSE = OmniKV(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
BY_QUERIES = (SnapKV(tokens=96), PyramidKV(tokens=100, beta=4), AdaSnapKV(tokens=128),
              AdaPyramid(tokens=80, kernel=1))  # fmt: skip

BY_WINDOW = OmniKV(filter_layers=(1, 4), tokens=20, selector="exponential", tail=64, dense_below=0)
OWN_PROMPTS = (
    InfLLM(block=8, init=8, local=64, topk=9, representatives=2, cached=12, chunk=32),
    MInference(("a_shape", 8, 16)),
    OmniKV(filter_layers=(1, 4), tokens=20, prefill_ratio=1, prefill_block=64, prefill_dense_end=64,
           dense_below=0),
    PodUntrained((0, 2, 5), first=8, recent=64),
)  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(Full(), max_context=512)


def steps(session, tokens=(5, 17, 3)):
    return torch.stack([session.decode(token) for token in tokens])


def same(one, other, atol=2e-4):
    return torch.allclose(steps(one), steps(other), atol=atol, rtol=0)


class Stop(Exception):
    """Raised by a progress callback."""


def stopping(after):
    def progress(_):
        nonlocal after
        after -= 1
        if not after:
            raise Stop

    return progress


@pytest.mark.parametrize("method", BY_QUERIES, ids=lambda m: m.name)
def test_a_switch_after_a_truncate_knows_the_queries(llm, method):
    with llm.session() as session, llm.session() as fresh:
        session.prefill(IDS)
        session.truncate(142)
        fresh.prefill(IDS[:142])
        session.set_method(method)
        fresh.set_method(method)
        assert same(session, fresh)


@pytest.mark.parametrize("method", OWN_PROMPTS, ids=lambda m: m.name)
def test_queries_that_only_the_prompts_own_method_computes_come_back(llm, method, tmp_path):
    with llm.session(method) as session, llm.session(method) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:130])
            one.set_method(BY_WINDOW)
        session.prefill(IDS[130:330])
        session.save(tmp_path / "session")
        session.truncate(130)
        with llm.restore(tmp_path / "session")[0] as restored, session.fork() as copy:
            restored.truncate(130)
            expected = steps(fresh)
            for one in (session, restored, copy):
                assert torch.allclose(steps(one), expected, atol=2e-4, rtol=0)


def test_queries_of_a_short_prompt_after_a_sparse_answer_come_back(llm):
    with llm.session(BY_WINDOW) as session, llm.session(BY_WINDOW) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:150])
            steps(one, range(20))
            one.prefill(IDS[150:153])
        session.prefill(IDS[153:353])
        session.truncate(173)
        assert same(session, fresh)


@pytest.mark.parametrize("after", [1, 3])
def test_h2o_reads_on_after_an_interrupted_reading(llm, after):
    with llm.session(H2O(tokens=40)) as session, llm.session(H2O(tokens=40)) as fresh:
        with pytest.raises(Stop):
            session.prefill(IDS, stopping(after))
        fresh.prefill(IDS[: 64 * after])
        for one in (session, fresh):
            one.prefill(IDS[:50])
        assert same(session, fresh)


def test_steps_that_run_again_and_break_off_leave_no_logits_of_another_token(llm):
    with llm.session(H2O(tokens=40)) as session, llm.session(H2O(tokens=40)) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:50])
        for token in IDS[50:60]:
            session.decode(token)
        session.truncate(56, later=True)
        with pytest.raises(Stop):
            session.prefill(IDS[56:90], stopping(3))
        assert session.ids == IDS[:56] and session.last_logits is None
        for token in IDS[50:56]:
            fresh.decode(token)
        assert same(session, fresh)


@pytest.mark.parametrize("method", [H2O(tokens=40, cut="prefill"), A2SF(tokens=40), *BY_QUERIES])
def test_an_open_prompt_survives_forks_and_truncates(llm, method):
    sessions = [llm.session(method) for _ in range(3)]
    for session in sessions:
        session.prefill(IDS[:31])
        session.decode(7)
        session.prefill(IDS[31:213], more=True)
    one, back, fresh = sessions
    back.prefill(IDS[213:260], more=True)
    back.truncate(214)  # where the first part ended
    with one.fork() as copy:
        for session in (one, copy, back, fresh):
            session.prefill(IDS[213:240])
        expected = steps(fresh)
        for session in (one, copy, back):
            assert torch.allclose(steps(session), expected, atol=2e-4, rtol=0)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("switches", [False, True])
@pytest.mark.parametrize("method", [H2O(tokens=40, cut="prefill"), A2SF(tokens=40), *BY_QUERIES])
def test_a_step_that_is_taken_back_leaves_its_prompt_open_again(llm, method, switches):
    sessions = [llm.session(Full() if switches else method) for _ in range(3)]
    for session in sessions:
        session.prefill(IDS[:31])
        session.set_method(method)
        session.decode(7)
        session.prefill(IDS[31:120], more=True)
    stepped, forked, fresh = sessions
    for session in (stepped, forked):
        steps(session)
    stepped.truncate(121)
    assert stepped.history.prompt_is_open(121)
    with forked.fork() as other:
        other.truncate(121)
        for session in (stepped, other, fresh):
            session.prefill(IDS[120:180])
        expected = steps(fresh)
        for session in (stepped, other):
            assert torch.allclose(steps(session), expected, atol=2e-4, rtol=0)
    for session in sessions:
        session.close()


def test_refreshed_logits_leave_a_prompt_open(llm):
    method = H2O(tokens=40, cut="prefill")
    with llm.session(method) as session, llm.session(method) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:150], more=True)
        session.refresh_logits()
        assert session.history.prompt_is_open(150)
        for one in (session, fresh):
            one.prefill(IDS[150:200])
        assert same(session, fresh)


def test_parts_of_a_later_prompt_are_one_prompt(llm):
    method = H2O(tokens=40, cut="prefill")
    with llm.session(method) as parts, llm.session(method) as whole:
        for session in (parts, whole):
            session.prefill(IDS[:31])
        parts.prefill(IDS[31:159], more=True)
        parts.prefill(IDS[159:223])
        whole.prefill(IDS[31:223])
        assert same(parts, whole)


def test_a_fork_keeps_capacity_backend_and_watch(llm):
    with llm.session(SPARSE, max_context=256) as session:
        session.set_backend("reference")
        session.watch = Watch(every=3)
        session.prefill(IDS[:100])
        with session.fork() as copy:
            assert (copy.capacity, copy.backend, copy.watch) == (256, "reference", session.watch)
            assert copy.watch is not session.watch
            assert copy.bank.nbytes == session.bank.nbytes


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("after", [None, 2])
def test_a_check_after_a_switch_changes_nothing(llm, offload, after):
    sessions = [llm.session(Full(), offload=offload) for _ in range(2)]
    for session in sessions:
        session.prefill(IDS[:300])
        steps(session, range(16))
        session.set_method(SPARSE)
        session.decode(9)
    checked, other = sessions
    chosen = {layer: rows.tolist() for layer, rows in checked.selections.items()}
    ended = None if after is None else stopping(after)
    try:
        checked.check(16, ended and (lambda *_: ended(None)))
    except Stop:
        pass
    assert {layer: rows.tolist() for layer, rows in checked.selections.items()} == chosen
    for layer in range(llm.config.num_layers):
        for mine, theirs in zip(checked.bank.kv(layer, 317), other.bank.kv(layer, 317)):
            assert torch.equal(mine, theirs)
    assert torch.equal(steps(checked), steps(other))
    for session in sessions:
        session.close()


def test_a_switch_that_is_interrupted_leaves_the_session_as_it_was(llm):
    with llm.session(SPARSE) as session, llm.session(SPARSE) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:300])
            steps(one)
        with pytest.raises(Stop):
            session.set_method(H2O(tokens=40), stopping(2))
        assert session.method == SPARSE and same(session, fresh)


def test_a_truncate_that_is_interrupted_is_done_by_the_next_call(llm, monkeypatch):
    method = SnapKV(tokens=96)
    with llm.session(method) as session, llm.session(method) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:150])
            steps(one, range(30))
        fresh.truncate(170)
        step, left = engine.runner.rewind.step, 7

        def stopped(session, token):
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return step(session, token)

        monkeypatch.setattr(engine.runner.rewind, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            session.truncate(170)
        assert session.ids == fresh.ids and len(session) == 170
        assert same(session, fresh)


def test_going_back_below_a_switch_reads_nothing_again(llm, monkeypatch):
    with llm.session() as session, llm.session() as fresh:
        session.prefill(IDS[:300])
        fresh.prefill(IDS[:300])
        steps(session)
        session.set_method(SnapKV(tokens=96, forget=False))
        steps(session)
        assert session.tokens_again(300) == 0
        with monkeypatch.context() as patched:
            patched.setattr("engine.runner.step_runner.run_chunk", None)  # reading would call it
            session.truncate(300)
        fresh.set_method(SnapKV(tokens=96))
        assert same(session, fresh)


def test_going_back_below_a_switch_foretells_the_queries_that_run_again(llm):
    with llm.session() as session:
        session.prefill(IDS[:100])
        session.set_method(H2O(tokens=40))
        assert session.tokens_again(100) == 0 and session.tokens_again(80) == 80


def test_what_runs_again_is_foretold_shown_and_counted_apart(llm):
    with llm.session(H2O(tokens=40)) as session:
        session.prefill(IDS[:200])
        steps(session)
        before, seen = session.stats, []
        assert session.tokens_again(150) == 150
        session.truncate(150, later=True)
        assert len(session) == 150 and session.stats.rerun_seconds == before.rerun_seconds
        next(session.generate([], SamplingParams(max_tokens=1), seen.append))
        after = session.stats
        assert seen and seen[-1].done == seen[-1].total == 150
        assert after.rerun_seconds > before.rerun_seconds
        assert after.prefill_tokens == before.prefill_tokens


def test_logits_after_a_truncate_are_those_of_the_methods_own_step(llm):
    with llm.session(SPARSE) as session, llm.session(SPARSE) as fresh:
        for one in (session, fresh):
            one.prefill(IDS[:300])
            steps(one, range(6))
        expected = fresh.last_logits
        steps(session)
        session.truncate(306)
        session.refresh_logits()
        assert torch.allclose(session.last_logits, expected, atol=2e-4, rtol=0)
        assert same(session, fresh)


@pytest.mark.parametrize("prompt", [75, 0])
def test_refreshed_logits_of_steps_after_a_switch_are_those_of_the_steps(llm, prompt):
    method = SnapKV(share=0.2, window=4)
    with llm.session() as session, llm.session() as fresh:
        for one in (session, fresh):
            if prompt:
                one.prefill(IDS[:prompt])
            one.set_method(method)
            steps(one, range(8))
        session.refresh_logits()
        assert torch.allclose(session.last_logits, fresh.last_logits, atol=2e-4, rtol=0)
        assert same(session, fresh)


def test_another_backend_takes_no_answer_for_a_prompt(llm):
    official = OmniKV(filter_layers=(1, 4), share=0.2, scores="softmax", official=True)
    with llm.session(official) as session, llm.session(official) as fresh:
        for one in (session, fresh):
            steps(one, range(12))
        session.set_backend("reference")
        assert same(session, fresh)


def test_an_answer_may_change_threads_and_others_are_refused(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.generate(IDS[:50], params).token_ids
    pieces, found = llm.stream(IDS[:50], params), []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for number in range(12):
            thread, elsewhere = (one, other) if number % 2 else (other, one)
            found.append(thread.submit(next, pieces).result().token_id)
            if number < 11:
                with pytest.raises(Busy):
                    elsewhere.submit(llm.generate, IDS[:5], params).result()
        assert other.submit(next, pieces, None).result() is None
    assert found == expected and llm.generate(IDS[:50], params).token_ids == expected


def test_pod_after_a_switch_on_the_host_tier_reads_its_own_layer(llm):
    """Its lower layer's K came into the buffer that the layer's own K and V lay in."""
    pod = PodUntrained((0, 2, 5), first=8, recent=64)
    found = []
    for offload in ("device", "host"):
        with llm.session(SPARSE, offload=offload) as session:
            session.prefill(IDS[:100])
            session.set_method(pod)
            found.append(steps(session))
    assert torch.allclose(*found, atol=2e-4, rtol=0)
