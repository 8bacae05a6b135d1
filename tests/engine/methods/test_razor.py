"""RazorAttention: against a float64 simulation in which what is dropped is a column of its own,
reduced to full attention and to a row for each dropped token, its rows counted, its files attacked.

tests/engine/methods/test_methods.py has the eight properties, test_forgetting.py the plan. Stops: a
head of the other kind, a window one token too wide, a token that is dropped twice or never, a mean
of other tokens, of another number, or that a way back has changed.
"""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import LLM
from engine.base.errors import SavedFileError, SettingError
from engine.methods.evict.by_head import compensated
from engine.methods.evict.by_head.compensated import Compensated, Dropped
from engine.methods.evict.by_head.kinds import highest
from engine.methods.evict.razor import Razor
from engine.methods.evict.razor_heads import heads_text
from engine.methods.evict.shared.store import Rows, reserved
from engine.methods.full import Full
from engine.methods.tables.head_table import facts_of
from tests.builders import POCKET, VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.method_table import duo_gates
from tests.engine.methods.official_simulation import Model, Shape
from tests.engine.methods.razor_simulation import RazorConversation, RazorRule

LAYERS = 3


def mixed(kv_heads):
    """Which heads are whole: runs of one, of several and none."""
    rows = ((True, False) * 8, (False, False, True, True) * 4, (False,) * 16)
    return tuple(row[:kv_heads] for row in rows)


def razor_of(whole, **settings):
    """A method whose retrieval heads are these."""
    scores = tuple(tuple(0.9 if head else 0.2 for head in row) for row in whole)
    count = sum(map(len, whole))
    share = sum(map(sum, whole)) / count
    method = Razor(heads=(scores, scores), induction=share, echo=0.0, **settings)
    assert method.whole == whole
    return method


@pytest.mark.parametrize(
    ("heads", "backend", "forget"),
    [
        ((4, 4), "reference", False),
        ((8, 2), "auto", False),
        ((8, 1), "auto", True),
        ((8, 4), "cpu", True),
    ],
)
@pytest.mark.parametrize("kind", ["mixed", "none"])
# the last window grows with the second prompt
@pytest.mark.parametrize(
    ("sinks", "recent", "part"), [(3, 19, 99), (0, 7, 99), (11, 1, 99), (2, 5, 3)]
)
def test_rows_and_logits_are_the_simulations(heads, backend, forget, kind, sinks, recent, part):
    """Two turns, in chunks, in groups of 1, 2, 4 and 8 query heads."""
    whole = mixed(heads[1]) if kind == "mixed" else ((False,) * heads[1],) * LAYERS
    method = razor_of(whole, sinks=sinks, recent=recent, compression=part, forget=forget)
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=13)
    rule = RazorRule("razor", 0, recent, sink=sinks, whole=whole, part=part)
    oracle = RazorConversation(Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule)
    with llm.session(method) as session:
        every = random.Random(1).sample(range(VOCAB), VOCAB)
        for prompt, answer in ((37, 9), (23, 9)):
            ids, every = every[: prompt + answer], every[prompt + answer :]
            np.testing.assert_allclose(
                session.prefill(ids[:prompt]).numpy(), oracle.prompt(ids[:prompt]), atol=1e-4
            )
            for token in ids[prompt:]:
                logits = session.decode(token).numpy()
                np.testing.assert_allclose(logits, oracle.step(token), atol=1e-4)
            for layer in range(LAYERS):
                alive = oracle.alive[layer]
                kept = [np.flatnonzero(row).tolist() for row in alive]
                assert session.runtime.positions(layer) == kept
        for layer in range(LAYERS):
            store = session.runtime.store(layer)
            counts = {len(oracle.dropped(layer, h)) for h in store.few}
            assert counts <= {store.dropped.count}
        # it was sparse, and the mean stood for something
        assert store.dropped.count > 0 and session.stats.sparse_steps == 18


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_retrieval_heads_alone_are_full_attention_to_the_bit(shape, forget):
    whole = ((True,) * shape[2],) * shape[0]
    method = razor_of(whole, sinks=0, recent=1, forget=forget)
    less = ((True,) * (shape[2] - 1) + (False,), *whole[1:])
    less = razor_of(less, sinks=0, recent=1, forget=forget)
    with llm_of(shape).session(method) as one, llm_of(shape).session(Full()) as other:
        for seed, (prompt, answer) in enumerate(((131, 3), (1, 2), (64, 2))):
            ids = random_ids(prompt + answer, seed=seed)
            assert torch.equal(one.prefill(ids[:prompt]), other.prefill(ids[:prompt]))
            for token in ids[prompt:]:
                assert torch.equal(one.decode(token), other.decode(token))
        assert all(one.runtime.store(i).logs is None for i in range(shape[0]))
    # and one head less is not
    with llm_of(shape).session(less) as one, llm_of(shape).session(Full()) as other:
        one.prefill(random_ids(60)), other.prefill(random_ids(60))
        assert not torch.allclose(one.decode(3), other.decode(3), atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_retrieval_head_beside_others_is_dense_to_the_bit(backend):
    """In the first layer, whose queries are those of full attention."""
    method = Razor(heads=(duo_gates(),) * 2, induction=0.5, recent=20)
    (number,) = [i for i, every in enumerate(method.whole[0]) if every]
    seen = []
    for one in (method, replace(method, induction=1.0)):
        with llm_of(backend=backend).session(one) as session:
            plain = session.runtime.attend

            def look(layer, q, step, plain=plain):
                out = plain(layer, q, step)
                if layer == 0:
                    seen.append(out.clone())
                return out

            session.prefill(random_ids(300))
            session.runtime.attend = look
            for token in random_ids(20, seed=1):
                session.decode(token)
    group = seen[0].shape[2] // len(method.whole[0])
    own = slice(number * group, number * group + group)
    assert len(seen) == 40
    for one, other in zip(seen[:20], seen[20:]):
        assert torch.equal(one[:, :, own], other[:, :, own])
        assert not torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "auto", "cpu"])
def test_nothing_changes_before_something_is_dropped(backend):
    """A short text is full attention's, to the bit; the first token more is not."""
    method = razor_of(((False, False),) * 7, sinks=3, recent=50)
    with llm_of(backend=backend).session(method) as one, llm_of(backend=backend).session() as two:
        ids = random_ids(70)
        assert torch.equal(one.prefill(ids[:40]), two.prefill(ids[:40]))
        for n, token in enumerate(ids[40:], 41):
            found, expected = one.decode(token), two.decode(token)
            # sinks and 49 before it
            assert torch.equal(found, expected) == (n <= 53), n


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("forget", [False, True])
def test_other_heads_read_no_more_than_sinks_window_and_mean(forget, monkeypatch):
    method = Razor(heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=30, forget=forget)
    seen, plain = [], compensated.decode_ragged

    def look(q, k, v, starts, lengths, most, *more):
        seen.append((lengths.tolist(), most))
        return plain(q, k, v, starts, lengths, most, *more)

    monkeypatch.setattr(compensated, "decode_ragged", look)
    with llm_of().session(method) as session:
        for prompt, answer in ((150, 40), (90, 5)):
            session.prefill(random_ids(prompt, seed=prompt))
            newest = max(30, len(session) // 5)
            for token in random_ids(answer, seed=1):
                seen.clear()
                session.decode(token)
                assert len(seen) == 7  # one call a layer
                # the second prompt's tokens fill the wider window
                for lengths, most in seen:
                    assert (
                        sorted(lengths) == [4 + newest + 1, len(session)]
                        and most == lengths[lengths.index(len(session))]
                    )
                rows = (4 + newest + len(session)) // 2
                assert session.runtime.rows_read(len(session)) == [rows] * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_head_never_moves_and_its_mean_is_of_what_left_it(dtype):
    """600 steps: the run of rows is one allocation as long as no whole head grows, and the mean is
    within rounding of the float64 mean of what is gone, which a mean kept in 16 bits is not.
    """
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 700, 16, generator=generator) + 1 for _ in range(2))
    k, v = k.to(dtype), v.to(dtype)
    parts = [
        Rows(
            slice(i, i + 1),
            k[i : i + 1, :9],
            v[i : i + 1, :9],
            torch.arange(9)[None].int(),
            None,
            9,
        )
        for i in range(2)
    ]
    store = Compensated(parts, (False, False), Dropped.nothing(2, 16, k.device), 3, 9)
    places = set()
    for at in range(9, 609):
        store.put(k[:, at], v[:, at], at)
        places.add(store.k.data_ptr())
        store = store.counted()
    assert len(places) == 1 and store.dropped.count == 600 and store.most == 3 + 6 + 2
    for i, rows in enumerate(store):
        assert sorted(rows.positions[0, :9].tolist()) == [0, 1, 2, *range(603, 609)]
        order = rows.positions[0, :9].long()
        assert torch.equal(rows.kv()[0][0], k[i, order]) and torch.equal(
            rows.kv()[1][0], v[i, order]
        )
        for found, every in zip(store.mean(i), (k, v)):
            exact = every[i, 3:603].double().mean(0)
            rough = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
            assert (found.double() - exact).abs().max() <= rough * exact.abs().max()


@pytest.mark.parametrize("counts", [(1, 2), (16, 15), (17, 16), (40, 1)])
@pytest.mark.parametrize("backend", ["reference", "auto", "cpu"])
def test_attention_is_that_over_a_row_for_each_dropped_token(counts, backend):
    """A mean counted n times is n rows of it, whatever the whole head beside it holds."""
    held, sinks = counts[0], 0
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2, 300, 32, generator=generator)
    whole = Rows(slice(0, 1), k[:1, :50], v[:1, :50], torch.arange(50)[None].int(), None, 50)
    some = Rows(slice(1, 2), k[1:, :held], v[1:, :held], torch.arange(held)[None].int(), None, held)
    gone = Dropped(torch.stack([k[1, 100:229].sum(0), v[1, 100:229].sum(0)])[None], 129)
    store = Compensated([whole, some], (True, False), gone, sinks, max(counts))
    q = torch.randn(1, 1, 8, 32, generator=generator)
    store.put(k[:, 250], v[:, 250], 250)
    with llm_of(backend=backend).session() as session:
        out = store.attend(q, 0.2, replace(session.runtime.setup, scratch=None))
    for head, n, often in ((0, 50, 0), (1, held, 129)):
        mean = (t.view(1, 1, 32).expand(1, often, 32) for t in gone.sums[0] / 129)
        rows = [
            torch.cat([t[head : head + 1, :n], t[head : head + 1, 250:251], m], 1).double()
            for t, m in zip((k, v), mean)
        ]
        mine = q[0, :, 4 * head : 4 * head + 4].double()
        logits = torch.einsum("qhd,td->qht", mine, rows[0][0]) * 0.2
        exact = logits.softmax(-1) @ rows[1][0]
        torch.testing.assert_close(
            out[0, :, 4 * head : 4 * head + 4].double(), exact, atol=2e-6, rtol=2e-6
        )
    assert reserved(held, held) >= held


@pytest.mark.parametrize("side", ["k", "v", "logs"])
def test_the_mean_is_read(side):
    method = Razor(heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=30)
    with llm_of().session(method) as session:
        session.prefill(random_ids(150))
        store = session.runtime.store(3)
        with torch.inference_mode():
            getattr(store, side)[store.means[0]] = float("nan")
        assert session.decode(5).isnan().any()


# ---------------------------------------------------------------- going on, going back


@pytest.mark.parametrize("forget", [False, True])
def test_ways_back_are_exact(forget):
    """Truncate, fork and rerun: rows, means and logits of a session that never went on."""
    method = Razor(
        heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=20, compression=9, forget=forget
    )
    ids = random_ids(210, seed=3)
    with llm_of().session(method) as session:
        session.prefill(ids[:100])
        for token in ids[100:115]:
            session.decode(token)
        session.prefill(ids[115:200])
        for token in ids[200:]:
            session.decode(token)
        for n in (209, 200, 108, 60):
            with session.fork() as copy, llm_of().session(method) as fresh:
                copy.truncate(n)
                fresh.prefill(ids[: min(n, 100)])
                for token in ids[100 : min(n, 115)]:
                    fresh.decode(token)
                if n > 115:
                    fresh.prefill(ids[115 : min(n, 200)])
                for token in ids[200:n]:
                    fresh.decode(token)
                for layer in range(7):
                    mine, theirs = copy.runtime.store(layer), fresh.runtime.store(layer)
                    if mine is None:
                        continue
                    assert mine.dropped.count == theirs.dropped.count
                    assert torch.allclose(mine.dropped.sums, theirs.dropped.sums, atol=1e-4)
                for token in (7, 8):
                    found, expected = copy.decode(token), fresh.decode(token)
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert len(session) == 210


def test_a_session_from_nothing_and_one_that_was_interrupted():
    method, ids = razor_of(((False, True),) * 7, sinks=2, recent=9), random_ids(60)
    with llm_of().session(method) as one, llm_of().session(method) as other:
        for token in ids[:30]:
            stepped = one.decode(token)
        other.prefill(ids[:1])
        for token in ids[1:30]:
            again = other.decode(token)
        torch.testing.assert_close(stepped, again, atol=1e-4, rtol=0)
        assert one.runtime.positions(0) == other.runtime.positions(0)
        assert len(one.runtime.positions(0)[0]) == 2 + 9 - 1
    with llm_of(chunk=16).session(method) as one, llm_of().session(method) as other:

        def stop(_):
            if len(one) >= 32:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            one.prefill(ids, stop)
        # what was read is a prompt of its own
        other.prefill(ids[: len(one)])
        rest = ids[len(one) :]
        torch.testing.assert_close(one.prefill(rest), other.prefill(rest), atol=1e-5, rtol=0)
        torch.testing.assert_close(one.decode(3), other.decode(3), atol=1e-5, rtol=0)
        assert one.stats.store_bytes == other.stats.store_bytes


def test_a_step_that_breaks_off_changes_nothing(monkeypatch):
    method = razor_of(((False, True),) * 7, sinks=2, recent=20)
    with llm_of().session(method) as one, llm_of().session(method) as other:
        for session in (one, other):
            session.prefill(random_ids(100))
        plain = one.runtime.attend

        def breaks(layer, q, step):
            if layer == 4:
                raise KeyboardInterrupt
            return plain(layer, q, step)

        one.runtime.attend = breaks
        with pytest.raises(KeyboardInterrupt):
            one.decode(9)
        one.runtime.attend = plain
        for token in (5, 6, 7):
            assert torch.equal(one.decode(token), other.decode(token))


# ---------------------------------------------------------------- files


def test_a_saved_session_brings_its_heads_and_its_means(tmp_path):
    method = Razor(heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=20, forget=True)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        for token in random_ids(7, seed=1):
            session.decode(token)
        session.save(tmp_path / "s")
        back, _ = llm_of().restore(tmp_path / "s")
        with back:
            assert back.method == method
            for token in (5, 6):
                assert torch.equal(back.decode(token), session.decode(token))


@pytest.mark.parametrize("damage", range(6))
def test_a_file_whose_heads_hold_something_else_is_refused(damage, tmp_path):
    method = Razor(heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=20, forget=True)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        *rest, dropped = session.runtime.state()
        sums, count = dropped[0]
        dropped[0] = [
            (sums, count + 1),
            (sums, True),
            (sums[:, :1], count),
            (sums.half(), count),
            (sums, -count),
            (sums, count),
        ][damage]
        if damage == 5:
            dropped.pop()
        session.runtime.state = lambda: (*rest, dropped)
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="makes no session"):
        llm_of().restore(tmp_path / "s")


def test_heads_come_from_a_file_that_names_its_model(tmp_path):
    heads, llm, path = (duo_gates(), duo_gates()[::-1]), llm_of(), tmp_path / "razor.json"
    path.write_text(heads_text(heads, llm.config, {"made_by": "a test"}))
    method = Razor(heads=path)
    assert method.heads == heads and method.made_for == facts_of(llm.config)
    assert Razor(heads=str(path)) == method and replace(method, echo=0.3).heads == heads
    with llm.session(method) as session:
        session.prefill(random_ids(30))
    data = json.loads(path.read_text())
    data["model"]["vocab_size"] = 128256
    path.write_text(json.dumps(data))
    with pytest.raises(SettingError, match="heads: found those of a model with vocab_size 128256"):
        llm.session(Razor(heads=path))
    with pytest.raises(SettingError, match="32 layers of 8 K/V heads, expected 7 layers of 2, as"):
        llm.session(Razor(heads=(((0.5,) * 8,) * 32,) * 2))
    with pytest.raises(SettingError, match="heads: found none, .*tools.studies.razor_heads --mod"):
        llm.session(Razor())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(heads=5), "expected two tables .layer..K/V head., of echo and of induction scores"),
        (
            dict(heads=(duo_gates(), ((0.5,),))),
            "7 layers of 2 K/V heads and induction .* of 1 of 1",
        ),
        (dict(heads=(((0.5, 1.5),),) * 2), "found 1.5 for layer 0, K/V head 1, expected a number"),
        (dict(heads="nowhere.json"), "heads: .*nowhere.json.*make them in a clone"),
        (dict(tokens=5), "tokens: found 5, but razor has no budget for all heads; set induction"),
        (dict(share=0.5), "share: found 0.5, but razor has none; set induction"),
        (dict(induction=1.5), "induction: found 1.5, expected"),
        (dict(echo=-1), "echo: found -1, expected"),
        (dict(recent=0), "recent: found 0, expected"),
        (dict(compression=0), "compression: found 0, expected"),
        (dict(sinks=-1), "sinks: found -1, expected"),
    ],
)
def test_bad_settings_are_named(settings, said):
    with pytest.raises(SettingError, match=said):
        Razor(**settings)


def test_the_highest_of_both_scores_keep_everything():
    """A head is whole by either; of equal scores the earlier heads'."""
    echo, induction = ((0.1, 0.9), (0.2, 0.3)), ((0.8, 0.1), (0.8, 0.1))
    method = Razor(heads=(echo, induction), induction=0.25, echo=0.25)
    assert method.whole == ((True, True), (False, False))
    assert replace(method, induction=0.5).whole == ((True, True), (True, False))
    assert replace(method, induction=0.0, echo=0.0).whole == ((False, False),) * 2
    assert highest(echo, 0.6) == {(0, 1), (1, 1)}  # 2.4 heads are 2


def test_the_shipped_heads_are_the_shipped_models():
    method = Razor(heads=POCKET / "razor.json", recent=64)
    assert sum(map(sum, method.whole)) == 2
    with LLM(str(POCKET), method=method, max_context=1024, threads=1).session() as session:
        session.prefill(list(range(5, 805)))
        assert sorted(session.runtime.rows_read(800))[0] == 4 + 160
