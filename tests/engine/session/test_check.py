"""/check tells matching from sabotaged selections, its numbers equal an independent computation,
and it changes nothing.

Stops: a check that leaves full attention's rows in the bank, a mass that counts the tail twice, a
report that always says fine.
"""

import pytest
import torch

from engine import Full, OmniKV
from engine.base.errors import SettingError
from engine.methods.mass_meter import Watch
from engine.plan.layers import tail_start
from tests.builders import random_ids, tiny_llm


def answered(method, **settings):
    session = tiny_llm(method, **settings).session()
    logits = session.prefill(random_ids(700))
    for _ in range(24):
        logits = session.decode(int(logits.argmax()))
    assert not method.filter_layers or session.stats.sparse_steps == 24
    return session


def omnikv(tokens, **changes):
    return OmniKV(filter_layers=(1, 4), tokens=tokens, dense_below=0, tail=64, **changes)


def test_it_tells_a_whole_selection_from_a_sabotaged_one():
    whole = answered(omnikv(2000)).check(24)
    assert whole.agreement == 1.0 and whole.mean_kl < 1e-9
    assert all(kept == pytest.approx(1.0, abs=1e-5) for kept in whole.mass_by_layer().values())
    sabotaged = answered(omnikv(1)).check(24)
    assert sabotaged.mean_kl > 1e-3 and min(sabotaged.mass_by_layer().values()) < 0.5
    assert "24/24 (100.0%)" in str(whole) and "least" in str(sabotaged)


@pytest.mark.parametrize("selector", ["last", "uniform"])
def test_nothing_changes(selector):
    session, twin = (
        answered(omnikv(16, selector=selector), backend="reference"),
        answered(omnikv(16, selector=selector), backend="reference"),
    )
    session.check(20)
    for token in (3, 4, 5):
        assert torch.equal(session.decode(token), twin.decode(token))
    for layer in range(8):
        for ours, theirs in zip(
            session.bank.kv(layer, len(session)), twin.bank.kv(layer, len(twin))
        ):
            assert torch.equal(ours, theirs)


def test_numbers_equal_an_independent_computation():
    """KL from two separate sessions, mass from a float64 softmax over the bank's own rows."""
    session = answered(omnikv(16), backend="reference")
    step = session.check(1).steps[0]
    n = len(session)
    last, chosen = session.ids[-1], session.selections
    full = answered(omnikv(16), backend="reference")
    full.truncate(n - 1)
    full.set_method(Full())
    p, q = (torch.log_softmax(s.double(), -1) for s in (full.decode(last), session.last_logits))
    assert step.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-6)
    assert (
        step.position == n - 1
        and step.full_token == int(p.argmax())
        and step.sparse_token == int(q.argmax())
    )
    start = tail_start(n, 64)
    rows = torch.cat([chosen[1], torch.arange(start, n)])
    queries = {}
    session.truncate(n - 1)
    attend = session.runtime.attend
    session.runtime.attend = lambda layer, q, s: (
        queries.__setitem__(layer, q[0, 0].double()),
        attend(layer, q, s),
    )[1]
    session.decode(last)
    k = session.bank.kv(3, n)[0][0].double()
    weights = torch.softmax(torch.einsum("hgd,hnd->hgn", queries[3].view(2, 2, 16), k) / 4.0, -1)
    assert step.mass[3] == pytest.approx(float(weights[..., rows].sum(-1).mean()), rel=1e-5)


def test_watch_samples_and_falls_back_to_exact():
    session = answered(omnikv(1))
    session.watch = Watch(every=4)
    for token in range(12):
        session.decode(token)
    assert (session.watch.steps, session.watch.sampled, session.watch.exact_steps) == (
        12,
        3,
        0,
    ) and session.watch.lowest < 0.9
    dense = session.stats.dense_steps
    session.watch = Watch(every=4, exact_below=0.999)
    for token in range(12):
        session.decode(token)
    assert session.watch.exact_steps == session.stats.dense_steps - dense > 0
    content = answered(omnikv(2000))
    content.watch = Watch(every=4, exact_below=0.9)
    content.decode(1)
    assert content.watch.mass == pytest.approx(1.0, abs=1e-5) and not content.watch.exact


def test_a_watched_answer_is_the_same_answer():
    plain, watched = (
        answered(omnikv(16), backend="reference"),
        answered(omnikv(16), backend="reference"),
    )
    watched.watch = Watch(every=2)
    for token in range(9):
        assert torch.equal(plain.decode(token), watched.decode(token))


def test_nothing_to_compare():
    with pytest.raises(SettingError, match="no sparse layer"):
        tiny_llm(Full()).session().check()
    with pytest.raises(SettingError, match="found a session of 0 tokens"):
        tiny_llm(omnikv(16)).session().check()
    with pytest.raises(SettingError, match="every=0"):
        Watch(every=0)
    with pytest.raises(SettingError, match="exact_below: found 2"):
        Watch(exact_below=2)


def test_rows_of_the_prompt_are_never_rewritten():
    """Asked for more steps than the answer has: the answer's are checked, no row of the bank
    changes.
    """
    session = answered(omnikv(16), backend="reference")
    before = [[rows.clone() for rows in session.bank.kv(layer, len(session))] for layer in range(8)]
    assert len(session.check(60).steps) == 24
    assert all(
        torch.equal(a, b)
        for layer in range(8)
        for a, b in zip(before[layer], session.bank.kv(layer, len(session)))
    )
