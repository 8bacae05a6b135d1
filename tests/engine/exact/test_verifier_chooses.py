"""Exact mode whose verifications choose what drafts read.

Stops: a draft that reads a whole layer, a selection by another query's scores or of rows that are
taken back, a choice that outlives its cycle, a verification that choosing changes.
"""

from dataclasses import replace

import pytest
import torch

from engine import Exact, Full, OmniKV, Quest
from engine.base.errors import SettingError
from engine.plan.cpu_costs import cpu_costs
from engine.plan.exact_costs import ExactCosts
from engine.plan.layers import Role
from engine.session.generate import generate
from tests.builders import random_ids
from tests.engine.exact.test_exact import (
    GREEDY,
    OMNIKV,
    SAMPLED,
    assert_drafts_were_judged,
    assert_same_state,
    model,
    plant,
)
from tools.bench.shapes import shape_config, shape_filters

TWO = OmniKV(filter_layers=(0, 2), tokens=40, tail=64, dense_below=0, sink=2)
ONE = Exact(OMNIKV, draft=3, lookup=False, chooser="verifier")


class Reads:
    """Notes which layers drafts read whole, cycle by cycle."""

    def __init__(self, session):
        self.cycles, runner = [], session.runner
        guess, drafter = runner._guess, runner.runtime.drafter

        def reading(layer, *more):
            self.cycles[-1].append(layer)
            return type(drafter).attend_dense(drafter, layer, *more)

        def guessing(n, count):
            self.cycles.append([])
            drafter.attend_dense = reading
            try:
                return guess(n, count)
            finally:
                del drafter.attend_dense

        runner._guess = guessing


@pytest.mark.parametrize("method", [OMNIKV, TWO], ids=["one", "two"])
def test_no_draft_reads_a_whole_layer_once_a_verification_has_chosen(method):
    """Only the first cycle's first draft does; where the drafter chooses, each cycle's."""
    llm, ids = model(), random_ids(170, 23, seed=3)
    whole = [i for i, r in enumerate(method.plan(llm.config).roles) if r is not Role.SPARSE]
    for chooser in ("verifier", "drafter"):
        exact = Exact(method, draft=3, lookup=False, chooser=chooser)
        with llm.session(exact) as session, llm.session(Full()) as full:
            session.prefill(ids)
            reads, rows = Reads(session), []
            for mine, theirs in zip(generate(session, [], GREEDY), generate(full, ids, GREEDY)):
                assert mine.token_id == theirs.token_id
                assert torch.equal(session.last_logits, full.last_logits)
                if mine.finish_reason is None and any(session.runner._rows):
                    rows.append((len(session), session.runner._rows))
            assert_same_state(session, full)
            assert_drafts_were_judged(session)
            found = [sorted(set(cycle)) for cycle in reads.cycles]
            later = [] if chooser == "verifier" else whole
            assert found[0] == whole and len(found) > 5 and all(c == later for c in found[1:])
            n, read = rows[3]
            kept = session.runtime.drafter.kept_rows(n)
            drafts = [a - b for a, b in zip(read, session.runner.dense_runtime.rows_read(n + 3))]
            assert (drafts == [3 * k for k in kept]) == (chooser == "verifier")


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_choice_is_by_the_last_verified_tokens_scores(backend, heads):
    """Against float64: softmax of the last query over all rows it sees, the most of all heads, and
    the k largest before the tail of the first; what follows them is read as the tail, also where a
    block leaves it within a verification.
    """
    config = replace(model().config, num_kv_heads=heads)
    llm, ids = model(backend=backend), random_ids(230, 23, seed=heads)
    assert config.num_heads % heads == 0
    with llm.session(replace(ONE, method=TWO)) as session:
        session.prefill(ids)
        seen, runner = {}, session.runner
        drafter = runner.runtime.drafter
        attend = drafter.attend_verified

        def noting(layer, q, step):
            seen[layer] = q[0, -1].double(), int(step.visible), int(step.visible) - q.shape[1] + 1
            return attend(layer, q, step)

        drafter.attend_verified = noting
        cycles = crossed = 0
        for piece in generate(session, [], GREEDY):
            if piece.finish_reason is not None or session.counters.cycles == cycles:
                continue
            cycles = session.counters.cycles
            for group in runner.plan.groups:
                layer = group.filter_layer
                q, n, first = seen[layer]
                k = runner.bank.kv(layer, n)[0][0, :, :n].double()
                k = k.repeat_interleave(len(q) // len(k), 0)
                weights = torch.softmax((k @ q[..., None])[..., 0] * drafter.scale, -1).amax(0)
                start = max(0, first // 64 * 64 - 64)
                assert int(runner._kept.tail_start) == start <= len(session)
                crossed += n // 64 > first // 64
                weights = weights[:start].clone()
                weights[:2] = float("inf")  # the sinks
                order = weights.sort(descending=True)
                least = order.values[39]
                chosen = set(drafter.chosen_rows(layer).tolist())
                assert len(chosen) == 40
                surely = torch.nonzero(weights > least * (1 + 1e-4)).flatten().tolist()
                maybe = torch.nonzero(weights >= least * (1 - 1e-4)).flatten().tolist()
                assert chosen.issuperset(surely) and chosen.issubset(maybe)
        assert cycles > 5 and crossed


def test_a_choice_serves_the_next_cycle_only():
    """Not a cycle after a plain step, a truncate, a prompt or another method; whatever comes, the
    state is full attention's.
    """
    llm, ids = model(), random_ids(170, 23, seed=5)
    with llm.session(ONE) as exact, llm.session(Full()) as full:
        exact.prefill(ids)
        full.prefill(ids)

        def write(params, tokens=9):
            for session in (exact, full):
                stream = generate(session, [], params)
                for _ in range(tokens):
                    next(stream)
                stream.close()
            assert_same_state(exact, full)

        def serves():
            return exact.runner._serves(len(exact) + 1)

        write(GREEDY)
        write(SAMPLED)
        plant(exact.runner, [1, 2, 3])
        for session in (exact, full):
            session.decode(4)
        assert serves()
        del exact.runner._draft
        for calls in (
            lambda s: [s.decode(t) for t in (1, 2, 3, 4, 5)],
            lambda s: (s.truncate(len(s) - 2), s.decode(7)),
            lambda s: s.prefill(random_ids(5, 23)),
        ):
            for session in (exact, full):
                calls(session)
            assert not serves()
            write(SAMPLED)
        with exact.fork() as copy:
            assert not copy.runner._serves(len(copy) + 1)
        exact.set_method(Full())
        exact.set_method(ONE)
        assert not serves()
        write(GREEDY)
        assert exact.counters.drafted > exact.counters.accepted > 0


def test_layers_in_host_memory_leave_the_choice_to_the_drafter():
    llm, ids = model(), random_ids(170, 23, seed=3)
    with llm.session(ONE, offload="host") as exact, llm.session(Full()) as full:
        for mine, theirs in zip(generate(exact, ids, GREEDY), generate(full, ids, GREEDY)):
            assert mine.token_id == theirs.token_id
        assert_same_state(exact, full)
        assert exact.counters.accepted > 0 and exact.runner._chosen is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exact(OMNIKV, chooser="both"), "chooser: found 'both', expected"),
        (lambda: Exact(Quest(), chooser="verifier"), "but quest with these settings chooses"),
        (
            lambda: Exact(replace(OMNIKV, selector="uniform"), chooser="verifier"),
            "use omnikv with selector='last' and no residual",
        ),
    ],
)
def test_choosers_that_exact_mode_refuses(make, words):
    with pytest.raises(SettingError) as refused:
        make()
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_costs_say_who_chooses():
    """Counted, on AVX512 with bfloat16: verifications where dense layers are a large part of a
    draft, the drafter where they lie in host memory, or where nearly all drafts are kept.
    """
    chosen, kept = {}, [0.97**i for i in range(1, 8)]
    for shape in ("llama-3.2-1b", "deep"):
        method = Exact(OmniKV(filter_layers=shape_filters(shape), dense_below=0))
        config = shape_config(shape)
        costs = ExactCosts.of(config, method.plan(config), 2, "cpu")
        costs = replace(costs, factors=cpu_costs(2, "avx512_bf16", compiled=True))
        given = 131072, 2304, 7, False
        chosen[shape] = [method.verifier_chooses(costs, *given, *r) for r in ((), (kept,))]
        assert not replace(method, chooser="drafter").verifier_chooses(costs, *given)
        assert replace(method, chooser="verifier").verifier_chooses(costs, *given)
        far = replace(costs, offloaded=frozenset(method.plan(config).sparse_layers))
        assert not replace(method, chooser="verifier").verifier_chooses(far, *given)
        rows = [131072] * config.num_layers
        more = costs.full(rows, 3, True) - costs.full(rows, 3)
        one = costs.factors.attention(costs.group) * costs.row * 131072
        assert more == pytest.approx(3 * costs.factors.scored * one)
        assert costs.full(rows, 1, False) == costs.full(rows)
        own, theirs = (costs.predicted(*given, verifier=v)[1] for v in (True, False))
        for now in (True, False):
            stays = 0.97 < own / theirs < 1.03
            assert method.verifier_chooses(costs, *given, now=now) == (
                now if stays else own > theirs
            )
    assert chosen == {"llama-3.2-1b": [True, False], "deep": [True, False]}
