"""DuoAttention: against a float64 simulation with masks, reduced to full attention and to a window
with sinks, its heads' rows counted, freed as a prompt goes, and its files of gates.

tests/engine/methods/test_methods.py has the eight properties, test_forgetting.py the plan and the
way back. Stops: a head that is taken for the other kind, a window one token too wide, rows of
streaming heads that stay, gates of another model, a file that is none.
"""

import json
import os
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.base.errors import SavedFileError, SettingError
from engine.base.figures import brief
from engine.methods.evict import duo
from engine.methods.evict.duo import Duo, attend_lambda
from engine.methods.evict.duo_gates import gates_text, read_gates
from engine.methods.full import Full
from engine.methods.tables.head_table import facts_of
from kernels.prefill.dense import prefill_dense
from tests.builders import POCKET, VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.method_checks import SHAPES, allocated, llm_of
from tests.engine.methods.method_table import duo_gates
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3


@dataclass(frozen=True)
class DuoRule(Rule):
    """whole: [layer][K/V head] whether it sees everything; sink, recent of the others."""

    whole: tuple = ()


class DuoConversation(Conversation):
    """As Conversation: every token stays, and a mask says what a query sees."""

    def _logits(self, layer, q, at):
        model, keys = self.model, np.repeat(self.keys[layer], self.group, axis=1)
        there = np.arange(len(keys))
        found = model.rotate(q, at).transpose(1, 0, 2) @ model.rotate(keys, there).transpose(
            1, 2, 0
        )
        seen = np.zeros(found.shape, dtype=bool)
        for h in range(len(seen)):
            for i, p in enumerate(at):
                for j in range(p + 1):
                    far = j >= self.rule.sink and p - j > self.rule.recent
                    seen[h, i, j] = self.rule.whole[layer][h // self.group] or not far
        return np.where(seen, found / np.sqrt(model.shape.head_dim), -np.inf)

    def kept(self, layer):
        n = len(self.keys[layer])
        few = [i for i in range(n) if i < self.rule.sink or i >= n - self.rule.recent]
        return [list(range(n)) if whole else few for whole in self.rule.whole[layer]]


def mixed(kv_heads):
    """Which heads are whole: runs of one, of several and of all."""
    rows = ((True, False) * 8, (False, False, True, True) * 4, (False,) * 16)
    return tuple(row[:kv_heads] for row in rows)


def gates_of(whole):
    return tuple(tuple(0.9 if head else 0.2 for head in row) for row in whole)


@pytest.mark.parametrize(
    ("heads", "backend", "forget"),
    [
        ((4, 4), "reference", False),
        ((8, 2), "auto", False),
        ((8, 1), "auto", True),
        ((8, 4), "auto", True),
    ],
)
@pytest.mark.parametrize("kind", ["mixed", "streaming"])
@pytest.mark.parametrize(("sinks", "recent"), [(3, 19), (0, 7), (11, 1)])
def test_rows_and_logits_are_the_simulations(heads, backend, forget, kind, sinks, recent):
    """Two turns, in chunks, in groups of 1, 2, 4 and 8 query heads: a window with sinks and true
    positions where no head is whole.
    """
    whole = mixed(heads[1]) if kind == "mixed" else ((False,) * heads[1],) * LAYERS
    method = Duo(gates=gates_of(whole), threshold=0.5, sinks=sinks, recent=recent, forget=forget)
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=13)
    rule = DuoRule("duo", 0, recent, sink=sinks, whole=whole)
    oracle = DuoConversation(Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule)
    with llm.session(method) as session:
        every = random.Random(1).sample(range(VOCAB), VOCAB)
        for turn, (prompt, answer) in enumerate(((37, 5), (23, 4))):
            ids, every = every[: prompt + answer], every[prompt + answer :]
            np.testing.assert_allclose(
                session.prefill(ids[:prompt]).numpy(), oracle.prompt(ids[:prompt]), atol=1e-4
            )
            for token in ids[prompt:]:
                logits = session.decode(token).numpy()
                np.testing.assert_allclose(logits, oracle.step(token), atol=1e-4)
            for layer in range(LAYERS):
                assert session.runtime.positions(layer) == oracle.kept(layer), (turn, layer)
        few = [rows.held for layer in session.runtime.sequences[0].layers for rows in layer]
        assert min(few) == sinks + recent < len(session) and session.stats.sparse_steps == 9


# ---------------------------------------------------------------- reductions, the window itself


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gates_of_one_are_full_attention_to_the_bit(shape, forget):
    whole = ((1.0,) * shape[2],) * shape[0]
    method = Duo(gates=whole, threshold=1.0, sinks=0, recent=1, forget=forget)
    with llm_of(shape).session(method) as one, llm_of(shape).session(Full()) as other:
        for seed, (prompt, answer) in enumerate(((131, 3), (1, 2), (64, 2))):
            ids = random_ids(prompt + answer, seed=seed)
            assert torch.equal(one.prefill(ids[:prompt]), other.prefill(ids[:prompt]))
            for token in ids[prompt:]:
                assert torch.equal(one.decode(token), other.decode(token))
        # and one gate below is not
    less = replace(method, gates=((1.0,) * (shape[2] - 1) + (0.5,), *whole[1:]))
    with llm_of(shape).session(less) as one, llm_of(shape).session(Full()) as other:
        one.prefill(ids[:60]), other.prefill(ids[:60])
        assert not torch.allclose(one.decode(3), other.decode(3), atol=1e-4)


@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(((1, 1), (4, 1), (8, 1), (8, 2), (3, 3))),
    st.integers(1, 70),
    st.integers(0, 67),
    st.integers(0, 20),
    st.integers(1, 40),
    st.sampled_from((1, 700, 1 << 20)),
    st.integers(0, 99),
)
def test_blocks_of_queries_see_the_first_and_the_newest_rows(
    heads, count, first, sinks, recent, floats, seed
):
    """Against one masked softmax in float64, tiles of any size."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, count, heads[0], 16, generator=generator)
    k, v = torch.randn(2, heads[1], first + count, 16, generator=generator)
    found = [
        attend_lambda(q[:, at : at + step], k, v, first + at, sinks, recent, 0.3)
        for step in (max(1, floats // 200),)
        for at in range(0, count, step)
    ]
    at, there = torch.arange(first, first + count)[:, None], torch.arange(first + count)
    seen = (there <= at) & ((there < sinks) | (at - there <= recent))
    wide = [t.double().repeat_interleave(heads[0] // heads[1], 0) for t in (k, v)]
    logits = torch.einsum("chd,htd->hct", q[0].double(), wide[0]) * 0.3
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.einsum("hct,htd->chd", weights, wide[1])
    torch.testing.assert_close(torch.cat(found, 1)[0].double(), expected, atol=2e-6, rtol=2e-6)
    dense = prefill_dense(q, k[None], v[None], first, 0.3)
    assert torch.allclose(torch.cat(found, 1), dense, atol=1e-5) or not seen.equal(there <= at)


def test_tiles_of_few_queries_change_nothing(monkeypatch):
    method, logits = Duo(gates=duo_gates(), sinks=5, recent=20), []
    for floats in (1, 1 << 18):
        monkeypatch.setattr(duo, "tile_floats", lambda device, n=floats: n)
        with llm_of(chunk=512).session(method) as session:
            logits.append(session.prefill(random_ids(300)))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("forget", [False, True])
def test_streaming_heads_read_no_more_than_sinks_and_window(forget):
    """At every step of an answer, and hold no more between chunks where older rows are freed."""
    method, held = Duo(gates=duo_gates(), sinks=6, recent=30, forget=forget), []
    with llm_of(chunk=64).session(method) as session:
        attended = []
        plain = session.runtime.attend_step

        def look(sequence, layer, q, k, v, positions, at, softmax):
            attended.append((k.shape[1], at))
            return plain(sequence, layer, q, k, v, positions, at, softmax)

        session.prefill(random_ids(300), lambda _: held.append(sizes(session)))
        session.runtime.attend_step = look
        for token in random_ids(5, seed=1):
            session.decode(token)
        assert {k for k, at in attended if k <= at} == {37}
        # 7 layers of one head of each kind
        assert sum(k == at + 1 for k, at in attended) == sum(k == 37 for k, _ in attended) == 35
    if forget:
        assert [few for _, few in held[:4]] == [36] * len(held[:4])
        assert [many for many, _ in held[:4]] == [64, 128, 192, 256]
    else:
        assert held[0] is None  # all is in the bank


def sizes(session):
    """(most, least) rows of the layers' stores."""
    layers = session.runtime.sequences[0].layers
    if layers is None:
        return None
    held = [rows.held for layer in layers for rows in layer]
    return max(held), min(held)


def test_a_share_of_the_heads_is_half_of_the_bytes():
    """At half of the heads, of 450 tokens; with the gates' own order, ties to earlier heads."""
    method = Duo(gates=duo_gates(), sinks=6, recent=30, forget=True)
    assert all(sum(row) == 1 for row in method.whole)
    with llm_of().session(method) as session, llm_of().session(Full()) as full:
        for one in (session, full):
            one.prefill(random_ids(450))
        assert 0.5 < session.runtime.kv_bytes / (450 * 7 * 2 * 2 * 16 * 4) < 0.6
        assert allocated(session.bank) < allocated(full.bank) // 100
    flat = Duo(gates=((0.5, 0.5), (0.5, 0.7)), share=0.5).whole
    assert flat == ((True, False), (False, True))
    assert Duo(gates=((0.5, 0.5), (0.5, 0.7)), threshold=0.6).whole == (
        (False, False),
        (False, True),
    )
    shares = [sum(map(sum, Duo(gates=duo_gates(), share=s).whole)) for s in (0, 0.25, 0.5, 1)]
    assert shares == [0, 4, 7, 14]


def test_a_session_from_nothing_and_one_that_goes_on():
    """A first token by a step; fork and truncate are those of a fresh session."""
    method, ids = Duo(gates=duo_gates(), sinks=2, recent=9), random_ids(60)
    with llm_of().session(method) as one, llm_of().session(method) as other:
        stepped = [one.decode(token) for token in ids][-1]
        torch.testing.assert_close(stepped, other.prefill(ids), atol=1e-4, rtol=0)
        assert [one.runtime.positions(i) for i in range(7)] == [
            other.runtime.positions(i) for i in range(7)
        ]
        with one.fork() as copy, llm_of().session(method) as fresh:
            copy.truncate(31), fresh.prefill(ids[:31])
            for token in (ids[31], 7):
                torch.testing.assert_close(
                    copy.decode(token), fresh.decode(token), atol=1e-4, rtol=0
                )
        assert len(one) == 60


@pytest.mark.parametrize("forget", [False, True])
def test_an_interrupted_prompt_goes_on_or_is_answered(forget):
    """Stores had room for the whole; what is held afterwards is what is declared."""
    method, ids = Duo(gates=duo_gates(), sinks=3, recent=40, forget=forget), random_ids(330)
    for until in (300, 0):
        with llm_of().session(method) as session, llm_of().session(method) as fresh:

            def stop(_, session=session):
                if len(session) >= 128:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                session.prefill(ids[:300], stop)
            read = len(session)
            assert 0 < read < 300
            if until:
                found, expected = session.prefill(ids[read:300]), fresh.prefill(ids[:300])
            else:
                fresh.prefill(ids[:read])
                found, expected = session.decode(ids[read]), fresh.decode(ids[read])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            layers = range(session.plan.num_layers)
            assert [session.runtime.positions(i) for i in layers] == [
                fresh.runtime.positions(i) for i in layers
            ]
            assert session.stats.store_bytes == fresh.stats.store_bytes


def test_no_chunk_copies_what_whole_heads_hold():
    """The same memory from the first chunk to the last step that it has room for."""
    method, places = Duo(gates=duo_gates(), sinks=3, recent=40, forget=True), []
    with llm_of().session(method) as session:

        def look(_=None):
            layers = session.runtime.sequences[0].layers
            whole = [rows for layer in layers for rows in layer if rows.held > 43]
            places.append(tuple(rows.k.data_ptr() for rows in whole))

        session.prefill(random_ids(300), look)
        for token in random_ids(15, seed=1):
            session.decode(token)
            look()
        assert len(places) > 15 and len(set(places)) == 1 and len(places[0]) == 7
        session.decode(1), look()
        assert places[-1] != places[0]


# ---------------------------------------------------------------- going back


def talked(session, stop, ids):
    """A session that has read and answered two prompts, up to `stop` tokens."""
    for first, last, read in ((0, 120, True), (120, 126, False), (126, 190, True)):
        part = ids[first : min(last, stop)]
        if part and read:
            session.prefill(part)
        for token in () if read else part:
            session.decode(token)
    for token in ids[190:stop]:
        session.decode(token)
    return session


def positions(session):
    return [session.runtime.positions(layer) for layer in range(session.plan.num_layers)]


def test_a_savepoint_has_the_number_of_whole_rows_and_leads_back_to_them(tmp_path):
    """Over steps that grow the stores, other tokens after a way back, a fork whose original went
    back and on, and a file.
    """
    llm, ids = llm_of(), random_ids(230, seed=4)
    method = Duo(gates=duo_gates(), sinks=4, recent=20, forget=True)
    row = 2 * llm.config.head_dim * 4 + 4
    with llm.session(method) as session, llm.session(method) as one:
        talked(session, 230, ids)
        heads = 2 * llm.config.num_layers
        streaming = heads - sum(map(sum, session.method.whole))
        assert session.history.nbytes == 2 * streaming * 24 * row
        fork = session.fork()
        talked(one, 200, ids)
        session.truncate(200)
        assert torch.equal(session.decode(7), one.decode(7)) and positions(session) == positions(
            one
        )
        for token in random_ids(60, seed=5):  # where other rows were
            session.decode(token)
        session.save(tmp_path / "s")
        back, _ = llm.restore(tmp_path / "s")
        with llm.session(method) as whole:
            talked(whole, 230, ids)
            assert torch.equal(fork.decode(8), whole.decode(8))
        for other in (fork, back, session):
            with other, llm.session(method) as fresh:
                talked(fresh, 128, ids)
                other.truncate(128)
                assert torch.equal(other.decode(9), fresh.decode(9))
                assert positions(other) == positions(fresh)


# ---------------------------------------------------------------- files


def test_a_saved_session_brings_its_gates(tmp_path):
    method = Duo(gates=duo_gates(), sinks=4, recent=20, forget=True)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        session.save(tmp_path / "s")
        back, _ = llm_of().restore(tmp_path / "s")
        with back:
            assert back.method == method
            assert torch.equal(back.decode(5), session.decode(5))


@pytest.mark.parametrize("damage", ["numbers alone", "one too many", "of a streaming head"])
def test_a_file_whose_savepoint_counts_what_is_not_there_is_refused(damage, tmp_path):
    method = Duo(gates=duo_gates(), sinks=4, recent=20, forget=True)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        runtime = session.runtime
        at, prompt, budgets, layers, sums = found = runtime.savepoint()
        if damage == "numbers alone":
            runtime.state = lambda: found
        else:
            whole = damage == "one too many"
            i = next(i for i, part in enumerate(layers[0]) if (type(part[2]) is int) == whole)
            held = 121 if whole else 24
            layers[0][i] = (*layers[0][i][:2], held, None, 0, None)
            point = replace(session.history.savepoints[-1], state=found)
            session.history.keep([point])
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="makes no session"):
        llm_of().restore(tmp_path / "s")


@pytest.mark.parametrize("damage", ["a row less", "heads of both kinds in one"])
def test_a_file_whose_heads_keep_others_rows_is_refused(damage, tmp_path):
    method = Duo(gates=duo_gates(), sinks=4, recent=20, forget=True)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        at, prompt, budgets, layers, sums = session.runtime.state()
        i = next(i for i, part in enumerate(layers[0]) if part[2].shape[1] == 24)
        first, stop, positions, scores, base, (k, v) = layers[0][i]
        layers[0][i] = (first, stop, positions[:, 1:], scores, 1, (k[:, 1:], v[:, 1:]))
        if damage != "a row less":
            part = (0, 2, positions.expand(2, -1), None, 1, (k.expand(2, -1, -1),) * 2)
            layers[0] = [part]
        session.runtime.state = lambda: (at, prompt, budgets, layers, sums)
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="makes no session"):
        llm_of().restore(tmp_path / "s")


def test_gates_come_from_both_kinds_of_files(tmp_path):
    """The published table, between tabs or spaces, and ours, which names the model."""
    gates, config = duo_gates(), llm_of().config
    table, ours = tmp_path / "full_attention_heads.tsv", tmp_path / "duo.json"
    np.savetxt(table, np.array(gates), delimiter="\t")
    assert Duo(gates=table) == Duo(gates=str(table)) == Duo(gates=gates)
    np.savetxt(table, np.array(gates), delimiter=" ")
    assert read_gates(table) == (gates, ())
    # as published: the last step of a training went past the ends
    table.write_text("8.59375000e-01\t-9.25064086e-05\n1.00146484e+00\t1.17675781e-01\n")
    assert read_gates(table)[0] == ((0.859375, 0.0), (1.0, 0.117675781))
    ours.write_text(gates_text(gates, config, {"made_by": "a test"}))
    method = Duo(gates=ours)
    assert method.gates == gates and method.made_for == facts_of(config)
    assert replace(method, share=0.2).made_for == method.made_for
    with llm_of().session(method) as session:
        session.prefill(random_ids(30))


def test_gates_of_another_model_are_named(tmp_path):
    llm, config = llm_of(), llm_of().config
    with pytest.raises(
        SettingError, match="with 32 layers of 8 K/V heads, expected 7 layers of 2, as this model"
    ):
        llm.session(Duo(gates=((0.5,) * 8,) * 32))
    path = tmp_path / "duo.json"
    data = json.loads(gates_text(duo_gates(), config, {}))
    data["model"]["vocab_size"] = 128256
    path.write_text(json.dumps(data))
    with pytest.raises(SettingError, match="vocab_size 128256, expected 97, as this model has"):
        llm.session(Duo(gates=path))


def test_the_shipped_gates_are_the_shipped_models():
    """Half of its heads: those of four layers, whose stores hold the document."""
    method = Duo(gates=POCKET / "duo.json")
    assert [i for i, row in enumerate(method.whole) if row == (True, True)] == [2, 4, 6, 7]
    assert sum(map(sum, method.whole)) == 8
    with LLM(str(POCKET), method=method, max_context=1024, threads=1).session() as session:
        session.prefill(list(range(5, 805)))
        assert session.runtime.rows_read(800) == [320, 320, 800, 320, 800, 320, 800, 800]


def test_a_table_of_many_heads_is_cut_where_it_is_shown():
    assert len(brief(Duo(gates=((0.5,) * 8,) * 32))) < 120
    assert str(duo_gates()) in brief(Duo(gates=duo_gates()))


def test_without_gates_a_line_says_how_to_make_them():
    with pytest.raises(SettingError, match="gates: found none, .*tools.studies.duo_gates --model"):
        llm_of().session(Duo())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found \\[\\], expected a table"),
        ("0.1 0.2\n0.3\n", "found 1 K/V heads in layer 1 and 2 in layer 0"),
        ("0.1 x\n", "found '0.1 x' as layer 1"),
        ("0.1 nan\n", "found nan for layer 0, K/V head 1"),
        ("0.1 inf\n", "found inf for layer 0"),
        ("0.1 1.5\n", "found 1.5 for layer 0, K/V head 1, expected a number from 0 to 1"),
        ("-0.1 1\n", "found -0.1"),
        ("{", "not valid JSON"),
        ("{}", "no file of gates"),
        ('{"format": 2, "model": {}, "gates": [[1]]}', "expected format 1"),
        ('{"format": 1, "model": {}}', "found None, expected a table"),
        ('{"format": 1, "model": {}, "gates": [[NaN]]}', "found nan"),
        ('{"format": 1, "model": {}, "gates": [[true]]}', "found True"),
        ('{"format": 1, "model": {}, "gates": [1]}', "expected a table"),
        ('{"format": 1, "model": {"layers": [1]}, "gates": [[1]]}', "made_for: found"),
        ('{"format": 1, "format": 1, "gates": [[1]]}', "given twice"),
        ("[" * 100_000, "as layer 1"),
        ('{"gates": ' + "[" * 100_000, "not valid JSON"),
        ("0.5 " * 5000, "equally many, at most 4096"),
        ("0.5\n" * 5000, "expected a table"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, text, words):
    path = tmp_path / "gates"
    path.write_text(text)
    with pytest.raises(SettingError, match=words) as error:
        Duo(gates=path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_files_that_cannot_be_read_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b"0 " * (3 << 20))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0.1")
    for name, words in (
        ("none", "the file is missing"),
        ("pipe", "a pipe or device"),
        (".", "found a folder"),
        ("big", "expected at most 4194304"),
        ("bytes", "expected UTF-8"),
    ):
        with pytest.raises(SettingError, match=f"gates: .*{words}.*tools.studies.duo_gates"):
            Duo(gates=tmp_path / name)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=64), "tokens: found 64, but duo has no budget for all heads"),
        (dict(share=0.5, threshold=0.5), "at most one of share, threshold"),
        (dict(share=1.5), "share: found 1.5"),
        (dict(threshold=float("nan")), "threshold: found nan"),
        (dict(sinks=-1), "sinks: found -1"),
        (dict(recent=0), "recent: found 0"),
        (dict(recent=2.5), "recent: found 2.5"),
        (dict(gates=3), "gates: found 3"),
        (dict(gates=((0.5,), ("1",))), "gates: found '1' for layer 1"),
        (dict(made_for=((1, 2),)), "made_for: found"),
        (dict(forget=1), "forget: found 1"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        Duo(**bad)
