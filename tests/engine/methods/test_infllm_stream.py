"""InfLLM with a number of blocks, and as a stream without end.

The oracle is the float64 simulation (infllm_simulation.py), which keeps everything, or drops the
same blocks: its rows of what is gone are None. Stops: a block that goes too early or another one
that goes, rows of a place that was taken again, a way back over what is gone, anything that grows
with the text, a limit that is not reached and changes an answer.
"""

import gc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import Full, InfLLM, StreamingLLM
from engine.base import newest_tokens
from engine.base.errors import SettingError
from engine.methods.select.infllm_memory import Layout
from engine.methods.select.kept import blocks as kept_blocks
from engine.model.rope import inv_freq
from tests.builders import GROUPS, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.infllm_simulation import Text
from tests.engine.methods.method_checks import allocated
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
METHODS = (
    InfLLM(block=5, init=3, local=16, topk=2, representatives=2, cached=4, chunk=8, blocks=4),
    # blocks of one token; all that is kept is read
    InfLLM(block=1, init=0, local=4, topk=3, representatives=1, cached=3, chunk=4, blocks=3),
    InfLLM(block=7, init=20, local=11, topk=1, representatives=7, cached=9, chunk=11, blocks=2),
)
SMALL = METHODS[0]
TWO = pytest.mark.parametrize("method", METHODS[::2], ids=lambda m: f"blocks-of-{m.block}")
EVERY = pytest.mark.parametrize("method", METHODS, ids=lambda m: f"blocks-of-{m.block}")


@pytest.fixture
def few_places(monkeypatch):
    """Places beside those that count for 48 tokens only, so that they are taken again soon."""
    monkeypatch.setattr(kept_blocks, "SPARE", 48)


def llm_of(method=SMALL, heads=(8, 2), chunk=16, forever=True, backend="reference", **more):
    """An LLM of streams on a model that is made for few positions."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1], max_positions=32)
    given = dict(max_context=None) if forever else dict(max_context=400, beyond=True)
    given |= dict(chunk=chunk, backend=backend, forever=forever, **more)
    return tiny_llm(method, config, tiny_weights(config, seed=sum(heads)), **given)


def turns():
    """(prompt, answer) ids: lengths 1, a chunk and one beside it, primes, and several chunks. The
    first answer writes first tokens and reads them.
    """
    for turn, (prompt, answer) in enumerate(((1, 27), (15, 3), (16, 2), (17, 5), (61, 20), (1, 4))):
        yield random_ids(prompt, seed=turn), random_ids(answer, seed=99 - turn)


def oracle_of(llm, heads, method, limit):
    shape = Shape(LAYERS, *heads, llm.config.head_dim, 1e-5)
    model = Model(shape, tiny_weights(llm.config, seed=sum(heads)))
    return Text(model, method, inv_freq(llm.config.rope, llm.config.head_dim), limit)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("method", "heads"), [(m, GROUPS[i]) for i, m in enumerate(METHODS)])
def test_a_stream_is_the_simulation_that_drops_the_same_blocks(method, heads, backend, few_places):
    """Logits at every prompt's end and step; until a block goes they are those of the simulation
    that keeps all, afterwards they differ from it.
    """
    llm = llm_of(method, heads, backend=backend)
    dropping, keeping = (oracle_of(llm, heads, method, n) for n in (method.blocks, None))
    apart = []
    with llm.session() as session:
        for prompt, answer in turns():
            for at, ids in enumerate((prompt, *([token] for token in answer))):
                found = session.decode(ids[0]) if at else session.prefill(ids)
                first = 0
                while first < len(ids):  # in the chunks of a prompt
                    part = ids[first : first + 16]
                    expected, all_of_it = (one.read(part)[-1] for one in (dropping, keeping))
                    first += 16
                np.testing.assert_allclose(found.numpy(), expected, atol=2e-4)
                gone = method.gone(len(session))
                if not gone:
                    np.testing.assert_allclose(found.numpy(), all_of_it, atol=2e-4)
                apart.append((gone, np.abs(expected - all_of_it).max()))
                for stream in dropping.layers:
                    assert session.forgotten == gone == sum(map(len, stream.gone))
        numbers = session.runtime.memory.kept.state()[0]
        for row, stream in zip(numbers, dropping.layers):
            held = sorted((t[0] - method.init) // method.block for t, *_ in stream.blocks)
            assert sorted(row[row >= 0].tolist()) == held
        assert len(held) == method.blocks and session.runtime.memory.formed > numbers.shape[1]
    assert max(more for gone, more in apart if not gone) < 1e-9
    assert max(more for gone, more in apart if gone) > 1e-2
    # layers drop different ones
    assert method.topk == method.blocks or len({str(s.gone) for s in dropping.layers}) > 1


@pytest.mark.parametrize("backend", ["reference", "auto"])
@EVERY
def test_a_limit_that_is_not_reached_changes_no_bit(method, backend):
    """Of prompts, steps, and ways back."""
    llm = llm_of(Full(), forever=False, backend=backend)
    plain, limited = replace(method, blocks=None), replace(method, blocks=400)
    with llm.session(plain) as one, llm.session(limited) as two, llm.session(method) as less:
        for back, (prompt, answer) in zip((2, 0, 9, 0, 15, 0), turns()):
            assert torch.equal(one.prefill(prompt), two.prefill(prompt))
            less.prefill(prompt)
            for token in answer:
                expected = one.decode(token)
                assert torch.equal(expected, two.decode(token))
                found = less.decode(token)
            one.truncate(len(one) - back), two.truncate(len(two) - back)
        assert (found - expected).abs().max() > 1e-3
        assert less.method.gone(len(less)) > 0 == limited.gone(len(two))
        read = two.runtime.rows_read(len(two))
        assert read == one.runtime.rows_read(len(one)) and max(read) < len(two)


# ---------------------------------------------------------------- constant


def every_tensor():
    """Bytes of every tensor that is alive."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor)


@TWO
def test_a_stream_takes_as_much_at_1_000_tokens_as_at_400(method, few_places, monkeypatch):
    """Every tensor, the token ids and the notes of turns; exactly what the plan says; and a step
    reads as many rows.
    """
    monkeypatch.setattr(newest_tokens, "KEPT", 256)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    llm, sizes, seed = llm_of(method, backend="auto"), [], 0
    planned = {item: size for item, size, _ in llm.plan().items}
    with llm.session() as session:
        for stop in (400, 700, 1000):
            while len(session) < stop:
                seed += 1
                session.prefill(random_ids(min(46, stop - len(session)), seed=seed))
                for token in random_ids(min(4, stop - len(session)), seed=seed):
                    session.decode(token)
            bank, own = allocated([session.bank]), allocated([session.runtime.memory])
            points = allocated([session.history.savepoints])
            assert bank == session.bank.nbytes == planned["context bank"]
            assert own <= session.runtime.nbytes + 64 and points <= planned["savepoints"]
            assert session.runtime.nbytes == planned["selection"]
            # the remainder comes and goes
            rows = [session.runtime.rows_read(n) for n in range(stop, stop + method.block)]
            sizes.append((every_tensor(), bank, own, points, rows[0], max(rows)))
        assert session.forgotten == method.gone(1000) > 900
        held = points + session.query_ring.kept_bytes
        assert held <= planned["savepoints"]
        assert session.stats.snapshot_bytes == held - 2 * 4 * llm.config.vocab_size  # logits
    # a savepoint has the newest rows, the same number of them
    assert len({size[1:4] for size in sizes}) == 1, sizes
    assert len({(size[0], max(size[5])) for size in sizes}) == 1, sizes


def test_the_plan_says_what_is_held_and_what_a_step_reads():
    method = replace(InfLLM(), blocks=256)
    config = tiny_config(layers=LAYERS, max_positions=32)
    llm = tiny_llm(method, config, tiny_weights(config), max_context=None, chunk=1024, forever=True)
    plan = str(llm.plan())
    assert "rows of 288 blocks and 128 first tokens, and a ring of" in plan
    assert "without end, in constant memory" in plan and "largest context" not in plan
    seen = 128 + 4096 + 17 * 128 + 512
    assert f"reads     at most {seen} rows of each layer in a step, at any length" in plan
    assert llm.plan().bytes_of("context bank") == llm.session().bank.nbytes


# ---------------------------------------------------------------- ways back, copies


@TWO
def test_going_back_is_exact_as_far_as_blocks_and_tokens_reach(method, few_places, monkeypatch):
    """Where blocks were written over, the text is read again while its tokens are there; then no
    more, which is one line.
    """
    monkeypatch.setattr(newest_tokens, "KEPT", 128)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    llm, ids = llm_of(method), []

    def play(session, first, stop):
        """Prompts of 17 tokens and answers of 6, in whole calls."""
        at = 0
        while at < stop:
            step = min(17, stop - at)
            if at >= first:
                session.prefill(random_ids(17, seed=at)[:step])
            at += step
            for token in random_ids(6, seed=-at)[: stop - at]:
                if at >= first:
                    session.decode(token)
                at += 1

    with llm.session() as session:
        play(session, 0, 115)
        assert session.tokens_again(100) < 100  # from a savepoint
        again = session.tokens_again(40)
        assert again == 40  # its blocks are gone, its tokens are not
        for back in (112, 93, 40, 115):
            if back < len(session):
                session.truncate(back)
            else:
                play(session, len(session), back)
            with llm.session() as fresh, session.fork() as copy:
                play(fresh, 0, back)
                assert copy.forgotten == fresh.forgotten
                torch.testing.assert_close(copy.decode(7), fresh.decode(7), atol=1e-5, rtol=0)
                found, expected = (s.prefill(random_ids(30, seed=3)) for s in (copy, fresh))
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        play(session, 115, 345)
        with pytest.raises(SettingError, match="truncate: found 200, expected 3.. to 345, or 0"):
            session.truncate(200)
        ids = list(session.ids)
        session.truncate(340)
        assert list(session.ids) == ids[:-5]
        session.truncate(0)
        with llm.session() as fresh:
            ids = random_ids(90, seed=8)
            assert torch.equal(session.prefill(ids), fresh.prefill(ids))


@TWO
def test_a_savepoint_counts_until_its_blocks_are_written_over(method, few_places):
    """By an answer: 30 tokens leave them, 80 do not, and the text is read again."""
    llm, ids = llm_of(method), random_ids(60, seed=4)
    for answer, again in ((30, 2), (80, 62)):
        with llm.session() as session, llm.session() as fresh:
            for one in (session, fresh):
                one.prefill(ids), one.decode(8), one.decode(9)
            for token in random_ids(answer, seed=5):
                session.decode(token)
            assert session.tokens_again(62) == again
            session.truncate(62)
            for token in random_ids(20, seed=6):
                found, expected = session.decode(token), fresh.decode(token)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@TWO
def test_a_savepoint_brings_the_window_back(method):
    """The ring has written over it: 700 tokens later, of which the places hold all blocks."""
    llm, ids = llm_of(method, chunk=100), random_ids(60, seed=4)
    with llm.session() as session, llm.session() as fresh:
        session.prefill(ids), fresh.prefill(ids)
        session.prefill(random_ids(700, seed=5))
        assert session.tokens_again(60) == 0
        session.truncate(60)
        for token in random_ids(20, seed=6):
            assert torch.equal(session.decode(token), fresh.decode(token))


@EVERY
def test_a_chunk_that_breaks_off_has_forgotten_nothing(method, few_places, monkeypatch):
    """In its middle, after blocks have gone in some layers and taken places in them."""
    llm = llm_of(method, chunk=64)
    assert llm.session().runtime.chunk_stop(0, 64) == min(64, -(-48 // method.block) * method.block)
    prompt, more = random_ids(150, seed=1), random_ids(47, seed=2)
    with llm.session() as session, llm.session() as plain:
        for one in (session, plain):
            one.prefill(prompt)
            one.decode(3)
        attend, left = type(session.runtime).attend_prompt, [1]

        def breaks(self, layer, *rest):
            out = attend(self, layer, *rest)
            if layer == 1 and left:
                left.pop()
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(type(session.runtime), "attend_prompt", breaks)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(random_ids(47, seed=5))
        assert len(session) == 151
        assert torch.equal(session.decode(4), plain.decode(4))
        assert torch.equal(session.prefill(more), plain.prefill(more))


def test_other_launchers_and_batches_go_on_with_the_same_blocks(few_places):
    llm = llm_of(backend="auto")
    batch = llm.batch(slots=2)
    together = [batch.session() for _ in range(2)]
    alone = [llm.session() for _ in range(2)]
    for session, one, n in zip(together, alone, (120, 37)):
        session.prefill(random_ids(n, seed=n)), one.prefill(random_ids(n, seed=n))
    for token in random_ids(40, seed=4):
        for session in together:
            batch.feed(session, token)
        found = batch.step()
        for session, one in zip(together, alone):
            torch.testing.assert_close(found[session], one.decode(token), atol=1e-4, rtol=0)
    one = alone[0]
    with one.fork() as copy:
        copy.set_backend("reference")
        for token in random_ids(20, seed=6):
            torch.testing.assert_close(copy.decode(token), one.decode(token), atol=1e-4, rtol=0)


@TWO
def test_places_in_host_memory_give_the_same_answers_to_the_bit(method, few_places):
    """With ways back, a broken chunk and a fork; over the link come the blocks that the device does
    not have. Host memory grows up to the places and no further, and is given back.
    """
    llm = llm_of(method, chunk=32)
    plan = llm.plan(offload="host")
    planned = {item: size for item, size, _ in plan.items}
    pool, sizes = llm.load().host_pool, []
    with llm.session() as one, llm.session(offload="host") as two:
        assert two.bank.placement.layers == (0, 1, 2) and one.bank.placement is None
        assert two.bank.host_nbytes == 0

        def both(call):
            expected, found = call(one), call(two)
            assert torch.equal(expected, found)

        def stop(progress):
            raise KeyboardInterrupt

        for at, (prompt, answer) in enumerate(turns()):
            both(lambda s, p=prompt: s.prefill(p))
            for token in answer:
                both(lambda s, t=token: s.decode(t))
            for s in (one, two):
                with pytest.raises(KeyboardInterrupt):
                    s.prefill(random_ids(50, seed=at), progress=stop)
                s.truncate(len(s) - 33)
            sizes.append(two.bank.host_nbytes)
        with one.fork() as first, two.fork() as second:
            assert second.bank.host_nbytes == two.bank.host_nbytes
            for token in random_ids(9, seed=7):
                assert torch.equal(first.decode(token), second.decode(token))
            assert torch.equal(first.prefill(prompt), second.prefill(prompt))
        both(lambda s: s.prefill(random_ids(60, seed=3)))
        device = planned["context bank"] + planned["working sets"] + planned["streaming"]
        assert two.bank.nbytes == device and method.gone(len(two)) > 0
        assert sizes == sorted(sizes) and sizes[-1] == planned["host tier"]
        assert sizes[0] < sizes[-1] or two.bank.placement.kept.rows <= 64  # one host block
        assert two.bank.host_nbytes == planned["host tier"] == two.stats.host_bytes
        stats = two.stats
        assert stats.misses > 0 and stats.bytes_fetched > 0
        assert stats.hits > 0
        assert stats.hits + stats.misses <= method.topk * 3 * stats.groups[0]["plans"]
    assert pool.reserved == pool.idle
    assert f"{method.blocks + -(-48 // method.block)} blocks of {method.block} tokens in" in str(
        plan
    )


@pytest.mark.parametrize("bank", ["int8", "fp8"])
def test_rows_in_fewer_bits_lie_in_places_as_they_are(bank, few_places):
    llm = llm_of(bank=bank, backend="auto")
    plain = replace(SMALL, blocks=None)
    with llm.session() as session:
        session.prefill(random_ids(40, seed=1))
        assert session.forgotten == 0 < Layout.at(SMALL, 40).blocks
        more = [session.decode(token) for token in random_ids(90, seed=2)]
        assert session.forgotten > 0 and torch.stack(more).isfinite().all()
    finite = llm_of(Full(), forever=False, bank=bank, backend="auto")
    with finite.session(replace(plain, blocks=90)) as one, finite.session(plain) as other:
        assert torch.equal(one.prefill(random_ids(90)), other.prefill(random_ids(90)))
        assert torch.equal(one.decode(3), other.decode(3))


# ---------------------------------------------------------------- what it says, what it refuses


def test_it_says_what_it_forgets_and_what_it_cannot_do(tmp_path, few_places):
    llm = llm_of()
    line = (
        "from here on every layer forgets the block of 5 tokens that it read longest ago; 4 blocks "
        "are held beside the first 3 tokens and the newest 16"
    )
    with llm.session() as session:
        session.prefill(random_ids(3 + 16 + 5 * 5 - 1))
        assert session.forgotten == 0 and session.method.forgotten(len(session)) == ""
        session.decode(1)
        assert session.forgotten == 5 and session.method.forgotten(len(session)) == line
        with pytest.raises(SettingError, match="save: found a session of infllm that keeps a numb"):
            session.save(tmp_path / "s")
        with pytest.raises(SettingError, match="check: found infllm with rows that it has freed"):
            session.check(1)
        with pytest.raises(SettingError, match="adopt: found infllm"):
            session.adopt(random_ids(9))
        with pytest.raises(SettingError, match="method: found streaming_llm in a stream of infllm"):
            session.set_method(StreamingLLM(tokens=24))
        with pytest.raises(SettingError, match="blocks: found rows 0 to .* is gone or in blocks"):
            session.prefill(random_ids(900))
            session.bank.kv(0)


def test_a_stream_without_a_number_keeps_512_blocks_and_no_fewer_than_are_read():
    assert llm_of(replace(SMALL, blocks=None)).planner.method.blocks == 512
    with pytest.raises(SettingError, match="blocks: found 1, expected .* 2"):
        replace(SMALL, blocks=1)


def test_windows_within_a_models_positions_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm_of()
    with pytest.warns(UserWarning, match="further away than the 32 positions"):
        llm_of(replace(SMALL, local=33))


def test_a_session_with_an_end_goes_over_to_blocks_and_back(few_places):
    """Its tokens are read again, as for every method that forgets."""
    llm, ids = llm_of(Full(), forever=False), random_ids(120, seed=3)
    with llm.session() as session, llm.session(SMALL) as small, llm.session() as full:
        session.prefill(ids[:1])
        session.truncate(0)
        session.set_method(SMALL)
        assert torch.equal(session.prefill(ids), small.prefill(ids))
        session.set_method(Full())
        assert session.bank.length if session.bank.tiered else True
        full.prefill(ids)
        torch.testing.assert_close(session.decode(3), full.decode(3), atol=1e-5, rtol=0)
        assert session.reads_again(Full()) == 0 < small.reads_again(Full())
