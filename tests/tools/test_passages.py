"""A passage evaluated at once is what decode steps do one by one: same selections, same KL.

Stops: a row that sees a later one, a tail that begins elsewhere than the engine's, a layer that
reads another filter's choice, a child that keeps too much of its parent.
"""

import pytest
import torch

from engine import Full, OmniKV
from engine.calibration.passages import MaxOverHeads, Passage
from engine.calibration.score import Passages
from engine.calibration.search import Search, full_layers, seeing
from engine.model.config.config import ModelConfig
from engine.plan.layers import layer_plan
from tests.builders import hybrid_config, random_ids, tiny_llm

N, P, K, TAIL = 420, 50, 24, 64


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(Full(), sharpness=2.5)


@pytest.fixture(scope="module")
def ids():
    return random_ids(N)


def passage(llm, session, ids, start=N - P, stop=N, k=K):
    if not len(session):
        session.prefill(ids[:start])
    choose = MaxOverHeads(k)
    return Passage(llm.model, llm.rotary, session.bank, ids, start, stop, TAIL, choose)


def steps(llm, ids, method, start=N - P):
    """Logits float32 [P, vocab] of decode steps, and the selections of each."""
    with llm.session(method) as session:
        session.prefill(ids[:start])
        logits, chosen = [], []
        for token in ids[start:]:
            logits.append(session.decode(token))
            chosen.append(session.selections)
        assert session.stats.sparse_steps == (0 if isinstance(method, Full) else len(ids) - start)
    return torch.stack(logits), chosen


@pytest.mark.parametrize(
    ("filters", "wait"), [((0,), 0), ((1, 4), 0), ((2, 3, 6), 0), ((1, 5), 1), ((6,), 0)]
)
def test_a_passage_is_the_decode_steps(llm, ids, filters, wait):
    """Lengths 371 .. 420 cross two moves of the tail (at 384), so its start is not one number."""
    method = OmniKV(filter_layers=filters, wait_layers=wait, tokens=K, tail=TAIL, dense_below=0)
    full, _ = steps(llm, ids, Full())
    sparse, chosen = steps(llm, ids, method)
    p, q = torch.log_softmax(full, -1), torch.log_softmax(sparse, -1)
    with llm.session(Full()) as session:
        found = passage(llm, session, ids)
        trace = found.run(layer_plan(8, filters, wait), keep=True)
    torch.testing.assert_close(found.reference, p, atol=1e-4, rtol=0)
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.mean() > 0.02  # sparse attention costs this model something
    torch.testing.assert_close(trace.kl, kl, atol=1e-4, rtol=0)
    assert torch.equal(trace.same, p.argmax(-1) == q.argmax(-1))
    assert set(trace.chosen) == {f for f in filters if f in chosen[0]} != set()
    for layer, rows in trace.chosen.items():
        for row in range(P):
            assert torch.equal(torch.nonzero(rows[0, row]).flatten(), chosen[row][layer])


def test_rows_in_blocks_change_nothing(llm, ids, monkeypatch):
    plan = layer_plan(8, (1, 4), 0)
    with llm.session(Full()) as session:
        whole = passage(llm, session, ids).run(plan)
        monkeypatch.setattr("engine.calibration.passages.WEIGHTS", 7 * 4 * N)
        parts = passage(llm, session, ids)
        assert len(list(parts._parts(4))) == 8
        torch.testing.assert_close(parts.run(plan).kl, whole.kl, atol=1e-5, rtol=0)


def test_a_child_begins_where_it_differs(llm, ids):
    """Every neighbour of a plan, from the kept trace and from nothing: bit for bit."""
    with llm.session(Full()) as session:
        found = passage(llm, session, ids)
        parent = found.run(layer_plan(8, (1, 2, 5), 0), keep=True)
        for filters in [(1, 2), (1, 5), (2, 5), (1, 2, 4, 5), (1, 3, 5), (1, 2, 6), (0, 5), (7,)]:
            plan = layer_plan(8, filters, 0)
            alone = found.run(plan, keep=True)
            child = found.run(plan, parent, keep=True)
            assert torch.equal(child.kl, alone.kl), filters
            assert child.chosen.keys() == alone.chosen.keys()
            grandchild = found.run(layer_plan(8, (1, 2, 5), 0), child)
            assert torch.equal(grandchild.kl, parent.kl), filters


def test_passages_of_one_bank_do_not_meet(llm, ids):
    """An earlier passage of the same bank is that of a bank which ends there."""
    plan = layer_plan(8, (1, 4), 0)
    with llm.session(Full()) as session:
        session.prefill(ids)
        late = passage(llm, session, ids)
        early = passage(llm, session, ids, N - 2 * P, N - P)
        both = early.run(plan).kl, late.run(plan).kl
    with llm.session(Full()) as session:
        torch.testing.assert_close(passage(llm, session, ids).run(plan).kl, both[1])
    with llm.session(Full()) as session:
        alone = passage(llm, session, ids, N - 2 * P, N - P).run(plan).kl
    torch.testing.assert_close(alone, both[0], atol=1e-5, rtol=0)


def test_a_selection_per_head_reads_what_each_head_chose(llm, ids):
    """`choose` and `lend` are arguments. All rows chosen is full attention; the same rows under
    every K/V head are one shared selection; a loan of nothing is another answer.
    """
    plan = layer_plan(8, (1, 4), 0)
    with llm.session(Full()) as session:
        shared = passage(llm, session, ids).run(plan)

        def kl(choose, lend=None):
            made = Passage(llm.model, llm.rotary, session.bank, ids, N - P, N, TAIL, choose, lend)
            return made.run(plan).kl

        def everything(weights, starts):
            return torch.ones(1, *weights.shape[2:], dtype=torch.bool)

        def twice(weights, starts):
            return MaxOverHeads(K)(weights, starts).expand(2, -1, -1)

        assert kl(everything).max() < 1e-5
        torch.testing.assert_close(kl(twice), shared.kl, atol=1e-5, rtol=0)
        lost = kl(twice, lambda f, layer, rows: torch.zeros_like(rows))
        assert (lost - shared.kl).abs().mean() > 0.05


@pytest.mark.parametrize("filters", [(3,), (3, 11), (7,)])
def test_a_passage_over_recurrent_layers_is_the_decode_steps(ids, filters):
    """Their state stands at the passage's first token, whatever the plan."""
    config = hybrid_config(16)
    llm = tiny_llm(Full(), config, max_context=512, chunk=64)
    method = OmniKV(filter_layers=filters, tokens=K, tail=TAIL, dense_below=0)
    full, _ = steps(llm, ids, Full())
    sparse, chosen = steps(llm, ids, method)
    p, q = torch.log_softmax(full, -1), torch.log_softmax(sparse, -1)
    kl = (p.exp() * (p - q)).sum(-1)
    with llm.session(Full()) as session:
        found = passage(llm, session, ids)
        trace = found.run(method.plan(config), keep=True)
        again = found.run(method.plan(config), trace)
        # the session goes on as if there had been no passage
        for token in ids[N - P :]:
            last = session.decode(token)
    torch.testing.assert_close(found.reference, p, atol=1e-3, rtol=0)
    assert kl.mean() > 1e-3
    torch.testing.assert_close(trace.kl, kl, atol=1e-3, rtol=0.02)
    assert torch.equal(again.kl, trace.kl)
    torch.testing.assert_close(last, full[-1], atol=1e-4, rtol=0)
    assert set(trace.chosen) == {f for f in filters if f in chosen[0]} != set()


def test_a_search_over_recurrent_layers_chooses_among_the_others(ids):
    llm = tiny_llm(Full(), hybrid_config(16), max_context=512, chunk=64)
    recurrent = llm.config.recurrent_layers
    with llm.session(Full()) as session:
        made = [passage(llm, session, ids)]
        score = Passages(lambda: made, 4, (), recurrent)
        found = Search(4, score, 1, lambda *_: None).down(3)
        numbers = seeing(16, recurrent)
        assert numbers == [3, 7, 11, 15]
        for count, best in found.items():
            plan = score.plan_of(best.full)
            assert len(best.full) == count and set(plan.seeing_layers) == set(numbers)
            assert set(full_layers(plan)) - set(recurrent) == {numbers[i] for i in best.full}
            assert float(made[0].run(plan).kl.mean()) == pytest.approx(best.cost)


def test_a_passage_over_layers_that_attend_beside_their_recurrence(ids):
    """Falcon-H1's: both halves of a layer go through the passage."""
    pytest.importorskip("transformers")
    from tools.families.models import configuration

    config = ModelConfig.from_dict(configuration("falcon-h1").to_dict())
    assert config.beside is not None and not config.recurrent_layers
    llm = tiny_llm(Full(), config, max_context=512, chunk=64)
    method = OmniKV(filter_layers=(1,), tokens=K, tail=TAIL, dense_below=0)
    full, _ = steps(llm, ids, Full())
    sparse, _ = steps(llm, ids, method)
    p, q = torch.log_softmax(full, -1), torch.log_softmax(sparse, -1)
    kl = (p.exp() * (p - q)).sum(-1)
    with llm.session(Full()) as session:
        found = passage(llm, session, ids)
        trace = found.run(method.plan(config))
    torch.testing.assert_close(found.reference, p, atol=1e-3, rtol=0)
    torch.testing.assert_close(trace.kl, kl, atol=1e-3, rtol=0.02)
