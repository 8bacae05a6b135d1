"""KVzip: against a float64 simulation, reduced to full attention, and whole whatever interrupts it.

tests/engine/methods/test_methods.py has its eight properties. Stops: scores of another chunk, a
pass that leaves rows or that questions repeat, budgets whose sum is not exact, a control that would
do as well.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.evict import kvzip
from engine.methods.evict.kvzip import KVzip
from engine.methods.evict.repeating.shares import counts_of_best
from engine.methods.full import Full
from engine.runner.passes import passes
from kernels.select import column_sums
from kernels.select.column_sums import column_maxima
from tests.builders import VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.kvzip_simulation import ZipConversation, ZipRule
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
GROUPS = ((4, 4), (8, 2), (8, 1))  # of 1, 4 and 8 query heads
METHOD = KVzip(share=0.3, chunk=20, sink=3, least=12)


class Texts:
    """A tokenizer of two texts."""

    known = {kvzip.FIRST: [5, 9, 2], kvzip.LATER: [7, 1, 4, 3]}

    def encode(self, text, special=True):
        """Ids of a request; never with a token in front."""
        assert not special
        return self.known[text]


def worlds(heads, method, texts=False, **settings):
    """An LLM, and the simulation of a session of `method`."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    settings = {"max_context": 256, "backend": "reference", "chunk": 37} | settings
    llm = tiny_llm(Full(), config, weights, **settings)
    rule = ZipRule("kvzip", 0, sink=method.sink, share=method.share, across=method.across)
    rule = replace(rule, chunk=method.chunk, least=method.least)
    requests = (Texts.known[kvzip.FIRST], Texts.known[kvzip.LATER]) if texts else ((), ())
    return llm, ZipConversation(
        Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule, requests
    )


def held(session):
    """Positions of every layer's heads."""
    return [session.runtime.positions(layer) for layer in range(session.plan.num_layers)]


def kept(oracle):
    """The simulation's."""
    return [oracle.kept(layer) for layer in range(LAYERS)]


def scores_of(session, below):
    """{(layer, head, position): score} of what is stored of positions below a length."""
    found = {}
    for layer, parts in enumerate(session.runtime.sequences[0].layers):
        for rows in parts:
            part = rows.part()
            for i, (positions, scores) in enumerate(zip(part.positions, part.scores[:, 0])):
                for at, score in zip(positions.tolist(), scores.tolist()):
                    if at < below:
                        found[layer, rows.heads.start + i, at] = score
    return found


@pytest.mark.parametrize(
    ("heads", "backend", "forget", "across", "texts"),
    [
        (GROUPS[0], "reference", False, "all", True),
        (GROUPS[0], "auto", True, "head", False),
        (GROUPS[1], "auto", False, "layer", True),
        (GROUPS[1], "auto", True, "all", False),
        (GROUPS[2], "auto", True, "all", True),
    ],
)
def test_scores_rows_and_logits_are_the_simulations(heads, backend, forget, across, texts):
    """Two contexts with answers and questions between them."""
    method = replace(METHOD, across=across, forget=forget)
    llm, oracle = worlds(heads, method, texts, backend=backend)
    # each token twice at most
    every, sizes = random.Random(1).sample([*range(VOCAB)] * 2, 2 * VOCAB), []
    with llm.session(method) as session:
        if texts:
            session.loaded = replace(session.loaded, tokenizer=Texts())
        for count, answer in ((57, 4), (5, 3), (11, 0), (43, 2), (12, 1)):
            ids, every = every[: count + answer], every[count + answer :]
            np.testing.assert_allclose(
                session.prefill(ids[:count]).numpy(), oracle.prompt(ids[:count]), atol=1e-4
            )
            assert held(session) == kept(oracle)
            for token in ids[count:]:
                logits = session.decode(token).numpy()
                np.testing.assert_allclose(logits, oracle.step(token), atol=1e-4)
            assert held(session) == kept(oracle)
            known = oracle.scored[0].shape[1]
            for (layer, head, at), score in scores_of(session, known).items():
                expected = np.inf if at < method.sink else oracle.scored[layer][head, at]
                assert score == pytest.approx(expected, rel=1e-3, abs=1e-6)
            sizes.append([len(head) for layer in held(session) for head in layer])
        assert oracle.cuts == 3 and session.bank.forgets == forget
    for cut, length in ((0, 57), (3, 57 + 4 + 8 + 11 + 43)):
        answer = (4, 0, 0, 2)[cut]
        assert sum(sizes[cut]) == LAYERS * heads[1] * (int(0.3 * length) + answer)
        assert (len(set(sizes[cut])) > 1) == (across != "head" and LAYERS * heads[1] > 1)


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 19, 20, 21, 22, 23, 24, 41, 43, 61])
def test_hostile_lengths_and_the_engines_chunk(heads, length):
    """A sink and a chunk, one more and one less, and primes; chunks of one row and of all."""
    ids, found = random.Random(length).sample(range(VOCAB), length), []
    for chunk in (1, 7, 64) if length < 30 else (7, 20, 64):
        llm, oracle = worlds(heads, METHOD, chunk=chunk, backend="auto")
        with llm.session(METHOD) as session:
            np.testing.assert_allclose(session.prefill(ids).numpy(), oracle.prompt(ids), atol=1e-4)
            assert held(session) == kept(oracle)
            found.append(held(session))
    assert found[0] == found[1] == found[2]
    budget = max(METHOD.sink, int(0.3 * length))
    assert sum(len(h) for layer in found[0] for h in layer) == LAYERS * heads[1] * min(
        length, budget
    )


@pytest.mark.parametrize("across", ["all", "layer", "head"])
def test_all_of_it_is_full_attention_to_the_bit(across):
    for shape in SHAPES:
        llm, ids = llm_of(shape), random_ids(150)
        method = KVzip(share=1.0, chunk=40, least=20, across=across)
        with llm.session(method) as one, llm.session(Full()) as full:
            for first, stop in ((0, 100), (100, 110), (110, 140)):
                assert torch.equal(one.prefill(ids[first:stop]), full.prefill(ids[first:stop]))
            for token in ids[140:]:
                assert torch.equal(one.decode(token), full.decode(token))
            assert one.stats.sparse_steps == 10


def test_attention_while_reading_would_hold_something_else():
    """The control: nothing repeated, the same budget, in every shape."""
    for heads in GROUPS:
        llm, oracle = worlds(heads, METHOD)
        _, other = worlds(heads, METHOD)
        other.rule = replace(other.rule, own=True)
        ids = random.Random(2).sample(range(VOCAB), 97)
        with llm.session(METHOD) as session:
            session.prefill(ids), oracle.prompt(ids), other.prompt(ids)
            assert held(session) == kept(oracle) != kept(other)
        same = sum(
            len({*mine} & {*theirs})
            for a, b in zip(kept(oracle), kept(other))
            for mine, theirs in zip(a, b)
        )
        assert same < 0.9 * LAYERS * heads[1] * 29


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("seed", range(6))
def test_counts_have_their_sum_and_are_those_of_a_sort(seed):
    """Also of equal scores, infinite ones and heads with fewer tokens."""
    rng = np.random.default_rng(seed)
    shapes = [(4, 30), (4, 17), (4, 41)] if seed % 2 else [(1, 7), (1, 64)]
    scores = [rng.random(shape).astype(np.float32) for shape in shapes]
    for t in scores:
        t[:, :2] = np.inf
        t[:, 2:5] = 0.5
        t[:, -1] = -1
    every = np.sort(np.concatenate([t[t >= 0] for t in scores]))[::-1]
    for total in (0, 1, len(every) // 3, len(every) - 1, len(every), len(every) + 5):
        counts = counts_of_best([torch.from_numpy(t) for t in scores], total)
        assert sum(map(sum, counts)) == min(total, len(every))
        least = every[min(total, len(every)) - 1] if total else np.inf
        for rows, t in zip(counts, scores):
            for count, row in zip(rows, t):
                low, high = (row > least).sum(), (row[row >= 0] >= least).sum()
                assert (low <= count <= high) if total else count == 0


@pytest.mark.parametrize("floats", [1, 300, 1 << 18])
@pytest.mark.parametrize("count", [1, 5, 17])
def test_largest_weights_are_the_same_in_tiles(count, floats, monkeypatch):
    monkeypatch.setitem(column_sums.TILES, "cpu", floats)
    monkeypatch.setattr(column_sums, "ROWS", 8)
    generator = torch.Generator().manual_seed(count)
    q, k = torch.randn(count, 6, 5, generator=generator), torch.randn(2, 40, 5, generator=generator)
    logits = torch.einsum("chgd,htd->hgct", q.double().view(count, 2, 3, 5), k.double())
    lse = torch.cat([logits, logits[..., :9] + 1], -1).logsumexp(-1)  # of other rows too
    expected = (logits - lse[..., None]).exp().amax((1, 2))
    found = column_maxima(q, k, lse.permute(2, 0, 1).flatten(1).float(), 1.0)
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- what a pass leaves


@pytest.mark.parametrize("forget", [False, True])
def test_questions_change_nothing_of_the_context(forget):
    """Held and scores to the bit, and the same answer whatever was asked before it."""
    method, ids = replace(METHOD, forget=forget), random_ids(90)
    with llm_of().session(method) as session:
        session.prefill(ids)
        context, scores = held(session), scores_of(session, 90)
        assert any(len(head) < 90 for layer in context for head in layer)
        with session.fork() as other:
            first = other.prefill(random_ids(7, seed=5))
        for seed in range(3):
            session.prefill(random_ids(11, seed=seed))
            session.decode(seed)
            now = [[[at for at in h if at < 90] for h in layer] for layer in held(session)]
            assert now == context
            assert scores_of(session, 90) == scores
            assert all(
                h[-12:] == [*range(len(session) - 12, len(session))] for h in held(session)[1]
            )
        session.truncate(90)
        assert held(session) == context and scores_of(session, 90) == scores
        assert torch.equal(session.prefill(random_ids(7, seed=5)), first)


def test_a_pass_leaves_no_row():
    """The bank's rows behind the prompt are as they were; with `forget` it holds a step's alone."""
    llm, ids = llm_of(), random_ids(90)
    with llm.session(replace(METHOD, forget=False)) as session:
        for layer in range(7):
            for side in session.bank.kv(layer):
                side[:, :, 90:] = 7.0
        session.prefill(ids)
        assert len(session) == 90 and session.runtime.sequences[0].length == 90
        assert all((side[:, :, 90:] == 7.0).all() for i in range(7) for side in session.bank.kv(i))
        assert session.query_ring.high == 90
    with llm.session(replace(METHOD, forget=True)) as session:
        empty = session.bank.nbytes
        session.prefill(ids)
        assert session.bank.nbytes == empty


class Stopped(Exception):
    """As an interrupt."""


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_interrupt_in_a_pass_leaves_the_session_as_before(forget, share):
    """Everything that was read is there and nothing is cut; the next call ends the prompt, and then
    all is as if nothing had happened. Also of a second context.
    """
    llm, method, ids = llm_of(), replace(METHOD, forget=forget), random_ids(170)

    def stop(progress):
        if progress.done == progress.total and progress.work - 0.5 > share / 2:
            assert progress.work < 1
            raise Stopped

    with llm.session(method) as one, llm.session(method) as plain:
        with pytest.raises(Stopped):
            one.prefill(ids[:80], progress=stop)
        assert list(one.ids) == ids[:80] and held(one) == [[[*range(80)]] * 2] * 7
        assert one.history.pending is None and not one.inconsistent
        assert not torch.is_inference_mode_enabled()
        assert torch.equal(plain.prefill(ids[:80]), one.last_logits)
        for token in (3, 4):
            assert torch.equal(one.decode(token), plain.decode(token))
            assert held(one) == held(plain)
        before = held(one)
        with pytest.raises(Stopped):
            one.prefill(ids[80:150], progress=stop)
        assert list(one.ids) == [*ids[:80], 3, 4, *ids[80:150]] and not one.inconsistent
        assert held(one) == before and one.runtime.sequences[0].length == 152
        # a prefill goes on with the open prompt, as the parts of one do
        assert torch.equal(one.prefill(ids[150:]), plain.prefill(ids[80:]))
        assert held(one) == held(plain) and torch.equal(one.decode(5), plain.decode(5))


def test_progress_shows_the_passes():
    """Work rises to 1, and about half of it is left when the prompt has been read."""
    seen = []
    with llm_of(chunk=16).session(KVzip(share=0.3, chunk=200)) as session:
        session.prefill(random_ids(200), progress=seen.append)
        read = next(i for i, p in enumerate(seen) if p.done == p.total)
        work = [p.work for p in seen]
        assert work == sorted(work) and work[-1] == 1 and 0.25 < work[read] < 0.6
        assert len(seen) - read > 200 // 16 and seen[read].eta > 0
        seen.clear()
        session.prefill(random_ids(40), progress=seen.append)
        assert [p.done for p in seen] == [16, 32, 40]  # a question repeats nothing


def test_plan_and_allocation_agree_to_the_byte(monkeypatch):
    """A pass of a whole chunk behind the longest request, and the store."""
    banks, allocated = [], []

    class Seen(passes.ChunkBank):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            banks.append(self)

        def write_chunk(self, *given):
            super().write_chunk(*given)
            allocated.append(self.nbytes)

    class Letters:
        def encode(self, text, special=True):
            return [1] * (len(text) + 1)

    monkeypatch.setattr(passes, "ChunkBank", Seen)
    llm = llm_of()
    for chunk in (50, 512):
        method = KVzip(share=0.3, chunk=chunk, forget=False)
        allocated.clear()
        plan = llm.plan(method)
        with llm.session(method) as session:
            session.loaded = replace(session.loaded, tokenizer=Letters())
            session.prefill(random_ids(300))
            for token in random_ids(20):
                session.decode(token)
            assert max(allocated) <= plan.bytes_of("repeating")
            if chunk == 50:
                assert max(allocated) == plan.bytes_of("repeating")
            given = session.plan, llm.config, 4, 300, 20
            assert session.stats.store_bytes == method.held_bytes(*given)
            assert session.stats.store_bytes <= plan.bytes_of("retained rows")
    assert "at least its time again" in str(plan) and len(banks) == 7


# ---------------------------------------------------------------- going back, copies, files


@pytest.mark.parametrize("forget", [False, True])
def test_going_back_a_fork_and_a_file_are_exact(forget, tmp_path):
    llm, ids, path = llm_of((2, 4, 2)), random_ids(160, seed=3), tmp_path / "session"
    method = replace(METHOD, forget=forget)
    with llm.session(method) as fresh, llm.session(method) as session:
        for one in (fresh, session):
            one.prefill(ids[:90])
            for token in ids[90:95]:
                one.decode(token)
            one.prefill(ids[95:140])
        for token in ids[140:]:
            session.decode(token)
        session.truncate(140)
        if forget:
            session.save(path)
        with session.fork() as twin:
            others = [session, twin, *([llm.restore(path)[0]] if forget else [])]
            for token in range(11, 25):
                expected = fresh.decode(token)
                for one in others:
                    assert torch.equal(one.decode(token), expected)
                    assert held(one) == held(fresh)
            # what is scored next depends on what has a score already
            more = fresh.prefill(ids[:30])
            for one in others:
                assert torch.equal(one.prefill(ids[:30]), more) and held(one) == held(fresh)


def test_what_full_attention_has_read_serves_as_well():
    """All so far is the prompt then; and parts of a prompt are one."""
    llm, ids, seen = llm_of((2, 4, 2)), random.Random(3).sample(range(VOCAB), 90), []
    with llm.session(Full()) as session, llm.session(METHOD) as fresh, llm.session(METHOD) as parts:
        session.prefill(ids[:70])
        for token in ids[70:]:
            session.decode(token)
        session.set_method(METHOD, progress=seen.append)
        fresh.prefill(ids)
        for first, last in ((0, 30), (30, 35), (35, 90)):
            parts.prefill(ids[first:last], more=last < 90)
        assert seen[-1].work == 1 and held(session) == held(fresh) == held(parts)
        for token in range(11, 23):
            expected = fresh.decode(token)
            torch.testing.assert_close(session.decode(token), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(parts.decode(token), expected, atol=1e-5, rtol=0)


def test_what_cannot_be_is_refused_in_one_line():
    for call, message in (
        (lambda: KVzip(across="tokens"), "across: found 'tokens'"),
        (lambda: KVzip(chunk=0), "chunk: found 0"),
        (lambda: KVzip(sink=-1), "sink: found -1"),
        (lambda: KVzip(least=0), "least: found 0"),
        (lambda: KVzip(tokens=3), "tokens: found 3, expected at least the sink of 4 tokens"),
        (lambda: KVzip(tokens=9, share=0.1), "budget: found tokens=9 and share=0.1"),
    ):
        with pytest.raises(SettingError, match=message):
            call()


def test_published_defaults():
    """Those of the source (docs/METHODS.md), where nothing is given."""
    found = KVzip()
    assert (found.share, found.across, found.chunk, found.sink) == (0.3, "all", 2048, 4)
